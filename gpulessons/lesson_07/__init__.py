"""Lesson 7: Half precision.

What fewer bits cost and give: formats, autocast, loss scaling.
"""
