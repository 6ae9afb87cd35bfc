"""The part of each process in the experiment `shared_model`.

The processes import this file, and so they need not import figures and widgets.
"""

from contextlib import AbstractContextManager, nullcontext
from multiprocessing.connection import Connection
from typing import Any

import torch

from labkit import machine


def take_part(line: Connection, part: str, weights: int, work: int, queues: list[Any]) -> None:
    """Wait for this child's turn, do its part, and stay until the line is closed.

    The child sends the bytes (reserved, weights) through the line.

    Args:
        part: the name of the child's part, such as "client".
        weights: the bytes of the model's weights.
        work: the bytes that a request takes while it is answered.
        queues: the queues through which the processes exchange tensors, requests and replies.
    """
    lent, requests, replies = queues
    others = line.recv()
    if part == "client":
        requests.put(1.0)
        replies.get()
        line.send((0, 0))
        line.poll(None)
        return
    with _without_values():
        if part == "borrower":
            model = lent.get()
        else:
            model = torch.empty(weights, dtype=torch.uint8, device="cuda")
        for _ in range(others if part == "owner" else 0):
            lent.put(model)
        torch.empty(work, dtype=torch.uint8, device="cuda")  # a request's activations
        line.send((torch.cuda.memory_reserved(), 0 if part == "borrower" else model.nbytes))
        for _ in range(others if part == "server" else 0):
            replies.put(requests.get() + 1)
        line.poll(None)


def _without_values() -> AbstractContextManager[None]:
    """Return a context in which virtual GPUs compute nothing, to save memory of the host."""
    used = machine.current()  # None in a child of a process with real GPUs
    if used is not None:
        return used.without_values()
    return nullcontext()
