"""The data that the explorer draws, as columns of whole numbers.

There are lanes of spans, the memory of each device, and the lines of Python that both belong to.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from gputrace.collectives import SHORTEST, Collective, collectives_of
from gputrace.events import ALLOC, CATEGORIES, FREE_REQUESTED
from gputrace.explorer import legend
from gputrace.explorer.flames import flame_of
from gputrace.explorer.links import Rows, links_of
from gputrace.explorer.places import Places
from gputrace.figures.figure import CATEGORY_COLOURS, CATEGORY_HATCHES, GREY
from gputrace.figures.lanes import COLLECTIVE, LOOKS, NAMES, Lane, kinds_of, lanes_of
from gputrace.phases import Phase
from gputrace.spans import HOST, LAUNCH, WAIT

if TYPE_CHECKING:
    from gputrace.trace_data import TraceData

PHASE = COLLECTIVE + 1  # the look of the phases forward, backward and step
RANK_WAITS = PHASE + 1  # the look of a rank's wait for another rank
Column = list[int]


def of(trace: "TraceData") -> dict[str, Any]:
    """Return everything in a trace that the explorer draws.

    Times are in nanoseconds from the start of the recording. Each is the difference to the one
    before it.
    """
    stacks = _Stacks(trace)
    timeline = _Timeline(trace, stacks)
    lanes = timeline.lanes()
    for device in trace.devices:
        if trace.peaks[device] or (trace.events.device == device).any():
            lanes.append(_memory_lane(trace, device, stacks))
    looks = []
    for kind in range(PHASE):
        looks.append({**_word(NAMES[kind]), "under": kind == WAIT, **_look(LOOKS[kind])})
    looks.append({**_word("phase"), "under": False, **_look({"facecolor": GREY})})
    looks.append({**_word("rank waits"), "under": False, **_look(LOOKS[WAIT])})
    categories = []
    for name in CATEGORIES:
        look = {"facecolor": CATEGORY_COLOURS[name], "hatch": CATEGORY_HATCHES.get(name)}
        categories.append({"name": name, "means": legend.CATEGORIES[name], **_look(look)})
    lines = []
    for link, (name, means) in legend.LINES.items():
        lines.append({"kind": link, "name": name, "means": means})
    return {
        "end": max(int(_nanoseconds(np.array(trace.end))), 1),
        "badge": trace.badge,
        "lanes": lanes,
        "names": list(timeline.names),
        "links": links_of(trace, timeline.rows, timeline.collectives),
        "looks": looks,
        "categories": categories,
        "lineLooks": lines,
        "flames": {device: flame_of(trace, device) for device in trace.devices},
        "memoryWords": [{"name": name, "means": text} for name, text in legend.MEMORY.items()],
        **stacks.tables(),
    }


def _word(name: str) -> dict[str, str]:
    """Return the name of a kind of spans and what it means, for the legend."""
    return {"name": name, "means": legend.SPANS[name]}


def _look(look: dict[str, Any]) -> dict[str, Any]:
    """Return the colour and the hatch of a matplotlib style as plain data."""
    return {"colour": look["facecolor"], "hatch": (look.get("hatch") or "")[:1]}


def _nanoseconds(seconds: np.ndarray) -> np.ndarray:
    """Convert seconds to whole nanoseconds."""
    return np.round(seconds * 1e9).astype(np.int64)


def _steps(seconds: np.ndarray) -> Column:
    """Return the differences between successive times, in nanoseconds."""
    return np.diff(_nanoseconds(seconds), prepend=0).tolist()


class _Stacks:
    """The different stacks of a trace, numbered.

    A recording has several stacks with the same lines, which differ in calls inside libraries.
    Here, stacks with the same lines have the same number.

    Attributes:
        number: the number here of each stack of the trace.
    """

    def __init__(self, trace: "TraceData") -> None:
        self._trace = trace
        numbers: dict[tuple, int] = {}
        for stack in trace.stacks:
            numbers.setdefault(stack, len(numbers))
        self.number = np.array([numbers[stack] for stack in trace.stacks] or [0])
        self._stacks = list(numbers)

    def tables(self) -> dict[str, Any]:
        """Return the lines as text, the numbers of the lines in each stack, and the user's lines.

        The user's line of a stack is the innermost one in the user's own code, or -1.
        """
        lines: dict[Any, int] = {}
        for stack in self._stacks:
            for line in stack:
                lines.setdefault(line, len(lines))
        users = {stack: self._trace.line(number) for number, stack in enumerate(self._trace.stacks)}
        of_stacks = []
        for stack in self._stacks:
            line = users.get(stack)
            of_stacks.append(-1 if line is None else lines[line])
        return {
            "lines": [[line.location, line.function, line.text] for line in lines],
            "stacks": [[lines[line] for line in stack] for stack in self._stacks],
            "users": of_stacks,
        }


# Time


class _Timeline:
    """The lanes of spans: phases, hosts, and the streams of each device that ran something.

    Attributes:
        names: the numbers of all names.
        rows: the number of the lane of each stream, and of each thread of a host.
        collectives: the collectives of several ranks.
    """

    def __init__(self, trace: "TraceData", stacks: _Stacks) -> None:
        self._trace, self._stacks, self._kinds = trace, stacks, kinds_of(trace)
        self.names = {name: number for number, name in enumerate(trace.spans.names)}
        self.rows: Rows = {}
        self.collectives: list[Collective] = []
        if not trace.no_timeline:
            self.collectives = collectives_of(trace)
        # The wait before each span of a collective, and the rank that was awaited.
        self._waits: dict[int, tuple[float, str]] = {}
        for collective in self.collectives:
            awaited = f"waits for rank {trace.spans.device[collective.last]}"
            for index, seconds in zip(collective.spans, collective.waited, strict=True):
                if seconds > SHORTEST:
                    self._waits[index] = seconds, awaited

    def lanes(self) -> list[dict[str, Any]]:
        """Return the columns of all lanes."""
        trace, told = self._trace, []
        if trace.no_timeline:
            return []
        spans, of_host = trace.spans, {host.rank: host for host in trace.hosts}
        if trace.phases:
            told.append(self._phase_lane("phases", trace.phases))
        shown = lanes_of(trace, [])  # the lane of the one host
        for device in sorted({*trace.devices, *of_host}):
            host = of_host.get(device)
            if host is not None:
                mask = (spans.device == HOST) & np.isin(spans.stream, host.threads)
                shown.append(Lane(HOST, None, None, f"rank {device} host", mask))
            if (spans.device == device).any():
                shown += [lane for lane in lanes_of(trace, [device]) if not lane.is_host]
        for lane in shown:
            if not lane.mask.any():
                continue
            if lane.is_host:
                for thread in np.unique(spans.stream[lane.mask]).tolist():
                    self.rows[HOST, thread] = len(told)
            elif lane.stream is not None:
                self.rows[lane.device, lane.stream] = len(told)
            told.append(self._span_lane(lane))
        return self._with_phases_of_ranks(told)

    def _with_phases_of_ranks(self, told: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Insert the phases of each rank above the lane of the rank's host.

        `told` are the columns of the other lanes.
        """
        before: dict[int, dict[str, Any]] = {}
        for host in self._trace.hosts:
            row = next((self.rows[HOST, t] for t in host.threads if (HOST, t) in self.rows), None)
            if host.phases and row is not None:
                before[row] = self._phase_lane(f"rank {host.rank} phases", host.phases)
        lanes, moved = [], []
        for row, lane in enumerate(told):
            if row in before:
                lanes.append(before[row])
            moved.append(len(lanes))
            lanes.append(lane)
        self.rows = {where: moved[row] for where, row in self.rows.items()}
        return lanes

    def _span_lane(self, lane: Lane) -> dict[str, Any]:
        """Return the columns of one lane of spans, with the waits for other ranks."""
        spans, mine = self._trace.spans, np.flatnonzero(lane.mask)
        rows = []
        for index in mine.tolist():
            name, look = int(spans.name[index]), int(self._kinds[index])
            stack, nbytes = int(self._stacks.number[spans.stack[index]]), int(spans.nbytes[index])
            times = float(spans.start[index]), float(spans.duration[index])
            rows.append((*times, name, look, stack, nbytes))
            if index in self._waits:
                seconds, awaited = self._waits[index]
                since, called = float(spans.ready[index]), self._number(awaited)
                rows.append((since, seconds, called, RANK_WAITS, stack, nbytes))
        rows.sort(key=lambda row: row[0])
        columns: list[Any] = list(zip(*rows, strict=True))
        moved = {number: row[5] for number, row in enumerate(rows) if row[5]}
        return {
            "what": "spans",
            "name": lane.name,
            "start": _steps(np.array(columns[0])),
            "duration": _nanoseconds(np.array(columns[1])).tolist(),
            "called": list(columns[2]),
            "look": list(columns[3]),
            "stack": list(columns[4]),
            "nbytes": moved,
        }

    def _phase_lane(self, name: str, phases: list[Phase]) -> dict[str, Any]:
        """Return the columns of a lane of phases."""
        durations = np.array([phase.end - phase.start for phase in phases])
        return {
            "what": "spans",
            "name": name,
            "start": _steps(np.array([phase.start for phase in phases])),
            "duration": _nanoseconds(durations).tolist(),
            "called": [self._number(phase.name) for phase in phases],
            "look": [PHASE] * len(phases),
            "stack": [int(self._stacks.number[phase.stack]) for phase in phases],
            "nbytes": {},
        }

    def _number(self, name: str) -> int:
        """Return the number of a name, and assign the next number if the name is new."""
        return self.names.setdefault(name, len(self.names))


