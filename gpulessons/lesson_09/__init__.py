"""Lesson 9: Fitting in memory.

Where a step's bytes go; a GPT that does not fit a T4, made to fit.
"""
