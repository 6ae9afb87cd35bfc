"""The fast caching allocator equals the slow one after every step of random programs."""

from collections import Counter

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from virtualgpu.allocator import CachingAllocator, OutOfMemory, Settings
from virtualgpu.allocator.address_space import AddressSpace

from .slow_allocator import END, TOTAL, MiB, SlowAllocator


class Events:
    """Events that happen when the test says so, or when somebody waits for them."""

    def __init__(self):
        self.recorded = Counter()
        self.finished = Counter()

    def record(self, stream):
        self.recorded[stream] += 1
        return stream, self.recorded[stream]

    def done(self, event):
        return event[1] <= self.finished[event[0]]

    def wait(self, event):
        self.finished[event[0]] = max(self.finished[event[0]], event[1])


CONFIGURATIONS = st.one_of(
    st.just({}),
    st.just({"expandable_segments": True}),
    st.fixed_dictionaries(
        {"max_split_size_mb": st.sampled_from([20, 25, 64])},
        optional={"max_non_split_rounding_mb": st.just(30)},
    ),
    st.fixed_dictionaries(
        {"roundup_power2_divisions": st.sampled_from([1, 2, 4, 16])},
        optional={"large_segment_size_mb": st.just(32)},
    ),
    st.fixed_dictionaries(
        {"expandable_segments": st.just(True), "large_segment_size_mb": st.sampled_from([12, 20])}
    ),
)
EDGES = [
    1,
    511,
    512,
    513,
    MiB - 1,
    MiB,
    MiB + 1,
    2 * MiB,
    5 * MiB,
    9 * MiB,
    10 * MiB - 511,
    10 * MiB,
    10 * MiB + 1,
    19 * MiB,
    20 * MiB,
]
LARGE = [mib * MiB for mib in (24, 25, 26, 34, 45, 49, 55, 64)]
SIZES = st.one_of(
    st.sampled_from(EDGES),
    st.sampled_from(LARGE),
    st.integers(1, 2 * MiB),
    st.integers(1, 24 * MiB),
)
STREAMS = st.sampled_from([0, 0, 0, 1, 2])
STEPS = st.one_of(
    *[st.tuples(st.just("malloc"), SIZES, STREAMS)] * 5,
    *[st.tuples(st.just("free"), st.integers(0, 30), STREAMS)] * 4,
    st.tuples(st.just("record_stream"), st.integers(0, 30), STREAMS),
    st.tuples(st.just("finish"), st.integers(1, 3), STREAMS),
    st.tuples(st.just("empty_cache"), st.just(0), STREAMS),
)


def written(conf):
    return ",".join(f"{key}:{value}" for key, value in conf.items())


def layout_of(fast):
    """Return the layout of the fast allocator in the form of `SlowAllocator.layout`.

    Addresses in an expandable segment count from the start of its address range.
    """
    found = []
    for segment in fast.segments():
        moved = fast_range(fast, segment["address"]).address if segment["is_expandable"] else 0
        blocks = tuple(
            (b["address"] - moved, b["size"], b["requested_size"], b["state"])
            for b in segment["blocks"]
        )
        found.append((segment["segment_type"] == "small", segment["stream"], blocks[0][0], blocks))
    return sorted(found)


def fast_range(fast, address):
    return next(s for s in fast._segments.values() if s.address <= address < s.address + s.size)


def check(fast, slow, peaks):
    stats = fast.stats()
    figures = slow.figures()
    for pool, values in figures.items():
        assert {key: stats[key][pool]["current"] for key in values} == values
        for key, value in values.items():
            four = stats[key][pool]
            peaks[pool, key] = max(peaks[pool, key], value)
            assert four["allocated"] - four["freed"] == value
            if key in (
                "allocation",
                "active",
                "allocated_bytes",
                "active_bytes",
                "requested_bytes",
            ):
                assert four["peak"] == peaks[pool, key]
            else:  # it may have been higher during a step
                assert four["peak"] >= peaks[pool, key]
    assert layout_of(fast) == slow.layout()
    assert (stats["num_alloc_retries"], stats["num_ooms"], stats["num_sync_all_streams"]) == (
        slow.retries,
        slow.ooms,
        slow.syncs,
    )
    total = figures["all"]
    assert fast.allocated <= total["active_bytes"] <= fast.reserved <= TOTAL
    assert total["requested_bytes"] <= total["active_bytes"]
    if not slow.expandable:
        whole = sum(
            r.mapped for r in slow.ranges if [piece.state for piece in r.pieces] == ["free"]
        )
        assert total["active_bytes"] + total["inactive_split_bytes"] + whole == fast.reserved


@settings(
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.large_base_example,
    ],
)
@given(
    conf=CONFIGURATIONS,
    allowed=st.one_of(st.none(), st.integers(20 * MiB, 200 * MiB)),
    steps=st.lists(STEPS, min_size=40, max_size=90),
)
def test_the_allocator_equals_the_slow_one(conf, allowed, steps):
    events, slow_events = Events(), Events()
    fast = CachingAllocator(
        0, TOTAL, settings=Settings.parse(written(conf)), events=events, first_address=END
    )
    if allowed is not None:
        fast.set_memory_fraction(allowed / TOTAL)
        assert fast.allowed == allowed
    slow = SlowAllocator(conf, allowed, slow_events)
    live, peaks = [], Counter()
    for action, number, stream in steps:
        if action == "malloc":
            piece = slow.malloc(number, stream)
            try:
                block = fast.malloc(number, stream)
            except OutOfMemory:
                block = None
            assert (piece is None) == (block is None)
            if block is not None:
                live.append((block, piece))
        elif action == "free" and live:
            block, piece = live.pop(number % len(live))
            fast.free(block)
            slow.free(piece)
        elif action == "record_stream" and live:
            block, piece = live[number % len(live)]
            fast.record_stream(block, stream)
            piece.users |= {stream} - {block.stream}
        elif action == "finish":
            for source in (events, slow_events):
                source.finished[stream] += number
        elif action == "empty_cache":
            fast.empty_cache()
            slow.release_cached()
        check(fast, slow, peaks)
    for block, _ in live:
        fast.free(block)
    fast.empty_cache()
    assert (fast.allocated, fast.reserved, fast.segments()) == (0, 0, [])
    assert fast._addresses.take(16 * MiB) == AddressSpace(END).take(16 * MiB)
