"""Runs that a scheduler places: the table of hosts, and SLURM, Kubernetes and Ray."""
