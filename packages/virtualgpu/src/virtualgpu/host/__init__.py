"""The host of a virtual machine: its operators, its clock, its memory."""
