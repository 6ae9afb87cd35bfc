"""Measure how long ranks take that only meet, and what a step of DDP costs on virtual GPUs.

Copies of the fork server are compared with new processes. The cost of a step is a multiple of the
same step without DDP. It is processor time, so other work on the machine does not count.

python benchmarks/ranks.py [ROUNDS]
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import labkit
from labkit.processes import forkserver

SCRIPT = """
import torch.distributed as dist
dist.init_process_group()
dist.barrier()
dist.destroy_process_group()
"""

STEPS = """
import os, time, torch, torch.distributed as dist
from torch import nn
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
x = torch.randn(32, 64, device="cuda")
def cost(wrap, steps=30):
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.ReLU())]
    model = wrap(nn.Sequential(*layers).cuda())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(5 + steps):
        if step == 5:
            torch.cuda.synchronize()
            begin = time.process_time()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    torch.cuda.synchronize()
    return time.process_time() - begin
alone = min(cost(nn.Sequential) for _ in range(3))
parallel = min(cost(nn.parallel.DistributedDataParallel) for _ in range(3))
result = parallel / alone
dist.destroy_process_group()
"""


def seconds(script: Path, **options: Any) -> float:
    begin = time.perf_counter()
    labkit.torchrun(script, quiet=True, **(options or {"ranks": 2, "devices": "cpu"}))
    return time.perf_counter() - begin


def main(rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "meet.py")
        script.write_text(SCRIPT)
        first = [seconds(script) for _ in range(2)]  # the server starts, and imports the rest
        warm = statistics.median(seconds(script) for _ in range(rounds))
        four = min(seconds(script, ranks=4, like="H200") for _ in range(rounds))
        script.write_text(STEPS)
        ratios = labkit.torchrun(script, ranks=2, like="H200", quiet=True).results
        script.write_text(SCRIPT)
        forkserver.end()
        forkserver.POSSIBLE = False
        afresh = statistics.median(seconds(script) for _ in range(rounds))
    print(f"first two jobs: {first[0]:.2f} s and {first[1]:.2f} s; then {warm:.2f} s each")
    print(f"four ranks with virtual GPUs: {four:.2f} s")
    print(
        f"a step of DDP on two virtual GPUs: {max(ratios):.1f} times the processor time "
        "of a step without DDP"
    )
    print(f"started afresh: {afresh:.2f} s each, {afresh / warm:.1f} times as long")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
