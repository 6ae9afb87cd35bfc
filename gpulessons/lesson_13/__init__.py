"""Lesson 13: The articles on trial.

Which sentences of four articles hold; a verdict of your own.
"""
