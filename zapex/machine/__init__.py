"""What the code stands on: the compiler, atomics, memory, waiting, child processes."""
