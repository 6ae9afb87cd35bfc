"""Lesson 3: DataParallel from the inside."""
