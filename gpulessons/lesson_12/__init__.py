"""Lesson 12: More than one machine."""
