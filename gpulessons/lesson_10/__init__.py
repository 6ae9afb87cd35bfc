"""Lesson 10: DistributedDataParallel from the inside.

Ranks, all_reduce, a DDP of your own, one whole script.
"""
