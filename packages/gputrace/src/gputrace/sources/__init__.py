"""Where a recording's events and spans come from."""
