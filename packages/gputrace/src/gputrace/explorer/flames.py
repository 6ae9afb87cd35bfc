"""Flame graph: the memory at a device's peak, by the calls that allocated it."""

from typing import TYPE_CHECKING, Any

from gputrace.events import SourceLine, Stack
from gputrace.peak import held_at_peak
from virtualgpu.source_lines import is_users

if TYPE_CHECKING:
    from gputrace.trace_data import TraceData

_MODULE_CALLS = ("_call_impl", "_wrapped_call_impl")  # they are between any two modules
SMALLEST = 0.001  # share of the peak. A smaller call is not drawn.
UNKNOWN = "before the recording, or no known line"


def flame_of(trace: "TraceData", device: int) -> dict[str, Any]:
    """Return the calls as a tree. Each has its name, its bytes, and the calls that it makes.

    The largest call comes first. `yours` says whether the line is in the user's own code.
    """
    root = _call("all at the peak", True)
    for number, nbytes in held_at_peak(trace, device).items():
        _add(root, trace.stacks[number], nbytes)
    _finish(root, SMALLEST * root["bytes"])
    return root


def _call(name: str, yours: bool) -> dict[str, Any]:
    """Return a new node of the tree for a call, without memory and without calls inside it.

    `yours` says whether the call is in the user's own code.
    """
    return {"name": name, "yours": yours, "bytes": 0, "calls": {}}


def _add(root: dict[str, Any], stack: Stack, nbytes: int) -> None:
    """Add the bytes that a stack allocated to each call of the stack, starting at `root`."""
    root["bytes"] += nbytes
    calls = [line for line in reversed(stack) if line.function not in _MODULE_CALLS]
    # Code without a text was given to `exec`, as the ranks of `torchrun` run a script.
    names = [(_name(line), is_users(line.filename) and bool(line.text)) for line in calls]
    while any(yours for _, yours in names) and not names[0][1]:
        del names[0]  # what started the script
    names = names or [(UNKNOWN, False)]
    at = root
    for name, yours in names:
        at = at["calls"].setdefault(name, _call(name, yours))
        at["bytes"] += nbytes


def _name(line: SourceLine) -> str:
    """Return the name of a call: its location and source, or its function if there is no source."""
    if line.text:
        return f"{line.location}  {line.text}"
    return f"{line.function} in {line.location}"


def _finish(call: dict[str, Any], smallest: float) -> None:
    """Sort the inner calls of a call, and leave out those with fewer than `smallest` bytes."""
    seen = [inner for inner in call["calls"].values() if inner["bytes"] >= smallest]
    call["calls"] = sorted(seen, key=lambda inner: (-inner["bytes"], inner["name"]))
    for inner in call["calls"]:
        _finish(inner, smallest)
