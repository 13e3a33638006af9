"""A training run: how its roles are wired, their processes, and the loop that watches them.

train        one host has the whole run        networked    several hosts have parts of it
topologies   makes the roles of each part      child        runs one role in its process
parent       starts and watches processes      supervisor   restarts those that die
collector    reads what the roles report       keeping      saves and loads the experience
"""
