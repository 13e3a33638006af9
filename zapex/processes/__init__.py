"""Child processes: how they start, are watched, and end with their parent."""
