"""Studies: how actors and learner balance on this machine, and a model of a run on many hosts."""
