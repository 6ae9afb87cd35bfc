"""Lesson 11: Sharding.

ZeRO, FSDP, tensor and sequence parallelism, HSDP, pipelines, experts, long contexts, sharded
checkpoints.
"""
