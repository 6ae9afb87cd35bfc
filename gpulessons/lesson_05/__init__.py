"""Lesson 5: The caching allocator.

Allocated, reserved, fragmented; how to read an out-of-memory error.
"""
