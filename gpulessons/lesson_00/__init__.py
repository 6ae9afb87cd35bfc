"""Lesson 0: Start here.

How the course works, and where a figure's numbers come from.
"""
