"""Lesson 4: Model parallelism.

A network cut among GPUs, micro-batches, pipeline schedules.
"""
