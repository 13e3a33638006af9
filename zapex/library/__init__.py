"""The replay for a user's own training loop: in this process, by a handle, or by a URL."""
