"""A training run: how its roles are wired, their processes, and the loop that watches them.

run          a run as data                      train        one host has the whole run
topologies   makes the roles of each part       networked    several hosts have parts of it
parent       starts and watches processes       child        runs one role in its process
collector    reads what the roles report        directory    the run's directory, and its lock
checkpoints  saves and loads networks           keeping      saves and loads the experience
preflight    what the machine must have         balance      measures how many actors it needs
network      builds the network of the settings
"""
