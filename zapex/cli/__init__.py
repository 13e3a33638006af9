"""The command line: arguments and files become settings."""
