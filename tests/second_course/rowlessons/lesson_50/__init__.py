"""Lesson 50: rows and columns."""
