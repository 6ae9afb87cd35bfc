"""CUDA streams and events, and the detector of races between streams."""
