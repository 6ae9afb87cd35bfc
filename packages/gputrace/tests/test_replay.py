"""The replay finds the blocks of random programs from requests alone, like the allocator."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputrace.events import ACTION_OF, Events, MemoryEvent
from gputrace.replay import complete, complete_without_start, from_snapshot, segments_at
from virtualgpu.allocator import CachingAllocator, OutOfMemory, Settings

MiB = 1 << 20
CONFIGURATIONS = [
    "",
    "max_split_size_mb:20",
    "expandable_segments:True",
    "roundup_power2_divisions:4",
]
STEP = st.one_of(
    st.tuples(st.just("malloc"), st.integers(1, 30 * MiB), st.integers(0, 2)),
    st.tuples(st.just("malloc"), st.integers(1, 4096), st.integers(0, 2)),
    st.tuples(st.just("free"), st.integers(0, 40), st.just(0)),
    st.tuples(st.just("empty_cache"), st.just(0), st.just(0)),
)


def run(allocator, steps, live):
    for kind, number, stream in steps:
        if kind == "malloc":
            try:
                live.append(allocator.malloc(number, stream))
            except OutOfMemory:
                continue
        elif kind == "free" and live:
            allocator.free(live.pop(number % len(live)))
        elif kind == "empty_cache":
            allocator.empty_cache()


def listen(allocator, heard):
    """Collect the events as CUDA's history reports them, which is without the sizes of blocks."""

    def listener(action, block, size):
        if block is not None:
            address = block.segment.address if action == "segment_alloc" else block.address
            heard.append(
                MemoryEvent(
                    float(len(heard)), 0, block.stream, ACTION_OF[action], address, 0, size, 0
                )
            )

    allocator.listen(listener)
    return listener


def plain(segments):
    """Return the parts of segments on which a snapshot and a replay must agree."""
    names = {"active_allocated": "allocated", "active_pending_free": "pending", "inactive": "free"}
    return [
        (
            s["address"],
            s["total_size"],
            s["stream"],
            [(b["address"], b["size"], names[b["state"]]) for b in s["blocks"]],
        )
        for s in segments
    ]


def replayed(segments):
    return [
        (s.address, s.size, s.stream, [(b.address, b.size, b.state) for b in s.blocks])
        for s in segments
    ]


@pytest.mark.parametrize("configuration", CONFIGURATIONS[:2] + CONFIGURATIONS[3:])
@given(before=st.lists(STEP, max_size=20), steps=st.lists(STEP, max_size=60))
def test_a_replay_of_requests_finds_every_block(configuration, before, steps):
    allocator = CachingAllocator(0, 200 * MiB, settings=Settings.parse(configuration))
    live, heard = [], []
    run(allocator, before, live)
    start = from_snapshot(allocator.segments(), lambda frames: 0)
    listen(allocator, heard)
    run(allocator, steps, live)
    events = Events.of(heard)
    assert replayed(segments_at(events, start, allocator.settings, len(events), 0)) == plain(
        allocator.segments()
    )


@given(steps=st.lists(STEP, max_size=60))
def test_the_sizes_of_blocks_in_expandable_segments(steps):
    """The sizes of blocks are found, although other events report mapped addresses."""
    allocator = CachingAllocator(0, 200 * MiB, settings=Settings.parse("expandable_segments:True"))
    count, taken = 0, {}

    def listener(action, block, size):
        nonlocal count
        if action == "alloc":
            taken[count] = block.size
        count += action != "oom"

    allocator.record_history("all")
    allocator.listen(listener)
    run(allocator, steps, [])
    history = [
        entry
        for entry in allocator.history()
        if entry["action"] in ACTION_OF and entry["action"] not in ("oom", "snapshot")
    ]
    events = Events.of(
        MemoryEvent(
            float(i),
            0,
            entry["stream"],
            ACTION_OF[entry["action"]],
            entry["addr"],
            0,
            entry["size"],
            0,
        )
        for i, entry in enumerate(history)
    )
    completed = complete(events, [], allocator.settings)
    assert {i: int(completed.size[i]) for i in taken} == taken


def test_the_birth_of_each_block_is_known():
    allocator = CachingAllocator(0, 200 * MiB)
    old = allocator.malloc(100)
    start = from_snapshot(allocator.segments(), lambda frames: 0)
    heard = []
    listen(allocator, heard)
    block = allocator.malloc(5 * MiB)
    allocator.free(old)
    allocator.free(block)
    events = complete(Events.of(heard), start, allocator.settings)
    # segment_alloc, alloc, both frees of the block from before the recording, and of the new one
    assert events.birth.tolist() == [-1, 1, -1, -1, 1, 1]
    assert events.size.tolist()[1] == 5 * MiB


def test_without_the_first_events_births_are_found_and_sizes_rounded_up():
    rows = [
        ("free_completed", 512, 100),
        ("alloc", 1024, 100),
        ("segment_alloc", 8192, 2 * MiB),
        ("free_requested", 1024, 100),
    ]
    rows += [("free_completed", 1024, 100), ("alloc", 1024, 600)]
    told = [
        MemoryEvent(n, 0, 0, ACTION_OF[action], address, 0, asked, 0)
        for n, (action, address, asked) in enumerate(rows)
    ]
    completed = complete_without_start(Events.of(told), Settings())
    assert completed.birth.tolist() == [-1, 1, -1, 1, 1, 5]
    assert completed.size.tolist() == [512, 512, 0, 512, 512, 1024]


def test_a_replay_leaves_the_start_as_it_was():
    allocator = CachingAllocator(0, 200 * MiB)
    old = allocator.malloc(100)
    start = from_snapshot(allocator.segments(), lambda frames: 0)
    heard = []
    listen(allocator, heard)
    allocator.free(old)
    events = complete(Events.of(heard), start, allocator.settings)
    segments_at(events, start, allocator.settings, len(events), 0)
    assert [block.state for block in start[0].blocks] == ["allocated", "free"]
