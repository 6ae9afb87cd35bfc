"""A virtual NCCL: process groups whose ranks each have a process and a virtual GPU of their own."""
