"""Every number that the documentation states: measured, compared, written (claims.toml)."""
