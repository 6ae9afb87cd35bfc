"""A virtual NCCL: process groups of ranks that have a virtual GPU each, each rank a process of its own."""
