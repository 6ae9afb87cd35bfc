"""The host of a virtual machine: CPU operators, Python's clocks and threads, data loading."""
