"""Lesson 7: Half precision."""
