"""The memory of a training step of a network, on the first rank of a simulated world.

Arguments: the class of the network, and the setting as JSON. `result` has the phase of the step in
which most memory is allocated on the first GPU, and the bytes of each category at that moment.
"""

import json
import sys
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from gpulessons import networks
from gpulessons.lesson_09.training import Setting
from gputrace import record

fields = json.loads(sys.argv[2])
fields["network"] = getattr(networks, sys.argv[1])(**fields["network"])
setting = Setting(**fields)
dtype = networks.PRECISIONS[setting.precision]
rows, batch = setting.micro_rows, setting.batch
model = setting.network.build(setting.checkpointing)
parallel: nn.Module = model
if setting.gpus > 1 and setting.spread == "DDP":
    dist.init_process_group("nccl")
    parallel = DistributedDataParallel(model)
    rows, batch = setting.rows, -(-setting.batch // setting.gpus)
elif setting.gpus > 1:
    parallel = nn.DataParallel(model, list(range(setting.gpus)))
optimizer = networks.OPTIMIZERS[setting.optimizer](model.parameters())
inputs, targets = setting.network.batch(batch)
predictions = len(targets) // batch  # of each row


def step() -> None:
    """Train on two micro-batches at most: from the second one on, each needs the same memory."""
    optimizer.zero_grad()
    for first in range(0, min(2 * rows, batch), rows):
        end = first + rows
        with torch.autocast("cuda", dtype=dtype) if dtype else nullcontext():
            expected = targets[first * predictions : end * predictions]
            loss = F.cross_entropy(parallel(inputs[first:end]), expected)
        loss.backward()
    optimizer.step()


# The first step makes the optimizer's state. With more GPUs, two steps fill caches. NCCL's watchdog
# looks ten times a second which messages have arrived, and frees their buckets.
for _ in range(min(setting.gpus, 2)):
    step()
    torch.cuda.synchronize()
    time.sleep(0.2)
with record(timeline=False) as trace:
    step()
    torch.cuda.synchronize()
memory = trace.timeline(0)
fullest = int(memory.allocated.argmax())
moment = memory.times[fullest]
phase = next(phase.name for phase in trace.phases if phase.start <= moment <= phase.end)
terms = {name: int(column[fullest]) for name, column in trace.layers(0).items()}
result = {"phase": phase, "terms": terms}
if dist.is_initialized():
    dist.destroy_process_group()
