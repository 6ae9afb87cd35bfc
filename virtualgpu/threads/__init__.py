"""Host threads of one machine take turns, so that every run has the same order."""
