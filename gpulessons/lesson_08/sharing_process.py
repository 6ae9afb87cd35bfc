"""What each process of the experiment `shared_model` does. It imports this file, and with it no figure and no widget."""

from contextlib import AbstractContextManager, nullcontext
from multiprocessing.connection import Connection
from typing import Any

import torch

from labkit import machine


def take_part(line: Connection, part: str, weights: int, work: int, queues: list[Any]) -> None:
    """What a child does: it waits for its turn, does its part, tells (reserved, weights) in bytes, and stays until the line is closed."""
    lent, requests, replies = queues
    others = line.recv()
    if part == "client":
        requests.put(1.0)
        replies.get()
        line.send((0, 0))
        line.poll(None)
        return
    with _without_values():
        model = (
            lent.get()
            if part == "borrower"
            else torch.empty(weights, dtype=torch.uint8, device="cuda")
        )
        for _ in range(others if part == "owner" else 0):
            lent.put(model)
        torch.empty(work, dtype=torch.uint8, device="cuda")  # a request's activations
        line.send((torch.cuda.memory_reserved(), 0 if part == "borrower" else model.nbytes))
        for _ in range(others if part == "server" else 0):
            replies.put(requests.get() + 1)
        line.poll(None)


def _without_values() -> AbstractContextManager[None]:
    """On virtual GPUs, nothing is computed, and no memory of the host taken."""
    used = machine.current()  # a child of a process with real GPUs has none
    return used.without_values() if used is not None else nullcontext()
