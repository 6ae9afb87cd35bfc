"""How long ranks take that do nothing but meet: copies of the fork server beside processes started afresh, and four with virtual GPUs; and
what a step of DDP costs there, as a multiple of the same step without DDP (processor time, so that other work does not count).

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

SCRIPT = "import torch.distributed as dist\ndist.init_process_group()\ndist.barrier()\ndist.destroy_process_group()\n"

STEPS = """
import os, time, torch, torch.distributed as dist
from torch import nn
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
x = torch.randn(32, 64, device="cuda")
def cost(wrap, steps=30):
    model = wrap(nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(64, 64), nn.ReLU())]).cuda())
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
alone, parallel = (min(cost(wrap) for _ in range(3)) for wrap in (nn.Sequential, nn.parallel.DistributedDataParallel))
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
        f"a step of DDP on two virtual GPUs: {max(ratios):.1f} times the processor time of one without"
    )
    print(f"started afresh: {afresh:.2f} s each, {afresh / warm:.1f} times as long")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
