"""What a user looks at and what a run records: terminal, files, curves."""
