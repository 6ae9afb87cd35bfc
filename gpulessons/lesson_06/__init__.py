"""Lesson 6: Memory leaks."""
