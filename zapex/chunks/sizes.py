"""The length of chunks and the number of slots, without arrays."""


def slots_needed(capacity: int, chunk: int, streams: int) -> int:
    """Slots for `capacity` transitions, 2 more for each stream (its credit), and 8 more."""
    return -(-capacity // chunk) + 2 * streams + 8


def chunk_length(capacity: int, streams: int, n_step: int) -> int:
    """K, the transitions of a chunk: few, so that one eviction takes a small part of the memory."""
    return max(n_step, min(64, capacity // (16 * max(1, streams))))
