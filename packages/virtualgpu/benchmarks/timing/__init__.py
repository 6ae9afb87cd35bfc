"""Programs that measure times, their recordings on real GPUs, and the fit of the profiles."""
