"""What every rank holds before and after four collectives."""

import torch
import torch.distributed as dist

from gpulessons.rendezvous import meet

# Their names before torch 2.13 are deprecated since.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


rank, ranks, device = meet()
result: list[dict[str, object]] = []


def tell(collective: str, before: torch.Tensor, after: torch.Tensor) -> None:
    result.append({"collective": collective, "rank": rank, "before": before.tolist(), "after": after.tolist()})


mine = torch.arange(ranks, device=device) + 10 * (rank + 1)  # rank 0 holds 10, 11, 12, rank 1 holds 20, 21, 22

after = mine.clone()
dist.broadcast(after, src=0)
tell("broadcast", mine, after)

after = mine.clone()
dist.all_reduce(after)
tell("all_reduce", mine, after)

part = mine.new_empty(1)
reduce_scatter(part, mine)
tell("reduce_scatter", mine, part)

whole = mine.new_empty(ranks)
all_gather(whole, part)
tell("all_gather", part, whole)

dist.destroy_process_group()
