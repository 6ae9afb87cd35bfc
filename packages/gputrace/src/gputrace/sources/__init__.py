"""Sources of a recording's events and spans."""
