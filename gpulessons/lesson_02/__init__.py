"""Lesson 2: Streams and synchronization.

When GPU work is done, who waits unasked, how to overlap copies.
"""
