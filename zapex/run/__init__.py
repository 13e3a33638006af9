"""A training run: its topology, its processes, and the loop that watches them."""
