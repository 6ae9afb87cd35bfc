"""Measure on a real GPU what recording costs, with gputrace and with PyTorch's own tools.

    python benchmarks/recording.py [ROUNDS]

There are two training steps. One waits for its launches, and the other keeps the GPU busy. The
sides are `gputrace.record()`, PyTorch's memory history and PyTorch's profiler. They take turns in
one process, in another order in each round, because each side slows the one after it. A ratio is
the median over the rounds of the ratio of two sides in the same round. The time of a launch varies
by a third between rounds, so there are many rounds, and the middle half of their ratios is printed
too.

Twice a second, gputrace reads the device's memory in use, for which it takes Python's lock. These
reads are not in the measured time. The exit status is 1 if a ratio is above its limit, and 2 if
there is no CUDA GPU.
"""

import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

import gputrace

LAYERS = 8
LAUNCH_BOUND = (1024, 512, 50)  # width, batch, steps timed at a stretch
BUSY = (8192, 8192, 3)
HISTORY_LIMIT = 1.05  # of PyTorch's own history, on the step bound by launches, for memory alone
PROFILER_LIMIT = (
    1.10  # of PyTorch's own profiler of CUDA alone, on the same step, for memory and timeline
)
BARE_LIMIT = 1.02  # of no recording, on the step that keeps the GPU busy, for memory alone


@contextmanager
def history() -> Iterator[None]:
    """Switch on PyTorch's own history, with Python stacks and as many events as `record` keeps."""
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=200_000)
    try:
        yield
    finally:
        torch.cuda.memory._record_memory_history(None)


def profiler() -> AbstractContextManager[object]:
    """Return PyTorch's own profiler, which records only CUDA's activities."""
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])


BARE, HISTORY, MEMORY = "bare", "PyTorch's history", "record()"
PROFILER, BOTH = "PyTorch's profiler", "record(timeline=True)"
SIDES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    BARE: nullcontext,
    HISTORY: history,
    MEMORY: gputrace.record,
    PROFILER: profiler,
    BOTH: lambda: gputrace.record(timeline=True),
}


def training_step(width: int, batch: int) -> Callable[[], None]:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(layer for _ in range(LAYERS) for layer in (nn.Linear(width, width), nn.ReLU()))
    ).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(batch, width, device="cuda")

    def step() -> None:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def seconds_of(step: Callable[[], None], count: int) -> float:
    """Return the seconds per step, from `count` steps in a row."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / count


def measure(
    width: int, batch: int, count: int, sides: list[str], rounds: int
) -> dict[str, list[float]]:
    """Return the seconds of a step on each side, by round, without starting a recording."""
    step, order = training_step(width, batch), random.Random(0)
    times: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(rounds + 1):
        for side in order.sample(sides, len(sides)):
            with SIDES[side]():
                step()
                taken = seconds_of(step, count)
            if turn:  # the first round fills caches
                times[side].append(taken)
    return times


def ratios(times: dict[str, list[float]], side: str, to: str) -> list[float]:
    """Return the quartiles, over the rounds, of the ratio of two sides' times."""
    return statistics.quantiles((a / b for a, b in zip(times[side], times[to], strict=True)), n=4)


def main() -> int:
    if not torch.cuda.is_available():
        print("recording: this machine has no CUDA GPU to record", file=sys.stderr)
        return 2
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 121
    launch_bound, busy = (
        measure(*LAUNCH_BOUND, list(SIDES), rounds),
        measure(*BUSY, [BARE, MEMORY], max(3, rounds // 24)),
    )
    print(
        f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}; {LAYERS} layers of "
        f"{LAUNCH_BOUND[0]} and of {BUSY[0]}"
    )
    for name, times in (("is bound by launches", launch_bound), ("keeps the GPU busy", busy)):
        print(f"a training step that {name}, {len(times[BARE])} rounds")
        for side, found in times.items():
            print(
                f"    {side:24}{statistics.median(found) * 1e3:>10.3f} ms, fastest "
                f"{min(found) * 1e3:.3f} ms"
            )
    checks = (
        (
            f"bound by launches, {MEMORY} / {HISTORY}",
            ratios(launch_bound, MEMORY, HISTORY),
            HISTORY_LIMIT,
        ),
        (
            f"bound by launches, {BOTH} / {PROFILER}",
            ratios(launch_bound, BOTH, PROFILER),
            PROFILER_LIMIT,
        ),
        (f"keeps the GPU busy, {MEMORY} / {BARE}", ratios(busy, MEMORY, BARE), BARE_LIMIT),
    )
    for name, (low, found, high), limit in checks:
        print(
            f"{name}: {found:.3f} ({low:.3f} to {high:.3f}), at most {limit} "
            f"{'kept' if found <= limit else 'EXCEEDED'}"
        )
    return int(any(found > limit for _, (_, found, _), limit in checks))


if __name__ == "__main__":
    sys.exit(main())
