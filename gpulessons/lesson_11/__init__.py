"""Lesson 11: Sharding.

ZeRO, FSDP, tensor and sequence parallelism, HSDP, experts, long contexts, sharded checkpoints.
"""
