"""Two schedules of torch.distributed.pipelining: a stage for each rank, the order of its work, and what comes out.

Arguments: the number of micro-batches, and the width of the layers and the rows of the batch. `peak`, on GPUs, is in bytes.
"""

import gc
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from gpulessons.rendezvous import meet

micro_batches, width, rows = map(int, sys.argv[1:])
rank, ranks, device = meet()


def layers() -> list[nn.Module]:
    """Two for each stage, the same on every rank, so that each may pick its own."""
    torch.manual_seed(0)
    return [nn.Linear(width, width) for _ in range(2 * ranks)]


result = []
for name, schedule_class in (("GPipe", ScheduleGPipe), ("1F1B", Schedule1F1B)):
    mine = nn.Sequential(*layers()[2 * rank : 2 * rank + 2]).to(device)
    order: list[str] = []
    mine.register_forward_hook(lambda *_, order=order: order.append("F"))
    mine[1].register_full_backward_hook(lambda *_, order=order: order.append("B"))
    stage = PipelineStage(mine, rank, ranks, device)
    schedule = schedule_class(stage, micro_batches, loss_fn=nn.functional.mse_loss)
    x = torch.linspace(-1, 1, rows * width, device=device).reshape(rows, width)
    gc.collect()  # the schedule before
    for _ in range(2):  # in the first step, the stages also find out the shapes of what they will send
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        order.clear()
        mine.zero_grad()
        losses: list[torch.Tensor] = []
        given = (x,) if rank == 0 else ()
        wanted: dict[str, Any] = {"target": x.sin(), "losses": losses} if rank == ranks - 1 else {}
        schedule.step(*given, **wanted)
    loss = sum(loss.item() for loss in losses) / len(losses) if losses else None
    gradients = [parameter.grad.norm().item() for parameter in mine.parameters() if parameter.grad is not None]
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    result.append({"schedule": name, "rank": rank, "order": "".join(order), "loss": loss, "gradients": gradients, "peak": peak})

dist.destroy_process_group()
