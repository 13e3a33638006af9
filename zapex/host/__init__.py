"""What the processes of one host share: its memory plan, counters and actor numbers."""
