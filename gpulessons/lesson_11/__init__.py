"""Lesson 11: Sharding."""
