"""Run answers to the exercises of lesson 12 in ranks.

Ranks import no other program of the lessons.
"""

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gpulessons.watched_collectives import LateValues, SentBytes
from labkit.checks.checking import Plain, number_or_type

PATIENCE = 1.0  # seconds in which a rank that does not wait for another is back


def node_work(once_per_node: Any, case: Plain) -> Plain:
    """Return how often this rank ran the work, and whether the work was done when it returned.

    The work lasts until another rank of the node returns, or would return. On all nodes but the
    first, it also lasts as long as a wait for the first node's work.
    """
    os.environ.update(case["environment"])
    node, rank, folder = case["environment"]["GROUP_RANK"], dist.get_rank(), Path(case["folder"])
    done, calls = folder / f"done-{node}", 0

    def work() -> None:
        nonlocal calls
        calls += 1
        until = time.monotonic() + PATIENCE * (1 if node == "0" else 2)
        while time.monotonic() < until and not any(folder.glob(f"back-{node}-*")):
            time.sleep(0.01)
        done.touch()

    dist.barrier()
    once_per_node(work)
    found = done.exists()
    (folder / f"back-{node}-{rank}").touch()
    return {"calls": calls, "done": found}


def summed_by_nodes(all_reduce_by_nodes: Any, case: Plain) -> Plain:
    """Return the tensor's values after the answer, and the bytes of collectives between nodes."""
    per_node, rank, ranks = case["per_node"], dist.get_rank(), dist.get_world_size()
    near = _mine([list(range(first, first + per_node)) for first in range(0, ranks, per_node)])
    far = _mine([list(range(local, ranks, per_node)) for local in range(per_node)])
    x = torch.tensor([float(value) for value in case["rows"][rank]], device="cuda")
    with SentBytes() as sent:
        all_reduce_by_nodes(x, near, far)
        torch.cuda.synchronize()
    between = [
        nbytes
        for _, members, nbytes in sent.calls
        if len({member // per_node for member in members}) > 1
    ]
    return {"values": x.tolist(), "between": between, "bytes": x.nbytes}


def _mine(groups: list[list[int]]) -> Any:
    mine, _ = dist.new_subgroups_by_enumeration(groups)
    return mine


def newest_of(newest_common: Any, cases: Plain) -> Plain:
    """Let the answer choose a step among those that this rank finds, for each case.

    Return the chosen steps, and whether the answer changed the list of steps.
    """
    told: list[Plain] = []
    for case in cases:
        steps = list(case[dist.get_rank()])
        with LateValues():
            answer = newest_common(steps)
        found = None
        if answer is not None:
            found = number_or_type(answer)
        told.append([found, steps != case[dist.get_rank()]])
        dist.barrier()
    return told


def uneven_gradient(batch_gradient: Any, case: Plain) -> Plain:
    """Return the gradients of a linear layer for this rank's rows, and the layer's parameters."""
    layer = nn.Linear(len(case["weight"]), 1)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([case["weight"]], dtype=torch.float32))
        layer.bias.fill_(case["bias"])
    rows = case["rows"][dist.get_rank()]
    x = torch.tensor([row["x"] for row in rows], dtype=torch.float32).reshape(
        len(rows), len(case["weight"])
    )
    y = torch.tensor([row["y"] for row in rows], dtype=torch.float32).reshape(len(rows), 1)
    with LateValues():
        batch_gradient(nn.Sequential(layer) if case["inside"] else layer, x, y)
    gradients = [None if p.grad is None else p.grad.flatten().tolist() for p in layer.parameters()]
    return {
        "gradients": gradients,
        "parameters": [p.flatten().tolist() for p in layer.parameters()],
    }
