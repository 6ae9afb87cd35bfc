"""Experiments of one's own: `labkit.seconds`, `labkit.measure`, `labkit.Result`, `labkit.Lab`."""
