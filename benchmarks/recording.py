"""What it costs on a real GPU to record: `labkit.record()` beside PyTorch's own history and profiler, on two training steps.

    python benchmarks/recording.py [ROUNDS]

One step is bound by its launches, the other keeps the GPU busy. All sides take turns in one process, round by round; a ratio is the
median over the rounds of both sides' times in the same round. Exits 1 when a ratio is above its limit, 2 where there is no CUDA GPU.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

import labkit

LAYERS = 8
LAUNCH_BOUND = (1024, 512, 100)  # width, batch, steps timed at a stretch
BUSY = (8192, 8192, 3)
HISTORY_LIMIT = 1.05  # of PyTorch's own history, on the step bound by launches, for memory alone
PROFILER_LIMIT = 1.10  # of PyTorch's own profiler of CUDA alone, on the same step, for memory and timeline
BARE_LIMIT = 1.02  # of no recording, on the step that keeps the GPU busy, for memory alone


@contextmanager
def history() -> Iterator[None]:
    """PyTorch's own history, with Python stacks and as many events as `record` keeps."""
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=200_000)
    try:
        yield
    finally:
        torch.cuda.memory._record_memory_history(None)


def profiler(waits: bool = False) -> AbstractContextManager[object]:
    """PyTorch's own profiler, which listens to CUDA alone; `waits` lets it tell which stream waits for which, as `record` does."""
    more = torch._C._profiler._ExperimentalConfig(enable_cuda_sync_events=waits)
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], experimental_config=more)


@contextmanager
def history_and_profiler() -> Iterator[None]:
    """All that `record(timeline=True)` has PyTorch do: what it costs beyond is its own."""
    with history(), profiler(waits=True):
        yield


BARE, HISTORY, PROFILER = "bare", "PyTorch's history", "PyTorch's profiler"
WAITS, TOGETHER = "  the same, with waits", "  and its history"
MEMORY, BOTH = "record()", "record(timeline=True)"
SIDES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    BARE: nullcontext,
    HISTORY: history,
    MEMORY: labkit.record,
    PROFILER: profiler,
    WAITS: lambda: profiler(waits=True),
    TOGETHER: history_and_profiler,
    BOTH: lambda: labkit.record(timeline=True),
}


def training_step(width: int, batch: int) -> Callable[[], None]:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(width, width), nn.ReLU()))).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(batch, width, device="cuda")

    def step() -> None:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def seconds_of(step: Callable[[], None], count: int) -> float:
    """Seconds of one step, of `count` at a stretch."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / count


def measure(width: int, batch: int, count: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of one step on each side, round by round. Starting and ending a recording is not part of a step."""
    step = training_step(width, batch)
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    for turn in range(rounds + 1):
        for side, recording in SIDES.items():
            with recording():
                step()
                taken = seconds_of(step, count)
            if turn:  # the first round fills caches
                times[side].append(taken)
    return times


def ratio(times: dict[str, list[float]], side: str, to: str) -> float:
    return statistics.median(a / b for a, b in zip(times[side], times[to], strict=True))


def main() -> int:
    if not torch.cuda.is_available():
        print("recording: this machine has no CUDA GPU to record", file=sys.stderr)
        return 2
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 11
    times = {"bound by launches": measure(*LAUNCH_BOUND, rounds), "keeps the GPU busy": measure(*BUSY, max(3, rounds // 3))}
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}; {LAYERS} layers of {LAUNCH_BOUND[0]} and of {BUSY[0]}")
    print(f"{'a training step':24}" + "".join(f"{name:>22}" for name in times))
    for side in SIDES:
        print(f"{side:24}" + "".join(f"{statistics.median(found[side]) * 1e3:>19.3f} ms" for found in times.values()))
    launch_bound, busy = times.values()
    checks = (
        (f"bound by launches, {MEMORY} / {HISTORY}", ratio(launch_bound, MEMORY, HISTORY), HISTORY_LIMIT),
        (f"bound by launches, {BOTH} / {PROFILER}", ratio(launch_bound, BOTH, PROFILER), PROFILER_LIMIT),
        (f"keeps the GPU busy, {MEMORY} / {BARE}", ratio(busy, MEMORY, BARE), BARE_LIMIT),
    )
    for name, found, limit in checks:
        print(f"{name}: {found:.3f}, at most {limit} {'kept' if found <= limit else 'EXCEEDED'}")
    return int(any(found > limit for _, found, limit in checks))


if __name__ == "__main__":
    sys.exit(main())
