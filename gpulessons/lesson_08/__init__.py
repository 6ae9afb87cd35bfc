"""Lesson 8: Sharing GPU memory between processes.

Shared tensors, CUDA IPC, one server for all.
"""
