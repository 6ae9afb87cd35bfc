"""What the explorer draws, as columns of whole numbers: lanes of spans, the memory of each device, and the lines of Python behind both."""

from typing import TYPE_CHECKING, Any

import numpy as np

from gputrace.events import ALLOC, CATEGORIES, FREE_REQUESTED
from gputrace.explorer.places import Places
from gputrace.figures.figure import CATEGORY_COLOURS, CATEGORY_HATCHES, GREY
from gputrace.figures.lanes import COLLECTIVE, LOOKS, NAMES, Lane, kinds_of, lanes_of
from gputrace.spans import LAUNCH, WAIT

if TYPE_CHECKING:
    from gputrace.trace_data import TraceData

PHASE = COLLECTIVE + 1  # a look beside those of spans: forward, backward and step
Column = list[int]


def of(trace: "TraceData") -> dict[str, Any]:
    """All of a trace that can be drawn. Times are nanoseconds from the start of the recording, each as what it adds to the one before."""
    stacks = _Stacks(trace)
    lanes = [] if trace.no_timeline else _span_lanes(trace, stacks)
    for device in trace.devices:
        if trace.peaks[device] or (trace.events.device == device).any():
            lanes.append(_memory_lane(trace, device, stacks))
    return {
        "end": max(int(_nanoseconds(np.array(trace.end))), 1),
        "badge": trace.badge,
        "lanes": lanes,
        "names": [*trace.spans.names, *dict.fromkeys(phase.name for phase in trace.phases)],
        "looks": [
            *({"name": NAMES[kind], "under": kind == WAIT, **_look(LOOKS[kind])} for kind in range(PHASE)),
            {"name": "phase", "under": False, **_look({"facecolor": GREY})},
        ],
        "categories": [
            {"name": name, **_look({"facecolor": CATEGORY_COLOURS[name], "hatch": CATEGORY_HATCHES.get(name)})} for name in CATEGORIES
        ],
        **stacks.told(),
    }


def _look(look: dict[str, Any]) -> dict[str, Any]:
    return {"colour": look["facecolor"], "hatch": (look.get("hatch") or "")[:1]}


def _nanoseconds(seconds: np.ndarray) -> np.ndarray:
    return np.round(seconds * 1e9).astype(np.int64)


def _steps(seconds: np.ndarray) -> Column:
    return np.diff(_nanoseconds(seconds), prepend=0).tolist()


class _Stacks:
    """Stacks by number, the same for the same lines: recordings number them by the calls inside libraries and the kit, too."""

    def __init__(self, trace: "TraceData") -> None:
        self._trace = trace
        numbers: dict[tuple, int] = {}
        self.number = np.array([numbers.setdefault(stack, len(numbers)) for stack in trace.stacks] or [0])
        self._stacks = list(numbers)

    def told(self) -> dict[str, Any]:
        """The lines as texts, each stack as numbers of lines, and which of them is the innermost of the user's own; -1 if none."""
        lines = {line: number for number, line in enumerate(dict.fromkeys(line for stack in self._stacks for line in stack))}
        users = {stack: self._trace.line(number) for number, stack in enumerate(self._trace.stacks)}
        return {
            "lines": [[line.location, line.function, line.text] for line in lines],
            "stacks": [[lines[line] for line in stack] for stack in self._stacks],
            "users": [-1 if (line := users.get(stack)) is None else lines[line] for stack in self._stacks],
        }


# Time


def _span_lanes(trace: "TraceData", stacks: _Stacks) -> list[dict[str, Any]]:
    kinds = kinds_of(trace)
    ran = [device for device in trace.devices if (trace.spans.device == device).any()]
    lanes = lanes_of(trace, [])  # the host's
    lanes += [lane for device in ran for lane in lanes_of(trace, [device]) if not lane.is_host]
    shown = [_span_lane(trace, lane, kinds, stacks) for lane in lanes if lane.mask.any()]
    return [_phase_lane(trace, stacks), *shown] if trace.phases else shown


def _span_lane(trace: "TraceData", lane: Lane, kinds: np.ndarray, stacks: _Stacks) -> dict[str, Any]:
    spans, mine = trace.spans, lane.mask
    return {
        "what": "spans",
        "name": lane.name,
        "start": _steps(spans.start[mine]),
        "duration": _nanoseconds(spans.duration[mine]).tolist(),
        "called": spans.name[mine].tolist(),
        "look": kinds[mine].tolist(),
        "stack": stacks.number[spans.stack[mine]].tolist(),
    }


