"""The race detector agrees with a slow search for paths, for random programs.

The programs have streams, events, copies and frees. The search finds a race if no path leads from
one piece of work to the other. The detector must find the same first race, and a program without
races must compute the right values.
"""

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import virtualgpu
from virtualgpu.streams.race_reports import Races, RaceWarning

LENGTH = 512  # elements of a tensor, which has a block of its own
PARTS = {"all": slice(0, LENGTH), "low": slice(0, LENGTH // 2), "high": slice(LENGTH // 2, LENGTH)}
# streams 0 to 2 are on cuda:0 and stream 3 on cuda:1, and the tensors are on cuda:0
STREAMS, TENSORS, EVENTS = (
    range(4),
    range(2),
    range(2),
)


@pytest.fixture(scope="module", autouse=True)
def used():
    with virtualgpu.use(gpus=2, like="H200"):
        yield


class SlowSearch:
    """A graph of pieces of work. Two pieces are ordered if a path leads from one to the other."""

    def __init__(self) -> None:
        self.before: list[set[int]] = []  # for each node, the nodes just before it
        self.last: dict[int, int | None] = dict.fromkeys(STREAMS)
        self.host: set[int] = set()  # the nodes that the host has waited for
        self.events: dict[int, set[int]] = {event: set() for event in EVENTS}
        self.touched: list[tuple[int, int, slice, bool]] = []  # node, memory, part, writes
        self.memory = {tensor: tensor for tensor in TENSORS}
        self.values = {tensor: np.zeros(LENGTH) for tensor in TENSORS}
        self.sums: list[float] = []

    def node(self, *streams: int) -> int:
        self.before.append(
            {self.last[stream] for stream in streams if self.last[stream] is not None} | self.host
        )
        for stream in streams:
            self.last[stream] = len(self.before) - 1
        return len(self.before) - 1

    def reaches(self, first: int, later: int) -> bool:
        return first == later or any(
            self.reaches(first, node) for node in self.before[later] if node >= first
        )

    def touch(self, node: int, tensor: int, part: slice, writes: bool) -> bool:
        """Note an access of `node` to a part of a tensor.

        Returns whether an earlier access races with it.
        """
        mine = self.memory[tensor]
        raced = any(
            memory == mine
            and (writes or wrote)
            and max(part.start, other.start) < min(part.stop, other.stop)
            and not self.reaches(n, node)
            for n, memory, other, wrote in self.touched
        )
        self.touched.append((node, mine, part, writes))
        return raced

    def apply(self, action: tuple) -> bool:
        """Perform an action of a random program.

        Returns whether it races with an earlier action.
        """
        kind, stream, tensor, part, event = action
        if kind == "write":
            self.values[tensor][PARTS[part]] += 1
        elif kind == "replace":
            self.values[tensor][:] = 0
        elif kind in ("read", "copy"):
            self.sums.append(self.values[tensor][PARTS[part]].sum())
        if kind in ("read", "write"):
            return self.touch(self.node(stream), tensor, PARTS[part], kind == "write")
        if kind == "copy":
            # This stream of cuda:0 and the default stream of cuda:1 wait for each other.
            return self.touch(self.node(stream, 3), tensor, PARTS[part], False)
        if kind == "record":
            self.events[event] = {self.node(stream)}
        elif kind == "wait":
            node = self.node(stream)
            self.before[node] |= self.events[event]
        elif kind == "synchronize":
            self.host = self.host | {self.node(stream)}
        elif kind == "replace":  # the allocator reuses the block
            return self.touch(self.node(0), tensor, PARTS["all"], True)
        return False


class Program:
    """A random program's state on a virtual GPU, which runs the same actions as the search."""

    def __init__(self, streams: list[torch.cuda.Stream]) -> None:
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        self.streams = streams
        self.events = [torch.cuda.Event() for _ in EVENTS]
        self.tensors = [torch.zeros(LENGTH, device="cuda:0") for _ in TENSORS]
        self.kept: list[torch.Tensor] = []
        torch.cuda.synchronize(0)

    def apply(self, action: tuple) -> None:
        kind, stream, tensor, part, event = action
        on = self.streams[stream]
        shown = self.tensors[tensor][PARTS[part]]
        if kind == "replace":
            address = self.tensors[tensor].data_ptr()
            del shown
            self.tensors[tensor] = None
            self.tensors[tensor] = torch.zeros(LENGTH, device="cuda:0")
            assert self.tensors[tensor].data_ptr() == address
            return
        with torch.cuda.stream(on):
            if kind == "read":
                self.kept.append(shown.sum())
            elif kind == "write":
                shown.add_(1.0)
            elif kind == "copy":
                self.kept.append(shown.to("cuda:1"))
            elif kind == "record":
                self.events[event].record(on)
            elif kind == "wait":
                on.wait_event(self.events[event])
            elif kind == "synchronize":
                on.synchronize()


def actions() -> st.SearchStrategy[tuple]:
    touch = st.tuples(
        st.sampled_from(["read", "write", "copy"]),
        st.sampled_from(range(3)),
        st.sampled_from(TENSORS),
        st.sampled_from(list(PARTS)),
        st.just(0),
    )
    order = st.tuples(
        st.sampled_from(["record", "wait", "synchronize"]),
        st.sampled_from(range(3)),
        st.just(0),
        st.just("all"),
        st.sampled_from(EVENTS),
    )
    replace = st.tuples(
        st.just("replace"), st.just(0), st.sampled_from(TENSORS), st.just("all"), st.just(0)
    )
    return st.one_of(touch, order, order, replace)


@settings(derandomize=True)
@given(st.lists(actions(), max_size=14))
def test_races_are_found_where_there_are_some_and_nowhere_else(program):
    slow = SlowSearch()
    fast = Program([torch.cuda.default_stream(0), *_streams(), torch.cuda.default_stream(1)])
    with warnings.catch_warnings():
        warnings.simplefilter("error", RaceWarning)
        virtualgpu.current()._installation.machine.races.races = Races()
        for action in program:
            expected = slow.apply(action)
            try:
                fast.apply(action)
            except RaceWarning:
                assert expected, f"{action} of {program} races with nothing"
                return
            assert not expected, f"{action} of {program} races, and nobody says so"
        torch.cuda.synchronize(0)
        assert [kept.sum().item() for kept in fast.kept] == slow.sums


_made: list[torch.cuda.Stream] = []


def _streams() -> list[torch.cuda.Stream]:
    while len(_made) < 2:
        _made.append(torch.cuda.Stream())
    return _made
