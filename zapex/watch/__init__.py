"""What a user looks at and what a run records: terminal, files, curves.

Imports: config, envs, errors, host, machine, version.
"""
