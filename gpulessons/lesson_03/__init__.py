"""Lesson 3: DataParallel from the inside.

Data parallelism from four functions, and when it pays.
"""
