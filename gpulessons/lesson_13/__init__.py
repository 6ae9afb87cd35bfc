"""Lesson 13: The articles on trial."""
