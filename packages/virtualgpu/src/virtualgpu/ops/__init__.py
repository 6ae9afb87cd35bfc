"""The operators on virtual GPUs. Each module holds one family of operators."""
