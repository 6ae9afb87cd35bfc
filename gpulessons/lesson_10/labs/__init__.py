"""The lab of lesson 10."""

from gpulessons.lesson_10.labs.buckets import BucketsLab

__all__ = ["BucketsLab"]
