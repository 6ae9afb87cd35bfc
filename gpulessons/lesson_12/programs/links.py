"""How long an all_reduce takes between two ranks of one node, and between two ranks of different nodes.

Two nodes with two ranks each. `result` has a row for each pair and size: the milliseconds of the second all_reduce of so many bytes.
"""

import torch
import torch.distributed as dist

from gpulessons.rendezvous import meet

SIZES = (1 << 10, 256 << 20)  # bytes

rank, ranks, device = meet()
pairs = {"in a node": [[0, 1], [2, 3]], "between nodes": [[0, 2], [1, 3]]}
result = []
for where, groups in pairs.items():
    mine, _ = dist.new_subgroups_by_enumeration(groups)
    for nbytes in SIZES:
        x = torch.zeros(nbytes // 4, device=device)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(2):  # the first meets the others
            torch.cuda.synchronize()
            start.record()
            dist.all_reduce(x, group=mine)
            end.record()
            torch.cuda.synchronize()
        result.append({"where": where, "bytes": nbytes, "milliseconds": start.elapsed_time(end)})
dist.destroy_process_group()