def _phase_lane(trace: "TraceData", stacks: _Stacks) -> dict[str, Any]:
    phases, names = trace.phases, list(dict.fromkeys(phase.name for phase in trace.phases))
    return {
        "what": "spans",
        "name": "phases",
        "start": _steps(np.array([phase.start for phase in phases])),
        "duration": _nanoseconds(np.array([phase.end - phase.start for phase in phases])).tolist(),
        "called": [len(trace.spans.names) + names.index(phase.name) for phase in phases],
        "look": [PHASE] * len(phases),
        "stack": [int(stacks.number[phase.stack]) for phase in phases],
    }


# Memory


def _memory_lane(trace: "TraceData", device: int, stacks: _Stacks) -> dict[str, Any]:
    """The events of a device, what each adds to what is allocated and reserved; and its blocks, which name the events that made and freed
    them, -1 where these lie before the start or after the end."""
    events, mine = trace.events, np.flatnonzero(trace.events.device == device)
    line, layers = trace.timeline(device), trace.layers(device)
    return {
        "what": "memory",
        "device": device,
        "name": f"cuda:{device} " if len(trace.devices) > 1 else "",
        "time": _steps(events.time[mine]),
        "category": events.category[mine].tolist(),
        "rise": events.rises[mine].tolist(),
        "reserve": np.diff(line.reserved).tolist(),
        "stack": stacks.number[events.stack[mine]].tolist(),
        "base": [int(layers[name][0]) for name in CATEGORIES],
        "reserved": int(line.reserved[0]),
        "operator": _operators(trace, mine, stacks),
        "blocks": _blocks(trace, device, mine, stacks),
    }


def _operators(trace: "TraceData", mine: np.ndarray, stacks: _Stacks) -> Column:
    """For each allocation the name of the operator that it was for, by number: what the same lines launched next. -1 if that is unknown."""
    events, spans = trace.events, trace.spans
    launches, start, moment = np.flatnonzero(spans.kind == LAUNCH), _nanoseconds(spans.start), _nanoseconds(events.time)
    by_stack: dict[int, np.ndarray] = {}
    launched_by = stacks.number[spans.stack[launches]]
    for stack in np.unique(launched_by).tolist():
        by_stack[stack] = launches[launched_by == stack]
    found = []
    for index in mine.tolist():
        same = by_stack.get(int(stacks.number[events.stack[index]])) if events.action[index] == ALLOC else None
        after = 0 if same is None else int(np.searchsorted(start[same], moment[index]))
        found.append(-1 if same is None or after == len(same) else int(spans.name[same[after]]))
    return found


def _blocks(trace: "TraceData", device: int, mine: np.ndarray, stacks: _Stacks) -> dict[str, Any]:
    """A device's blocks; of each its place among the `bytes` that are drawn, and the events that made and freed it."""
    events, places = trace.events, Places(trace, device)
    position = np.full(len(events) + 1, -1)  # the last is for what lives on
    position[mine] = np.arange(len(mine))
    born = mine[events.action[mine] == ALLOC]
    there = [block for segment in trace.start if segment.device == device for block in segment.blocks if block.state == "allocated"]
    freed = mine[(events.action[mine] == FREE_REQUESTED) & (events.birth[mine] < 0)]
    end_of = {int(events.address[index]): int(index) for index in freed[::-1]}  # of what was there at the start: the first free there
    return {
        "bytes": places.bytes,
        "place": [*(places.at_start[block.address] for block in there), *(places.of_event[index] for index in born.tolist())],
        "size": [*(block.size for block in there), *events.size[born].tolist()],
        "asked": [*(block.requested for block in there), *events.requested[born].tolist()],
        "birth": [-1] * len(there) + position[born].tolist(),
        "death": position[[*(end_of.get(block.address, -1) for block in there), *events.deaths[born].tolist()]].tolist(),
        "category": [*(block.category for block in there), *events.category[born].tolist()],
        "stack": stacks.number[[*(block.stack for block in there), *events.stack[born].tolist()]].tolist(),
    }
