"""Find the tensors that are alive on the GPUs, and what keeps them alive, by name."""
