"""Measure the host's time of threads, replicas, autograd functions in Python, and memory.

usage: python benchmarks/timing/host.py OUT.json

The script needs a CUDA GPU and labkit's requirements, and takes about ten seconds. host.toml has
the time of cudaMalloc from its results.

Times are microseconds, medians of 7 (of 140 for memory). host.json has the results. fit.py compares
hosts by the operator "add".
"""

import datetime
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable

import torch
from torch import nn

ROUNDS = 7
MIB = 1 << 20


def microseconds(work: Callable[[], object], repeats: int) -> float:
    work()
    found = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        found.append((time.perf_counter() - start) / repeats * 1e6)
    return statistics.median(found)


def thread() -> None:
    started = threading.Thread(target=lambda: None)
    started.start()
    started.join()


def handover(rounds: int = 1000) -> float:
    """Return the microseconds from when one thread yields until another continues.

    Two threads wake each other in turn.
    """
    found = []
    for _ in range(ROUNDS):
        mine, other = threading.Lock(), threading.Lock()
        mine.acquire()
        other.acquire()

        def partner(mine: threading.Lock = mine, other: threading.Lock = other) -> None:
            for _ in range(rounds):
                other.acquire()
                mine.release()

        second = threading.Thread(target=partner)
        second.start()
        start = time.perf_counter()
        for _ in range(rounds):
            other.release()
            mine.acquire()
        found.append((time.perf_counter() - start) / (2 * rounds) * 1e6)
        second.join()
    return statistics.median(found)


def holding(attributes: int) -> nn.Module:
    module = nn.Module()
    for index in range(attributes):
        module.register_buffer(f"b{index}", torch.empty(1))
    return module


class Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def segment(size: int) -> tuple[float, float]:
    """Return the microseconds of one cudaMalloc and of one cudaFree of `size` bytes.

    They include PyTorch's own work.
    """
    takes, gives = [], []
    for _ in range(20 * ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        block = torch.empty(size, dtype=torch.uint8, device="cuda")
        taken = time.perf_counter()
        del block
        freed = time.perf_counter()
        torch.cuda.empty_cache()
        gives.append((time.perf_counter() - freed) * 1e6)
        takes.append((taken - start) * 1e6)
    return statistics.median(takes), statistics.median(gives)


def main(path: str) -> None:
    x, w = torch.randn(16, 16, device="cuda"), torch.randn(16, 16, device="cuda")
    p = torch.randn(16, 16, device="cuda", requires_grad=True)
    empty, full = holding(0), holding(16)
    cached = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    found = {
        "add": microseconds(lambda: x + w, 1000),
        "view": microseconds(lambda: p.view_as(p), 1000),
        "thread": microseconds(thread, 200),
        "handover": handover(),
        "replicate": microseconds(empty._replicate_for_data_parallel, 500),
        "replicate 16 buffers": microseconds(full._replicate_for_data_parallel, 500),
        "Function.apply of a view": microseconds(lambda: Identity.apply(p), 500),
        "empty_cache of nothing": microseconds(torch.cuda.empty_cache, 100),
    }
    for size in (2 * MIB, 20 * MIB, 64 * MIB, 512 * MIB, 4096 * MIB):
        found[f"cudaMalloc {size // MIB} MiB"], found[f"cudaFree {size // MIB} MiB"] = segment(size)
    del cached
    torch.cuda.empty_cache()
    machine = {
        "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
    }
    with open(path, "w") as file:
        json.dump(
            {
                "machine": machine,
                "microseconds": {name: round(value, 3) for name, value in found.items()},
            },
            file,
            indent=1,
        )
        file.write("\n")


if __name__ == "__main__":
    main(sys.argv[1])
