"""What several processes keep in shared memory about one virtual machine."""
