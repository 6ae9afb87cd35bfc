"""What several processes know of one virtual machine, and the tensors that they send each other."""
