"""Programs that measure times, what they recorded on real GPUs, and what fits the profiles to it."""
