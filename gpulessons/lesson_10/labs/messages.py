"""The messages that DistributedDataParallel sends in a training step."""

from collections.abc import Iterator

from gpulessons import rank_programs
from labkit.labs.experiment import Row, Run

PROGRAMS = ("one batch", "micro-batches", "no_sync")
GRADIENT, MESSAGE = "gradient", "message"
COLUMNS = {"program": "", "messages": "", "difference": "", "events": ""}


def ddp_messages() -> Run:
    """What happens in one training step of DistributedDataParallel on two ranks, as rank 0 saw it, a row for each program.

    The network has four layers, and a message takes the gradients of two. The step's batch comes in one piece, in four micro-batches, or
    in four of which only the last sends (`no_sync`). `events` are the gradients and the messages in their order: ["gradient", of which
    parameter] and ["message", of which ones]. `difference` is how far the first layer's gradient is from that of the batch in one piece,
    as a share of it. Raises as `labkit.torchrun` does.
    """
    return Run("ddp_messages", {"programs": list(PROGRAMS)}, COLUMNS, rank_programs.badge(2), len(PROGRAMS), _points())


def _points() -> Iterator[Row]:
    for row in rank_programs.results("messages", 2)[0]:
        messages = sum(kind == MESSAGE for kind, _ in row["events"])
        yield {"program": row["program"], "messages": messages, "difference": row["difference"], "events": row["events"]}
