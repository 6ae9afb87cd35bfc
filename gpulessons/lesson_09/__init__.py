"""Lesson 9: Fitting in memory."""
