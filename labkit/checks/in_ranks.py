"""A function in ranks, for the checks: a process each, which meet through a file and exchange tensors of the CPU by gloo, or those of a
virtual GPU each by the virtual NCCL.

It takes tenths of a second where torchrun, with which the lessons start ranks, takes one or more: there is no agent, and no rendezvous.
"""

import contextlib
import functools
import os
import pickle
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from labkit import machine
from labkit.checks.checking import Plain
from labkit.processes import by_value, children, context, time_limits
from labkit.processes.time_limits import TimeLimit

SECONDS = 60.0  # until all ranks must have come back
PATIENCE = 10.0  # seconds for the others when one is back, and for a rank to wait in a collective, on a machine that is not busy
MOST_STRETCHED = 5.0  # times PATIENCE, on a busy machine
MOMENT = 1.0  # seconds for ranks that fail in the same way to say so, or have waited as long as the one that says so

RETURNED, RAISED, WAITED, GONE = "returned", "raised", "waited", "gone"


class RankError(RuntimeError):
    """Ranks waited for one another in vain, or one is gone."""


def in_ranks(program: Callable[[Any, Plain], Plain], answer: Any, inputs: Sequence[Plain], like: str | None = None) -> list[Plain]:
    """What `program(answer, inputs[rank])` returns in each of as many ranks as there are inputs.

    `answer` is the learner's function, sent as it is defined; `program` is found by its module's name. `like` gives each rank a virtual
    GPU modelled on it, all of one machine; without it no rank has any. No process is left in any case.

    Raises:
        RankError: ranks waited for one another in vain, or one ended its process.
        Exception: what the lowest rank that failed by itself raised, with a note that names the rank.
    """
    call = by_value.dumps((program, answer))
    with tempfile.TemporaryDirectory(prefix="labkit-") as folder, contextlib.ExitStack() as stack:
        pipes = [context().Pipe(duplex=False) for _ in inputs]
        ours, theirs = ([stack.enter_context(end) for end in ends] for ends in zip(*pipes, strict=True))
        store, patience = os.path.join(folder, "store"), _patience()
        ranks = [
            (rank, len(inputs), like, store, call, given, line, patience)
            for rank, (given, line) in enumerate(zip(inputs, theirs, strict=True))
        ]
        with children(_rank, ranks) as started:
            told = _collected(ours, started, patience)
            for process in started:
                process.kill()
    return _values(told, len(inputs), like)


def _patience() -> float:
    """Return the seconds that a rank waits for the others before the answer is at fault.

    On a busy machine, ranks also wait for a processor. There the limit grows with the number of
    processes that want each processor.
    """
    if not hasattr(os, "getloadavg"):  # Windows
        return PATIENCE
    wanted = os.getloadavg()[0] / (os.cpu_count() or 1)
    return PATIENCE * min(max(wanted, 1.0), MOST_STRETCHED)


def _collected(lines: Sequence[connection.Connection], processes: Sequence[BaseProcess], patience: float) -> dict[int, tuple[str, Any]]:
    """What came down each rank's line, in time. When one is back, the others cannot be far: they share their collectives.

    When one has failed, or has waited in vain as long as a rank may, nothing that the others could still say matters.
    """
    told: dict[int, tuple[str, Any]] = {}
    ends = [process.sentinel for process in processes]
    numbers = [process.pid for process in processes if process.pid is not None]
    limits = [TimeLimit(SECONDS + patience, numbers)]
    while len(told) < len(lines) and (remaining := min(limit.remaining() for limit in limits)) > 0:
        waiting = [rank for rank in range(len(lines)) if rank not in told]
        ready = connection.wait([signal for rank in waiting for signal in (lines[rank], ends[rank])], remaining)
        for rank in waiting:
            if lines[rank] in ready:
                told[rank] = lines[rank].recv()
            elif ends[rank] in ready:
                told[rank] = GONE, None
        if ready:
            failed = any(kind != RETURNED for kind, _ in told.values())
            limits.append(TimeLimit(MOMENT if failed else patience, numbers))
    return told


def _values(told: dict[int, tuple[str, Any]], ranks: int, like: str | None) -> list[Plain]:
    for rank, (kind, what) in sorted(told.items()):
        if kind == RAISED:
            error = pickle.loads(what)
            error.add_note(f"rank {rank} of {ranks}")
            raise error
    if gone := [rank for rank, (kind, _) in sorted(told.items()) if kind == GONE]:
        why = "" if like else ": so does gloo where ranks give one collective different numbers of bytes"
        raise RankError(f"rank {gone[0]} of {ranks} ended its process without a word{why}")
    if [kind for kind, _ in told.values()] != [RETURNED] * ranks:
        raise RankError(
            "the ranks waited for one another in vain: does every rank call the same collectives, in the same order, and with tensors of "
            "the same size?"
        )
    return [told[rank][1] for rank in range(ranks)]


def _rank(
    rank: int, ranks: int, like: str | None, store: str, call: bytes, given: Plain, line: connection.Connection, patience: float
) -> None:
    machine.use(None)  # a child has its parent's
    if like is not None:
        machine.use(ranks, like, virtual=True, quiet=True)
        torch.cuda.set_device(rank)
    torch.set_num_threads(1)
    # torchrun sets these variables.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    warnings.simplefilter("ignore", FutureWarning)  # of names that newer versions of torch give collectives
    try:
        program, answer = pickle.loads(call)
        getattr(answer, "__globals__", {})["hash"] = functools.partial(_own_hash, rank)
        timeout = timedelta(seconds=patience)
        backend = "gloo" if like is None else "nccl"
        dist.init_process_group(backend, f"file://{store}", timeout=timeout, rank=rank, world_size=ranks)
        line.send((RETURNED, program(answer, given)))
    except BaseException as error:
        line.send(_failure(error))
    # Sleep until this process is killed: a rank that leaves breaks the connections that others may
    # still use.
    time.sleep(time_limits.MOST_STRETCHED * (SECONDS + patience))


def _own_hash(rank: int, value: Any) -> int:
    """Text has another hash in each Python that is started. These ranks are forked, and would have the same."""
    return hash(value) ^ (rank if any(isinstance(leaf, str | bytes) for leaf in tree_leaves(value)) else 0)


def _failure(error: BaseException) -> tuple[str, Any]:
    """What fails in gloo's connections is about another rank, which is gone or elsewhere."""
    if "gloo/transport" in str(error):
        return WAITED, None
    try:
        return RAISED, by_value.dumps(error)
    except Exception:
        return RAISED, by_value.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
