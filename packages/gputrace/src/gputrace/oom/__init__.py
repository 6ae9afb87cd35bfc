"""Explanation of out-of-memory errors."""
