"""Measure what a virtual GPU costs, for a small operator and for a step of 20 tiny layers.

    python benchmarks/overhead.py [ROUNDS]

The times are this process's time on the processor, which a busy machine does not change. All sides
take turns in each round. The figures are medians over the rounds, also those of ratios. The exit
status is 1 if a ratio is above its limit.
"""

import sys
import time
from collections.abc import Callable
from operator import truediv
from statistics import median

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import virtualgpu

ADDS = 300  # operators that are timed together
STEPS = 3  # training steps that are timed together
LAYERS, WIDTH, BATCH = 20, 16, 8
OPERATOR_LIMIT = 0.33  # times FakeTensorMode's time
STEP_LIMIT = 8.0  # times the plain CPU's time

Work = Callable[[], None]


def adds(device: str) -> Work:
    x = torch.ones(16, device=device)

    def work() -> None:
        for _ in range(ADDS):
            x + x

    return work


def steps(device: str) -> Work:
    torch.manual_seed(0)
    layers = [
        layer
        for _ in range(LAYERS)
        for layer in (nn.Linear(WIDTH, WIDTH, device=device), nn.ReLU())
    ]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(BATCH, WIDTH, device=device)

    def work() -> None:
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    return work


def seconds(work: Work) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def rounds_of(rounds: int) -> dict[tuple[str, str], list[float]]:
    """Return the seconds of one operator and of one step on each side, for each round."""
    plain = {"add": adds("cpu"), "step": steps("cpu")}
    fake = FakeTensorMode()
    with fake:
        faked = {"add": adds("cpu"), "step": steps("cpu")}
    found: dict[tuple[str, str], list[float]] = {}
    machine = {"gpus": 1, "like": "H200"}
    for turn in range(rounds + 1):
        sides = {"CPU": {name: seconds(work) for name, work in plain.items()}}
        with fake:
            sides["FakeTensorMode"] = {name: seconds(work) for name, work in faked.items()}
        with virtualgpu.use(**machine):
            virtual = {"add": adds("cuda"), "step": steps("cuda")}
            for work in virtual.values():
                work()
            sides["virtual GPU"] = {name: seconds(work) for name, work in virtual.items()}
            del virtual, work
        if turn:  # the first round fills caches
            for side, times in sides.items():
                for name, total in times.items():
                    found.setdefault((side, name), []).append(
                        total / (ADDS if name == "add" else STEPS)
                    )
    return found


def main() -> int:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    torch.set_num_threads(1)
    found = rounds_of(rounds)
    print(f"torch {torch.__version__}, one thread, median of {rounds} rounds")
    print(f"{'':16}{'one add of 16':>16}{f'a step, {LAYERS} layers':>20}")
    for side in ("CPU", "FakeTensorMode", "virtual GPU"):
        print(
            f"{side:16}{median(found[side, 'add']) * 1e6:>13.1f} µs"
            f"{median(found[side, 'step']) * 1e3:>17.2f} ms"
        )
    exceeded = 0
    for name, what, other, limit in (
        ("one add", "add", "FakeTensorMode", OPERATOR_LIMIT),
        ("a step", "step", "CPU", STEP_LIMIT),
    ):
        ratio = median(map(truediv, found["virtual GPU", what], found[other, what]))
        print(
            f"{name}, virtual GPU / {other}: {ratio:.2f}, at most {limit} "
            f"{'kept' if ratio <= limit else 'EXCEEDED'}"
        )
        exceeded |= ratio > limit
    return exceeded


if __name__ == "__main__":
    sys.exit(main())
