"""The state of one virtual machine that several processes share in memory."""
