"""Training that outlives its ranks: a checkpoint after every step, from which they go on when torchrun has started them again."""

import os
import signal
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gpulessons.rendezvous import meet

checkpoint, steps, dies = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
rank, ranks, device = meet()
restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])

torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(8, 1).to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
x = torch.randn(64, 8).to(device)  # a GPU draws other numbers
mine = x.chunk(ranks)[rank]

first = 0
if os.path.exists(checkpoint):
    state = torch.load(checkpoint, map_location=device)
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    first = state["step"] + 1
if rank == 0:
    print(f"start {restarts + 1}: from step {first}", flush=True)

for step in range(first, steps):
    if (rank, restarts, step) == (1, 0, dies):
        os.kill(os.getpid(), signal.SIGKILL)  # as the system ends a process when memory runs out
    loss = (model(mine) - mine.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, checkpoint + ".part")
        os.replace(checkpoint + ".part", checkpoint)  # whole or not at all, whenever this rank dies
        print(f"step {step}: bias {model.module.bias.item():.4f}", flush=True)
    dist.barrier()  # nobody goes on before the step is kept

result = model.module.bias.item()
dist.destroy_process_group()
