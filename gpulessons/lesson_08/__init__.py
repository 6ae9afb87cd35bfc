"""Lesson 8: Sharing GPU memory between processes."""
