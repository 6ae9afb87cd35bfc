"""How kernels of several streams share one GPU."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virtualgpu.clock.machine_clock import Clock, StreamTime
from virtualgpu.clock.occupancy import Occupancy

# Sums of these are exact.
moments = st.integers(0, 64).map(lambda n: n / 8)
durations = st.integers(0, 32).map(lambda n: n / 8)
shares = st.sampled_from([1.0, 1.0, 0.75, 0.5, 0.25, 0.125])
kernels = st.lists(st.tuples(moments, durations, shares), max_size=30)


def taken_at(room: Occupancy, moment: float) -> float:
    return next((taken for time, taken in zip(reversed(room._times), reversed(room._taken), strict=True) if time <= moment), 0.0)


def steps(*rooms: Occupancy) -> list[tuple[float, float]]:
    """Stretches of time in which none of the rooms changes."""
    return list(pairwise(sorted({time for room in rooms for time in room._times} | {0.0})))


def copied(room: Occupancy) -> Occupancy:
    copy = Occupancy()
    copy._times, copy._taken = list(room._times), list(room._taken)
    return copy


@given(kernels)
def test_work_is_conserved_and_no_share_is_above_one(program):
    room = Occupancy()
    for start, seconds, share in program:
        before = copied(room)
        begin, end = room.take(0.0, start, seconds, share)
        work = 0.0
        for low, high in steps(before, room):
            got = taken_at(room, low) - taken_at(before, low)
            assert -1e-9 <= got <= share + 1e-9
            assert taken_at(room, low) <= 1 + 1e-9
            assert got < 1e-9 or (start <= low and begin <= low and high <= end + 1e-9)
            if start <= low and high <= end and got < share - 1e-9:
                assert taken_at(room, low) > 1 - 1e-6  # the GPU is never idle while work waits for it
            work += got * (high - low)
        assert work == pytest.approx(share * seconds)
        assert begin >= start and end >= begin + seconds - 1e-9
        assert room._taken[-1] == 0.0 and room._times == sorted(set(room._times))


@given(kernels, moments)
def test_what_has_gone_by_can_be_forgotten(program, now):
    """With or without the moments before `now`, the kernels that start later get the same times."""
    whole, pruned = Occupancy(), Occupancy()
    for start, seconds, share in program:
        assert whole.take(0.0, start, seconds, share) == pruned.take(0.0, start, seconds, share)
    gone = max(n for n, time in enumerate(pruned._times) if time <= now)
    del pruned._times[:gone], pruned._taken[:gone]
    for start, seconds, share in program:
        assert whole.take(now, now + start, seconds, share) == pruned.take(now, now + start, seconds, share)


def test_a_long_program_keeps_little():
    room = Occupancy()
    for n in range(10_000):
        room.take(float(n), n + 0.25, 0.5, 1.0)
    assert len(room._times) < 100


def run(*kernels: tuple[int, float, float]) -> list[tuple[float, float]]:
    """Start and end of kernels of (stream, seconds, share), all launched at 0."""
    clock, streams = Clock(), [StreamTime(0, n) for n in range(3)]
    spans = [clock.launch(streams[stream], seconds, 0.0, share=share) for stream, seconds, share in kernels]
    return [(span.start, span.end) for span in spans]


def test_two_full_kernels_of_two_streams_take_as_long_as_one_after_the_other():
    assert run((0, 2.0, 1.0), (1, 3.0, 1.0)) == [(0.0, 2.0), (2.0, 5.0)]


def test_two_halves_run_at_once():
    assert run((0, 2.0, 0.5), (1, 3.0, 0.5)) == [(0.0, 2.0), (0.0, 3.0)]


def test_a_kernel_takes_the_room_that_is_left_and_then_all_it_can_use():
    # A quarter of its share for 2 s leaves 0.5 s of work.
    assert run((0, 2.0, 0.75), (1, 1.0, 1.0)) == [(0.0, 2.0), (0.0, 2.5)]


def test_a_small_kernel_starts_where_a_later_one_leaves_room():
    clock, first, second = Clock(), StreamTime(0, 0), StreamTime(0, 1)
    clock.copy(first, "h2d", 4.0, 0.0, blocking=False)
    clock.launch(first, 4.0, 0.0)
    span = clock.launch(second, 6.0, 0.0)
    assert (span.start, span.end) == (0.0, 10.0)  # before and after the kernel that waits for the copy


def test_kernels_of_two_gpus_do_not_share():
    clock = Clock()
    spans = [clock.launch(StreamTime(device), 2.0, 0.0) for device in range(2)]
    assert [(span.start, span.end) for span in spans] == [(0.0, 2.0)] * 2


@pytest.mark.parametrize("wrong", [0.0, -0.5, 1.5, float("nan")])
def test_an_impossible_share_is_refused(wrong):
    clock, stream = Clock(), StreamTime(0)
    with pytest.raises(ValueError, match="a share of the GPU above 0 and at most 1"):
        clock.launch(stream, 1.0, 0.5, share=wrong)
    assert (clock.host, stream.ready) == (0.0, 0.0)
