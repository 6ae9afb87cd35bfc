"""Lesson 10: DistributedDataParallel from the inside."""
