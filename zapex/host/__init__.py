"""What the processes of one host share: the plan of its memory, counters, actor numbers."""
