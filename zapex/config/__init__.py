"""Settings: their fields, ranges and defaults, and the presets for a machine."""
