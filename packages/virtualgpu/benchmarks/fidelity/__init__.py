"""Programs that ran on real GPUs, what they recorded, and programs that compare virtual GPUs with it."""
