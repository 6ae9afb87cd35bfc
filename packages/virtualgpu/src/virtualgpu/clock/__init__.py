"""The time of a machine, without torch.

Holds the clock, the seconds of kernels and copies, and the occupancy of a GPU.
"""
