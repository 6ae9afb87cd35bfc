"""The files that a trace is written to: its own, Chrome's trace format, PyTorch's memory snapshot."""
