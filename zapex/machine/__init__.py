"""The lowest layer: the compiler, atomics, memory, layouts, waiting."""
