"""An out-of-memory error explained."""
