"""The operators behind the layers and losses of `torch.nn`: one module a family."""
