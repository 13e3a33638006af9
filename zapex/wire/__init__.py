"""Messages as bytes: every field of every message, and no socket."""
