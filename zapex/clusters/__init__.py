"""Runs that a scheduler places: the table of hosts, and SLURM, Kubernetes and Ray.

Imports: config, envs, errors, host, machine, net, processes.
"""
