"""The learning agent: networks, losses, optimisers and exploration.

Most modules load torch. The built-in networks and losses are named here, so that settings can be
checked without it.
"""

NETWORKS = {
    "nature": "zapex.agent.networks:Nature",
    "impala": "zapex.agent.networks:Impala",
}
LOSSES = {
    "squared": "zapex.agent.losses:squared",
    "huber": "zapex.agent.losses:huber",
}
