"""Environments: which there are, how they are stepped, and what their games score."""
