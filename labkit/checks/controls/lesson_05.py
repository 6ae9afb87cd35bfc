"""Controls of lesson 05."""

CONTROLS = {
    # rounded to 512
    "05.1": (
        r"PyTorch reserved",
        r"""
def reserved_for(nbytes): return -(-nbytes // 512) * 512
""",
    ),
    # views
    "05.2": (
        r"Whose storage",
        r"""
def first_rows(batches, count): return [batch[:count] for batch in batches]
""",
    ),
    # all that is free
    "05.3": (
        r"all free blocks together",
        r"""
def largest_free_block(): return torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
""",
    ),
    # again inside except
    "05.4": (
        r"inside `except`",
        r"""
def in_pieces(work, batch):
    try:
        return work(batch)
    except torch.OutOfMemoryError:
        if len(batch) == 1:
            raise
        half = len(batch) // 2
        return torch.cat([in_pieces(work, batch[:half]), in_pieces(work, batch[half:])])
""",
    ),
    # the cache emptied
    "05.5": (
        r"80 MiB afterwards",
        r"""
def compact(tensors): torch.cuda.empty_cache()
""",
    ),
}
