"""Lesson 6: Memory leaks.

What keeps a tensor alive, and how to find its line and holder.
"""
