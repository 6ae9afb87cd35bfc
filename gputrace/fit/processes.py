"""Attempts in processes of their own, as many at once as this computer has processors and memory for."""

import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import psutil

from gputrace.fit.attempt import Outcome, Wish

RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes, in which the system counts the memory of processes that have ended


def run(wish: Wish) -> Outcome:
    """Try it. What the script prints is shown only where the process ends without an answer."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "outcome.json")
        command = [sys.executable, "-m", "gputrace.fit", json.dumps(asdict(wish)), str(file)]
        ran = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
        if not file.exists():
            tail = ran.stdout.decode(errors="replace").strip().splitlines()[-1:]
            return Outcome(failed=f"its process ended with status {ran.returncode}: {''.join(tail)}")
        return Outcome(**json.loads(file.read_text(encoding="utf-8")))


def run_all(wishes: list[Wish]) -> Iterator[tuple[Wish, Outcome]]:
    """Try all. What fails beside others is tried once more alone, and comes last: two may want the same file, or the same port."""
    again = []
    most = at_once()
    with ThreadPoolExecutor(most) as pool:
        for wish, outcome in zip(wishes, pool.map(run, wishes), strict=True):
            if outcome.failed and min(most, len(wishes)) > 1:
                again.append(wish)
            else:
                yield wish, outcome
    for wish in again:
        yield wish, run(wish)


def at_once() -> int:
    """As many as there are processors, and as have room if each takes what the largest took that has ended."""
    largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * RSS_UNIT
    return max(1, min(os.cpu_count() or 1, psutil.virtual_memory().available // max(1, largest)))
