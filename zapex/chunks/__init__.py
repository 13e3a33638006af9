"""The bytes of a transition: a slot, a message and a file have the same layout."""
