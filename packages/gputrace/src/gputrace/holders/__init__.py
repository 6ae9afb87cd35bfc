"""What is alive on the GPUs, and who keeps it alive, by name."""
