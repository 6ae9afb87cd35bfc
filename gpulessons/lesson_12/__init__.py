"""Lesson 12: Several machines.

torchrun on several nodes, a thousand GPUs, late ranks, restarts.
"""
