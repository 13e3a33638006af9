"""Learning as evidence: many seeds and games, ablations, another library at equal time."""
