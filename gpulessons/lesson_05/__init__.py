"""Lesson 5: The caching allocator."""
