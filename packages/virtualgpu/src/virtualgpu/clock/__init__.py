"""A machine's time, without torch: its clock, what a kernel or copy takes, how full a GPU is."""
