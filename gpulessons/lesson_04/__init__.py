"""Lesson 4: Model parallelism."""
