"""The answers of the CUDA driver, NVML and nvidia-smi about virtual GPUs."""
