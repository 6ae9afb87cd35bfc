"""Streams and events, and the search for races between them."""
