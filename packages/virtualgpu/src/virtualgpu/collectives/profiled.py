"""Events of collectives for torch.profiler, such as "nccl:all_reduce".

On real GPUs, the Work objects of ProcessGroupNCCL record them.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.autograd.profiler
from torch._C import _profiler

from virtualgpu.collectives.group import Transfer
from virtualgpu.hardware import Machine

# Titles of operators whose event is not named after the collective (ProcessGroupNCCL.cpp).
_TITLES = {
    "_allgather_base_": "_all_gather_base",
    "_reduce_scatter_base_": "_reduce_scatter_base",
    "barrier": "all_reduce_barrier",
}


def record(operator: str, transfer: Transfer) -> None:
    """Record the profiler's event of a collective that begins now.

    `operator` is its operator, and `transfer` has its tensors.
    """
    inputs = transfer.received if operator == "recv_" else transfer.sent
    shown = []
    for x in inputs:
        # NCCL has no complex numbers.
        shown.append(torch.view_as_real(x) if x.is_complex() else x)
    with _profiler._RecordFunctionFast(f"nccl:{_title(operator, transfer)}", shown, {}):
        pass


def _title(operator: str, transfer: Transfer) -> str:
    """Return the name of a collective's profiler event, without the prefix "nccl:"."""
    if transfer.peers is not None:
        source, target = transfer.peers
        if operator == "recv_":
            return f"recv {target}<-{source}"
        return f"send {source}->{target}"
    return _TITLES.get(operator, transfer.name.partition("(")[0])


def replacements(machine: Machine) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield (object, new attributes by name) for each object of PyTorch to change.

    These are the changes of this module. They are undone when `machine` is removed.
    """
    profile = torch.autograd.profiler.profile
    yield profile, {"_parse_kineto_results": _with_asynchronous(profile._parse_kineto_results)}


def _with_asynchronous(parse: Callable[..., Any]) -> Callable[..., Any]:
    """Return `parse`, changed so that it marks NCCL's events as asynchronous.

    `parse` reads the profiler's results. Only C++ can mark an event when it begins, so the events
    are marked afterwards.
    """

    def parse_events(*args: Any, **kwargs: Any) -> Any:
        events = parse(*args, **kwargs)
        for event in events:
            event.is_async |= event.name.startswith("nccl:")
        return events

    return parse_events
