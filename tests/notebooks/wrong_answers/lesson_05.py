"""Wrong answers to the exercises of lesson 05: for each, what a learner may well write, and a part of what the check says."""

WRONG = {
    "05.1": {
        "always 20 MiB": ("def reserved_for(nbytes): return 20 * 2**20", "PyTorch reserved"),
        "the request decides, not the block": (
            """
def reserved_for(nbytes):
    MiB = 2**20
    if nbytes <= MiB:
        return 2 * MiB
    if nbytes < 10 * MiB:
        return 20 * MiB
    return -(-nbytes // (2 * MiB)) * 2 * MiB
""",
            "reserved 10 MiB; you said 20 MiB",
        ),
        "1 MiB is large": (
            """
def reserved_for(nbytes):
    MiB = 2**20
    block = -(-nbytes // 512) * 512
    if block < MiB:
        return 2 * MiB
    return 20 * MiB if block < 10 * MiB else -(-block // (2 * MiB)) * 2 * MiB
""",
            "reserved 2 MiB; you said 20 MiB",
        ),
        "in MiB": ("def reserved_for(nbytes): return 20", "you said 20 B"),
        "nothing returned": ("def reserved_for(nbytes): print(nbytes)", "returned NoneType"),
    },
    "05.2": {
        "contiguous views": ("def first_rows(batches, count): return [batch[:count].contiguous() for batch in batches]", "Whose storage"),
        "detached": ("def first_rows(batches, count): return [batch[:count].detach() for batch in batches]", "Whose storage"),
        "the whole cloned": ("def first_rows(batches, count): return [batch.clone()[:count] for batch in batches]", "Whose storage"),
        "to the CPU": ("def first_rows(batches, count): return [batch[:count].cpu() for batch in batches]", "on the CPU"),
        "the last rows": ("def first_rows(batches, count): return [batch[-count:].clone() for batch in batches]", "yours are others"),
        "one tensor": ("def first_rows(batches, count): return torch.stack([batch[:count] for batch in batches])", "not a list"),
    },
    "05.3": {
        "the largest block": (
            "def largest_free_block(): return max(b['size'] for s in torch.cuda.memory_snapshot() for b in s['blocks'])",
            "the largest free block here|Which blocks are free",
        ),
        "the largest segment": (
            "def largest_free_block(): return max(s['total_size'] for s in torch.cuda.memory_snapshot())",
            "Which blocks are free",
        ),
        "every GPU": (
            """
def largest_free_block():
    blocks = [block for segment in torch.cuda.memory_snapshot() for block in segment["blocks"]]
    return max(block["size"] for block in blocks if block["state"] == "inactive")
""",
            "on which GPU",
        ),
        "free on the device": ("def largest_free_block(): return torch.cuda.mem_get_info()[0]", "Which blocks are free"),
        "in MiB": ("def largest_free_block(): return 4.5", "not a whole number"),
    },
    "05.4": {
        "row by row": ("def in_pieces(work, batch): return torch.cat([work(row[None]) for row in batch])", "whole batch"),
        "row by row after a failure": (
            """
def in_pieces(work, batch):
    try:
        return work(batch)
    except torch.OutOfMemoryError:
        pass
    return torch.cat([work(row[None]) for row in batch])
""",
            "halve, and no more",
        ),
        "every error": (
            """
def in_pieces(work, batch):
    try:
        return work(batch)
    except RuntimeError:
        if len(batch) == 1:
            raise
    half = len(batch) // 2
    return torch.cat([in_pieces(work, batch[:half]), in_pieces(work, batch[half:])])
""",
            "not about memory",
        ),
        "no end": (
            """
def in_pieces(work, batch):
    try:
        return work(batch)
    except torch.OutOfMemoryError:
        pass
    half = len(batch) // 2
    return torch.cat([in_pieces(work, batch[:half]), in_pieces(work, batch[half:])])
""",
            "not even one row fitted",
        ),
        "two halves only": (
            """
def in_pieces(work, batch):
    try:
        return work(batch)
    except torch.OutOfMemoryError:
        pass
    half = len(batch) // 2
    return torch.cat([work(batch[:half]), work(batch[half:])])
""",
            "pieces of .* rows fit",
        ),
        "a cache emptied": (
            """
def in_pieces(work, batch):
    try:
        return work(batch)
    except torch.OutOfMemoryError:
        pass
    torch.cuda.empty_cache()
    return work(batch)
""",
            "pieces of .* rows fit",
        ),
    },
    "05.5": {
        "clones": (
            """
def compact(tensors):
    tensors[:] = [tensor.clone() for tensor in tensors]
    torch.cuda.empty_cache()
""",
            "lands in the free blocks",
        ),
        "copied while the old ones live": (
            """
def compact(tensors):
    tensors[:] = [tensor.cpu().cuda() for tensor in tensors]
    torch.cuda.empty_cache()
""",
            "lands in the free blocks",
        ),
        "no emptying": (
            """
def compact(tensors):
    copies = [tensor.cpu() for tensor in tensors]
    tensors.clear()
    tensors.extend(copy.cuda() for copy in copies)
""",
            "80 MiB afterwards",
        ),
        "left on the CPU": ("def compact(tensors): tensors[:] = [tensor.cpu() for tensor in tensors]", "on the CPU"),
        "thrown away": ("def compact(tensors): tensors.clear()", "same values"),
        "another list": (
            """
def compact(tensors):
    copies = [tensor.cpu() for tensor in tensors]
    torch.cuda.empty_cache()
    tensors = [copy.cuda() for copy in copies]
""",
            "80 MiB afterwards",
        ),
    },
}
