"""Lesson 2: Streams and synchronization."""
