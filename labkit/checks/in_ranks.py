"""Run a learner's function in several ranks, for checks.

Each rank is a process. The ranks find each other through a file. They exchange tensors on the CPU
with gloo, or tensors on virtual GPUs with the virtual NCCL. This takes tenths of a second, because
there is no agent and no rendezvous. torchrun, which the lessons use, takes a second or more.
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

SECONDS = 60.0  # time limit of all ranks
# Seconds that a rank may wait in a collective, and that the other ranks have left when one has
# returned. Both are for a machine that is not busy.
PATIENCE = 10.0
MOST_STRETCHED = 5.0  # PATIENCE grows up to this factor on a busy machine
MOMENT = 1.0  # seconds that the other ranks have left to report their own error when one failed

# The ways in which a rank can end. A rank that WAITED lost the connection to another rank, and a
# rank that is GONE ended its process.
RETURNED, RAISED, WAITED, GONE = "returned", "raised", "waited", "gone"


class RankError(RuntimeError):
    """Error if ranks waited for one another in vain, or if a rank ended its process."""


def in_ranks(
    program: Callable[[Any, Plain], Plain],
    answer: Any,
    inputs: Sequence[Plain],
    like: str | None = None,
) -> list[Plain]:
    """Run `program(answer, inputs[rank])` in each rank, and return the results in rank order.

    Afterwards none of the processes is left, also after an error.

    Args:
        program: a function that other processes can import from its module.
        answer: the learner's function. Its definition is sent to the ranks.
        inputs: the inputs of each rank. There are as many ranks as inputs.
        like: the model of the virtual GPUs, such as "T4". Each rank has one GPU of the same
            machine. Without a model the ranks have no GPUs.

    Raises:
        RankError: ranks waited for one another in vain, or a rank ended its process.
        Exception: the exception of the lowest rank that failed by itself. A note names the rank.
    """
    call = by_value.dumps((program, answer))
    with tempfile.TemporaryDirectory(prefix="labkit-") as folder, contextlib.ExitStack() as stack:
        pipes = [context().Pipe(duplex=False) for _ in inputs]
        for receiver, sender in pipes:
            stack.enter_context(receiver)
            stack.enter_context(sender)
        ours = [receiver for receiver, _ in pipes]
        store = os.path.join(folder, "store")
        patience = _patience()
        ranks = []
        for rank, (given, (_, sender)) in enumerate(zip(inputs, pipes, strict=True)):
            ranks.append((rank, len(inputs), like, store, call, given, sender, patience))
        with children(_rank, ranks) as started:
            told = _collected(ours, started, patience)
            for process in started:
                process.kill()
    return _values(told, len(inputs), like)


def _patience() -> float:
    """Return how many seconds a rank waits for the others before this counts as an error.

    On a busy machine, ranks also wait for a processor. There the limit grows with the number of
    processes that want each processor.
    """
    wanted = os.getloadavg()[0] / (os.cpu_count() or 1)
    return PATIENCE * min(max(wanted, 1.0), MOST_STRETCHED)


def _collected(
    lines: Sequence[connection.Connection], processes: Sequence[BaseProcess], patience: float
) -> dict[int, tuple[str, Any]]:
    """Return what each rank reported before its time limit, by rank.

    Reports come in on `lines`, which has a connection for each rank. When a rank has returned, the
    others have `patience` seconds left. Ranks share their collectives, so they end at about the
    same time. When a rank has failed, the others have only MOMENT seconds left, because their
    results no longer matter.
    """
    told: dict[int, tuple[str, Any]] = {}
    ends = [process.sentinel for process in processes]
    numbers = [process.pid for process in processes if process.pid is not None]
    limits = [TimeLimit(SECONDS + patience, numbers)]
    while len(told) < len(lines):
        remaining = min(limit.remaining() for limit in limits)
        if remaining <= 0:
            break
        waiting = [rank for rank in range(len(lines)) if rank not in told]
        signals: list[Any] = [lines[rank] for rank in waiting]
        signals += [ends[rank] for rank in waiting]
        ready = connection.wait(signals, remaining)
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
    """Return what each rank's function returned, from the reports of the ranks.

    `told` has a (kind, content) for each rank that reported. Raises as `in_ranks` if a rank
    returned nothing.
    """
    for rank, (kind, what) in sorted(told.items()):
        if kind == RAISED:
            error = pickle.loads(what)
            error.add_note(f"rank {rank} of {ranks}")
            raise error
    gone = [rank for rank, (kind, _) in sorted(told.items()) if kind == GONE]
    if gone:
        message = f"rank {gone[0]} of {ranks} ended its process without an error message"
        if like is None:
            message += (
                ". gloo does this if the ranks call a collective with different numbers of bytes"
            )
        raise RankError(message)
    if [kind for kind, _ in told.values()] != [RETURNED] * ranks:
        raise RankError(
            "the ranks waited for one another in vain: does every rank call the same collectives, "
            "in the same order, and with tensors of the same size?"
        )
    return [told[rank][1] for rank in range(ranks)]


def _rank(
    rank: int,
    ranks: int,
    like: str | None,
    store: str,
    call: bytes,
    given: Plain,
    line: connection.Connection,
    patience: float,
) -> None:
    """Run the program in one rank, and send its result through `line`. Each rank runs this.

    Args:
        store: the file through which the ranks find each other.
        call: the pickled program and answer.
        given: the inputs of this rank.
        patience: how many seconds the rank waits for the others.
    """
    machine.use(None)  # a forked process begins with its parent's GPUs
    if like is not None:
        machine.use(ranks, like, virtual=True, quiet=True)
        torch.cuda.set_device(rank)
    torch.set_num_threads(1)
    # torchrun sets these variables.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    # Newer versions of torch warn about the old names of collectives.
    warnings.simplefilter("ignore", FutureWarning)
    try:
        program, answer = pickle.loads(call)
        getattr(answer, "__globals__", {})["hash"] = functools.partial(_own_hash, rank)
        timeout = timedelta(seconds=patience)
        backend = "gloo" if like is None else "nccl"
        dist.init_process_group(
            backend, f"file://{store}", timeout=timeout, rank=rank, world_size=ranks
        )
        line.send((RETURNED, program(answer, given)))
    except BaseException as error:
        line.send(_failure(error))
    # Sleep until this process is killed: a rank that leaves breaks the connections that others may
    # still use.
    time.sleep(time_limits.MOST_STRETCHED * (SECONDS + patience))


def _own_hash(rank: int, value: Any) -> int:
    """Return a hash of a value that differs between ranks if the value contains text.

    In separately started Python processes, text has different hashes. These ranks are forked, so
    their hashes would be equal, and a check would miss an answer that relies on them.
    """
    has_text = any(isinstance(leaf, str | bytes) for leaf in tree_leaves(value))
    if not has_text:
        return hash(value)
    return hash(value) ^ rank


def _failure(error: BaseException) -> tuple[str, Any]:
    """Return the (kind, content) with which a rank reports an error.

    An error in gloo's connections means that another rank is gone or waits in another collective.
    """
    if "gloo/transport" in str(error):
        return WAITED, None
    try:
        return RAISED, by_value.dumps(error)
    except Exception:
        return RAISED, by_value.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