# Memory


def _memory_lane(trace: "TraceData", device: int, stacks: _Stacks) -> dict[str, Any]:
    """Return the columns of a device's memory: its events and its blocks.

    An event has the change of the allocated and of the reserved bytes. A block has the indices of
    the events that allocated and freed it, or -1 if that was before the start or after the end.
    """
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
    """Return the number of the operator's name for each allocation on a device.

    The operator is the one that the same lines launched next. The number is -1 if the operator is
    not known. `mine` are the indices of the device's events.
    """
    events, spans = trace.events, trace.spans
    launches = np.flatnonzero(spans.kind == LAUNCH)
    start, moment = _nanoseconds(spans.start), _nanoseconds(events.time)
    by_stack: dict[int, np.ndarray] = {}
    launched_by = stacks.number[spans.stack[launches]]
    for stack in np.unique(launched_by).tolist():
        by_stack[stack] = launches[launched_by == stack]
    found = []
    for index in mine.tolist():
        name = -1
        same = by_stack.get(int(stacks.number[events.stack[index]]))
        if same is not None and events.action[index] == ALLOC:
            after = int(np.searchsorted(start[same], moment[index]))
            if after < len(same):
                name = int(spans.name[same[after]])
        found.append(name)
    return found


def _blocks(trace: "TraceData", device: int, mine: np.ndarray, stacks: _Stacks) -> dict[str, Any]:
    """Return the columns of a device's blocks.

    `place` is the offset of a block among the `bytes` that are drawn. `birth` and `death` are the
    indices of the events that allocated and freed the block. `mine` are the indices of the device's
    events.
    """
    events, places = trace.events, Places(trace, device)
    position = np.full(len(events) + 1, -1)  # the last entry is for blocks that are never freed
    position[mine] = np.arange(len(mine))
    born = mine[events.action[mine] == ALLOC]
    segments = [segment for segment in trace.start if segment.device == device]
    blocks = [block for segment in segments for block in segment.blocks]
    there = [block for block in blocks if block.state == "allocated"]
    # A block that was there at the start ends with the first event that frees its address.
    freed = mine[(events.action[mine] == FREE_REQUESTED) & (events.birth[mine] < 0)]
    end_of = {int(events.address[index]): int(index) for index in freed[::-1]}
    deaths = [end_of.get(block.address, -1) for block in there] + events.deaths[born].tolist()
    stack = [block.stack for block in there] + events.stack[born].tolist()
    place = [places.at_start[block.address] for block in there]
    place += [places.of_event[index] for index in born.tolist()]
    return {
        "bytes": places.bytes,
        "place": place,
        "size": [block.size for block in there] + events.size[born].tolist(),
        "asked": [block.requested for block in there] + events.requested[born].tolist(),
        "birth": [-1] * len(there) + position[born].tolist(),
        "death": position[deaths].tolist(),
        "category": [block.category for block in there] + events.category[born].tolist(),
        "stack": stacks.number[stack].tolist(),
    }
