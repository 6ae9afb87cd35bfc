"""Measurement of this computer's speed relative to the modelled host of virtual GPUs."""

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
STEPS, OPERATORS = 5, 1000  # repetitions per round
RECORDED = profiles.load("H200")
# A program that prints the modelled seconds. Every modelled step takes the same time.
MODELLED = """
import virtualgpu, virtualgpu.host_speed as host
host.ROUNDS = host.STEPS = 1
virtualgpu.use(1, like="H200", values=False)
print(host.step_seconds(virtualgpu.host_time))
"""


def measure_host(clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the time of this host's work relative to the recorded H200s' host.

    With a CUDA GPU, a small training step is measured, and without one a small operator on the CPU.
    Launching one operator repeatedly would not be enough for a GPU. The forward pass, the backward
    pass and the optimizer take different shares of the time on different hosts.
    """
    if torch.cuda.is_available():
        return step_seconds(clock) / modelled_step_seconds()
    x = torch.zeros(16, 16)
    # As benchmarks/fidelity/host_costs.py measures it.
    seconds = _seconds(lambda: x + x, OPERATORS, lambda: None, clock)
    return seconds / RECORDED.cpu_launch_seconds


def modelled_step_seconds() -> float:
    """Return the seconds that the reference network's training step takes on the modelled host.

    They are computed in a process of its own, because this process may use a real GPU.
    """
    command = [sys.executable, "-c", MODELLED]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return float(run.stdout)


class Convolved(nn.Module):
    """Block of the reference network: a convolution, a norm and an activation, added to the input.

    `number` varies the convolution, the norm and the activation.
    """

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
        """Return the block's output for pictures of shape (count, width, rows, columns)."""
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
    """Transformer block of the reference network. Every second one uses fused attention."""

    def __init__(self, number: int, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.fused, self.heads = number % 2 == 1, heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output for `x` of shape (count, length, width)."""
        count, length, width = x.shape
        parts = self.queries_keys_values(self.before(x)).split(width, 2)
        heads = [part.view(count, length, self.heads, -1).transpose(1, 2) for part in parts]
        queries, keys, values = heads
        if self.fused:
            y = F.scaled_dot_product_attention(queries, keys, values)
        else:
            y = torch.softmax(queries @ keys.transpose(-2, -1), -1) @ values
        y = y.transpose(1, 2).contiguous().view(count, length, width)
        x = x + self.dropout(self.out(y))
        return x + self.dropout(self.down(F.gelu(self.up(self.between(x)))))


class Reference(nn.Module):
    """The network whose training step measures a host.

    Its tensors are so small that the GPU waits for the host. It calls many different operators, as
    real networks do. A network of one repeated block would take a smaller share of a real host's
    time, because its code would stay in the processor's caches. The network has as many layers as
    real networks that wait for the host. In a shorter step, the work that a host does once per step
    would be too large a share.
    """

    def __init__(self) -> None:
        super().__init__()
        self.convolved = nn.Sequential(*(Convolved(number) for number in range(24)))
        self.attended = nn.Sequential(*(Attended(number) for number in range(8)))
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the classes' scores for pictures of shape (count, 16, rows, columns)."""
        return self.head(self.attended(self.convolved(x).flatten(2)).mean(1))


def step_seconds(clock: Callable[[], float]) -> float:
    """Measure the host seconds of one training step of the reference network with `clock`."""
    network = Reference().cuda()
    optimizer = torch.optim.AdamW(network.parameters())
    pictures = torch.randn(2, 16, 8, 8, device="cuda")
    classes = torch.zeros(2, dtype=torch.int64, device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(network(pictures), classes).backward()
        optimizer.step()

    return _seconds(step, STEPS, torch.cuda.synchronize, clock)


def _seconds(
    work: Callable[[], object],
    count: int,
    wait: Callable[[], None],
    clock: Callable[[], float],
) -> float:
    """Return the median seconds of a call of `work`, over several rounds of `count` calls.

    `clock` measures them. `wait` is called before each round and after the last. The first round
    only warms up and is not counted.
    """
    found = []
    for _ in range(ROUNDS + 1):
        wait()
        start = clock()
        for _ in range(count):
            work()
        found.append((clock() - start) / count)
    wait()
    return median(found[1:])
