"""What the CUDA driver, NVML and nvidia-smi say of virtual GPUs."""
