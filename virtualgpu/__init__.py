"""The virtual GPU: `torch.cuda` on a machine without one. It knows nothing of notebooks."""
