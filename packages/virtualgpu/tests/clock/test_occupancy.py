"""Kernels of several streams share one GPU."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virtualgpu.clock.machine_clock import Clock, StreamTime
from virtualgpu.clock.occupancy import Occupancy

# Sums of these numbers are exact.
moments = st.integers(0, 64).map(lambda n: n / 8)
durations = st.integers(0, 32).map(lambda n: n / 8)
shares = st.sampled_from([1.0, 1.0, 0.75, 0.5, 0.25, 0.125])
kernels = st.lists(st.tuples(moments, durations, shares), max_size=30)


def taken_at(occupancy: Occupancy, moment: float) -> float:
    return next(
        (
            taken
            for time, taken in zip(
                reversed(occupancy._times), reversed(occupancy._taken), strict=True
            )
            if time <= moment
        ),
        0.0,
    )


def steps(*occupancies: Occupancy) -> list[tuple[float, float]]:
    """Return the intervals (start, end) in which the occupancy does not change."""
    return list(
        pairwise(sorted({time for occupancy in occupancies for time in occupancy._times} | {0.0}))
    )


def copied(occupancy: Occupancy) -> Occupancy:
    copy = Occupancy()
    copy._times, copy._taken = list(occupancy._times), list(occupancy._taken)
    return copy


@given(kernels)
def test_work_is_conserved_and_no_share_is_above_one(program):
    occupancy = Occupancy()
    for start, seconds, share in program:
        before = copied(occupancy)
        begin, end = occupancy.take(0.0, start, seconds, share)
        work = 0.0
        for low, high in steps(before, occupancy):
            got = taken_at(occupancy, low) - taken_at(before, low)
            assert -1e-9 <= got <= share + 1e-9
            assert taken_at(occupancy, low) <= 1 + 1e-9
            assert got < 1e-9 or (start <= low and begin <= low and high <= end + 1e-9)
            if start <= low and high <= end and got < share - 1e-9:
                # the GPU is never idle while work waits for it
                assert taken_at(occupancy, low) > 1 - 1e-6
            work += got * (high - low)
        assert work == pytest.approx(share * seconds)
        assert begin >= start and end >= begin + seconds - 1e-9
        assert occupancy._taken[-1] == 0.0 and occupancy._times == sorted(set(occupancy._times))


@given(kernels, moments)
def test_what_has_gone_by_can_be_forgotten(program, now):
    """Check that later kernels get the same times if the moments before `now` are forgotten."""
    whole, pruned = Occupancy(), Occupancy()
    for start, seconds, share in program:
        assert whole.take(0.0, start, seconds, share) == pruned.take(0.0, start, seconds, share)
    gone = max(n for n, time in enumerate(pruned._times) if time <= now)
    del pruned._times[:gone], pruned._taken[:gone]
    for start, seconds, share in program:
        assert whole.take(now, now + start, seconds, share) == pruned.take(
            now, now + start, seconds, share
        )


def test_a_long_program_keeps_little():
    occupancy = Occupancy()
    for n in range(10_000):
        occupancy.take(float(n), n + 0.25, 0.5, 1.0)
    assert len(occupancy._times) < 100


def run(*kernels: tuple[int, float, float]) -> list[tuple[float, float]]:
    """Return the start and the end of kernels of (stream, seconds, share) launched at time 0."""
    clock, streams = Clock(), [StreamTime(0, n) for n in range(3)]
    spans = [
        clock.launch(streams[stream], seconds, 0.0, share=share)
        for stream, seconds, share in kernels
    ]
    return [(span.start, span.end) for span in spans]


@pytest.mark.parametrize(
    ("kernels", "times"),
    [
        ([(0, 2.0, 1.0), (1, 3.0, 1.0)], [(0.0, 2.0), (2.0, 5.0)]),  # one after the other
        ([(0, 2.0, 0.5), (1, 3.0, 0.5)], [(0.0, 2.0), (0.0, 3.0)]),  # two halves at the same time
        # a quarter of its share for 2 s leaves 0.5 s of work
        (
            [(0, 2.0, 0.75), (1, 1.0, 1.0)],
            [(0.0, 2.0), (0.0, 2.5)],
        ),
    ],
)
def test_a_kernel_takes_what_is_free(kernels, times):
    assert run(*kernels) == times


def test_a_small_kernel_starts_where_a_later_one_leaves_some_free():
    clock, first, second = Clock(), StreamTime(0, 0), StreamTime(0, 1)
    clock.copy(first, "h2d", 4.0, 0.0, blocking=False)
    clock.launch(first, 4.0, 0.0)
    span = clock.launch(second, 6.0, 0.0)
    # before and after the kernel that waits for the copy
    assert (span.start, span.end) == (
        0.0,
        10.0,
    )


def test_kernels_of_two_gpus_do_not_share():
    clock = Clock()
    spans = [clock.launch(StreamTime(device), 2.0, 0.0) for device in range(2)]
    assert [(span.start, span.end) for span in spans] == [(0.0, 2.0)] * 2


@pytest.mark.parametrize("wrong", [0.0, -0.5, 1.5, float("nan")])
def test_an_impossible_share_is_refused(wrong):
    clock, stream = Clock(), StreamTime(0)
    with pytest.raises(ValueError, match="a share above 0 and at most 1"):
        clock.launch(stream, 1.0, 0.5, share=wrong)
    assert (clock.host, stream.ready) == (0.0, 0.0)
