"""What it costs to run a function in a process of its own, beside a Python that imports torch and does nothing else.

    python benchmarks/isolated.py [ROUNDS] [--real]

All sides take turns, round by round, so that a busy machine slows them alike; the figures are medians over the rounds. With --real the
machine is this computer's first GPU, else a virtual one. Exits 1 when the cost is above its limit.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import labkit

LIMIT = 0.3  # seconds over a Python that does what has to be done on this machine


def nothing() -> None:
    """A function that costs nothing itself."""


def python(code: str) -> Callable[[], object]:
    return lambda: subprocess.run([sys.executable, "-c", code], check=True)


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> int:
    real = "--real" in sys.argv
    rounds = next((int(argument) for argument in sys.argv[1:] if argument.isdigit()), 10)
    machine = labkit.use(gpus=1, virtual=not real, quiet=True)
    base = "import torch; torch.cuda.init(); torch.cuda.synchronize()" if real else "import torch"
    sides = {
        'python -c "import torch"': python("import torch"),
        f'python -c "{base}"': python(base),
        "labkit.isolated(nothing)": lambda: labkit.isolated(nothing),
    }
    found: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(rounds + 1):
        for side, work in sides.items():
            spent = seconds(work)
            if turn:  # the first round fills caches
                found[side].append(spent)
    print(f"{machine.badge}, median of {rounds} rounds")
    for side, times in found.items():
        print(f"{side:<70}{statistics.median(times):>7.2f} s")
    differences = [ours - theirs for ours, theirs in zip(found["labkit.isolated(nothing)"], found[f'python -c "{base}"'], strict=True)]
    over = statistics.median(differences)
    print(f"over the Python before it: {over:+.2f} s, at most {LIMIT} {'kept' if over <= LIMIT else 'EXCEEDED'}")
    return int(over > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
