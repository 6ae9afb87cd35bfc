"""Lesson 50: rows and columns.

How to reduce one dimension of a table on the GPU.
"""
