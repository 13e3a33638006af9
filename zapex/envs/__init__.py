"""Environments: what is played, how it is stepped, and the results of games."""
