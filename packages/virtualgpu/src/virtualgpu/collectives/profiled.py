"""What torch.profiler sees of a collective: "nccl:all_reduce" and the like, the event of ProcessGroupNCCL's Work."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.autograd.profiler
from torch._C import _profiler

from virtualgpu.collectives.group import Transfer
from virtualgpu.hardware import Machine

# Names that are not those of the collective (ProcessGroupNCCL.cpp), by operator.
_TITLES = {
    "_allgather_base_": "_all_gather_base",
    "_reduce_scatter_base_": "_reduce_scatter_base",
    "barrier": "all_reduce_barrier",
}


def record(operator: str, transfer: Transfer) -> None:
    """Record the event of a collective that begins."""
    title = _TITLES.get(operator, transfer.name.partition("(")[0])
    if transfer.peers is not None:
        title = ("recv {1}<-{0}" if operator == "recv_" else "send {0}->{1}").format(
            *transfer.peers
        )
    inputs = transfer.received if operator == "recv_" else transfer.sent
    shown = [
        torch.view_as_real(x) if x.is_complex() else x for x in inputs
    ]  # NCCL has no complex numbers
    with _profiler._RecordFunctionFast(f"nccl:{title}", shown, {}):
        pass


def replacements(machine: Machine) -> Iterator[tuple[Any, dict[str, Any]]]:
    """By owner, the names that change."""
    profile = torch.autograd.profiler.profile
    yield profile, {"_parse_kineto_results": _with_asynchronous(profile._parse_kineto_results)}


def _with_asynchronous(parse: Callable[..., Any]) -> Callable[..., Any]:
    """NCCL's events are asynchronous, which only C++ can say of one when it begins."""

    def parse_events(*args: Any, **kwargs: Any) -> Any:
        events = parse(*args, **kwargs)
        for event in events:
            event.is_async |= event.name.startswith("nccl:")
        return events

    return parse_events
