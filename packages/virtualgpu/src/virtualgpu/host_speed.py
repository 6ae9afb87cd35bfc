"""How fast this computer is beside the one that the virtual GPUs' times take for their host."""

import subprocess
import sys
import time
from collections.abc import Callable
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


class Convolved(nn.Module):
    """One of several convolutions, norms and activations, added to its input."""

    ACTIVATIONS = (nn.ReLU, nn.SiLU, nn.GELU, nn.Hardswish)

    def __init__(self, number: int, width: int = 16) -> None:
        super().__init__()
        self.number = number
        size = (3, 1, 5)[number % 3]
        groups = width if size == 5 else 1
        self.convolution = nn.Conv2d(width, width, size, padding=size // 2, groups=groups)
        self.norm = nn.GroupNorm(4, width) if number % 4 == 3 else nn.BatchNorm2d(width)
        self.activation = self.ACTIVATIONS[number % len(self.ACTIVATIONS)]()
        self.dropout = nn.Dropout(0.1)
        self.squeeze, self.excite = nn.Conv2d(width, 4, 1), nn.Conv2d(4, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.activation(self.norm(self.convolution(x)))
        if self.number % 3 == 1:
            means = y.mean((2, 3), keepdim=True)
            y = y * torch.sigmoid(self.excite(F.relu(self.squeeze(means))))
        if self.number % 4 == 2:
            first, second = y.chunk(2, 1)
            y = torch.cat([second, first], 1)
        if self.number % 5 == 0:
            y = self.dropout(y)
        if self.number % 6 == 5:
            y = F.avg_pool2d(y, 3, 1, 1)
        return x + y


class Attended(nn.Module):
    """A block of a transformer: every second one has fused attention."""

    def __init__(self, number: int, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.fused, self.heads = number % 2 == 1, heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count, length, width = x.shape
        parts = self.queries_keys_values(self.before(x)).split(width, 2)
        queries, keys, values = (part.view(count, length, self.heads, -1).transpose(1, 2) for part in parts)
        if self.fused:
            y = F.scaled_dot_product_attention(queries, keys, values)
        else:
            y = torch.softmax(queries @ keys.transpose(-2, -1), -1) @ values
        y = y.transpose(1, 2).contiguous().view(count, length, width)
        x = x + self.dropout(self.out(y))
        return x + self.dropout(self.down(F.gelu(self.up(self.between(x)))))


class Reference(nn.Module):
    """The network whose training step measures a host.

    Its tensors are so small that the GPU waits for the host. It calls many different operators,
    as networks do: a step of one block that is repeated takes a smaller share of a real host's
    time, because the processor finds its code in its caches. The network has as many layers as
    networks have that wait for the host. In a shorter step, what a host does once per step would
    be too large a share.
    """

    def __init__(self) -> None:
        super().__init__()
        self.convolved = nn.Sequential(*(Convolved(number) for number in range(24)))
        self.attended = nn.Sequential(*(Attended(number) for number in range(8)))
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.attended(self.convolved(x).flatten(2)).mean(1))


def step_seconds(clock: Callable[[], float]) -> float:
    """Return the host seconds of a training step of the reference network."""
    network = Reference().cuda()
    optimizer = torch.optim.AdamW(network.parameters())
    pictures, classes = torch.randn(2, 16, 8, 8, device="cuda"), torch.zeros(2, dtype=torch.int64, device="cuda")

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
