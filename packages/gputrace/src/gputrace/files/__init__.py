"""Files to which a trace is written: its own, a Chrome trace, and PyTorch's memory snapshot."""
