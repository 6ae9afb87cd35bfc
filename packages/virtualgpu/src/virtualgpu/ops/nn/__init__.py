"""The operators behind the layers and losses of `torch.nn`, with one module for each family."""
