"""How fast this computer is beside the one that the virtual GPUs' times take for their host."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from statistics import median

import torch
import torch.nn.functional as F
from torch import nn

from virtualgpu import profiles

ROUNDS = 5
STEPS, OPERATORS = 5, 1000  # in a round
RECORDED = profiles.load("H200")
MODELLED = """
import virtualgpu, virtualgpu.host_speed as host
host.ROUNDS = host.STEPS = 1  # each takes as long
virtualgpu.use(1, like="H200", values=False)
print(host.step_seconds(virtualgpu.host_time))
"""


def measure_host(clock: Callable[[], float] = time.perf_counter) -> float:
    """How many times as long it takes as the recorded H200s' host: for a small training step, where there is a CUDA GPU.

    Without a GPU, for a small operator on the CPU. One operator launched again and again would not do for a GPU: beside its launches, the
    forward, the backward and the optimizer of a network take other shares of one host's time than of another's.
    """
    if torch.cuda.is_available():
        return step_seconds(clock) / modelled_step_seconds()
    x = torch.zeros(16, 16)
    return _seconds(lambda: x + x, OPERATORS, lambda: None, clock) / RECORDED.cpu_launch_seconds  # as fidelity/host_costs.py


def modelled_step_seconds() -> float:
    """What the same step takes of the virtual GPUs' host: in a process of its own, for this one may have a real GPU in use."""
    return float(subprocess.run([sys.executable, "-c", MODELLED], stdout=subprocess.PIPE, text=True, check=True).stdout)


def step_seconds(clock: Callable[[], float]) -> float:
    """Host seconds of a step of a network with so small tensors that the GPU waits for its host.

    It has as many layers as networks have that wait: of a shorter step, what a real host does once a step would be too large a share.
    """

    def convolved() -> Iterator[nn.Module]:
        for _ in range(48):
            yield from (nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())

    encoders = [nn.TransformerEncoderLayer(64, 4, 128, batch_first=True) for _ in range(12)]
    network = nn.Sequential(*convolved(), nn.Flatten(2), *encoders, nn.Linear(64, 10)).cuda()
    optimizer = torch.optim.AdamW(network.parameters())
    pictures, classes = torch.randn(2, 16, 8, 8, device="cuda"), torch.zeros(2, 10, dtype=torch.int64, device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(network(pictures), classes).backward()
        optimizer.step()

    return _seconds(step, STEPS, torch.cuda.synchronize, clock)


def _seconds(work: Callable[[], object], count: int, wait: Callable[[], None], clock: Callable[[], float]) -> float:
    """Host time of one piece of work, a median: the first round warms up."""
    found = []
    for _ in range(ROUNDS + 1):
        wait()
        start = clock()
        for _ in range(count):
            work()
        found.append((clock() - start) / count)
    wait()
    return median(found[1:])
