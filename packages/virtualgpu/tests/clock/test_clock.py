from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virtualgpu.clock.machine_clock import QUEUE_LENGTH, Clock, Span, StreamTime, Wait

# Multiples of a power of two, so that sums are exact and can be compared with ==.
seconds = st.integers(0, 1000).map(lambda n: n / 1024)
stream_index = st.integers(0, 3)  # two devices with two streams each
step = st.one_of(
    st.tuples(st.just("launch"), stream_index, seconds, seconds),
    st.tuples(
        st.just("launch"),
        stream_index,
        seconds,
        seconds,
        st.just("part"),
        st.sampled_from([0.25, 0.5, 0.75]),
    ),
    st.tuples(
        st.just("copy"),
        stream_index,
        st.sampled_from(["h2d", "d2h", "p2p"]),
        seconds,
        seconds,
        st.booleans(),
    ),
    st.tuples(st.just("record"), stream_index, seconds),
    st.tuples(st.just("wait"), stream_index, st.integers(0, 100)),
    st.tuples(st.just("query"), st.integers(0, 100), seconds),
    st.tuples(st.just("synchronize_stream"), stream_index, seconds),
    st.tuples(st.just("synchronize_device"), st.integers(0, 1), seconds),
    st.tuples(st.just("synchronize_event"), st.integers(0, 100), seconds),
    st.tuples(st.just("advance_host"), seconds),
)
programs = st.lists(step, max_size=40)


class Run:
    """A program on a new clock: its spans in launch order, its events, and the host's times."""

    def __init__(self, program):
        self.clock = Clock()
        self.streams = [StreamTime(device, stream) for device in (0, 1) for stream in (0, 7)]
        self.spans, self.waits, self.events, self.hosts, self.answers = [], [], [], [0.0], []
        self.clock.listen(self.hear)
        for name, *arguments in program:
            self.step(name, arguments)
            self.hosts.append(self.clock.host)

    def step(self, name, arguments):
        if name in ("launch", "copy", "record", "wait", "synchronize_stream"):
            arguments[0] = self.streams[arguments[0]]
        if name in ("wait", "query", "synchronize_event"):
            if not self.events:
                return
            index = 1 if name == "wait" else 0
            arguments[index] = self.events[arguments[index] % len(self.events)]
        answer = getattr(self.clock, name)(*arguments)
        if name == "record":
            self.events.append(answer)
        elif name == "query":
            self.answers.append(answer)

    def hear(self, what: Span | Wait) -> None:
        (self.spans if type(what) is Span else self.waits).append(what)

    def of(self, stream: StreamTime) -> list[Span]:
        return [
            span
            for span in self.spans
            if (span.device, span.stream) == (stream.device_index, stream.stream_id)
        ]

    def times(self):
        spans = [
            (span.device, span.stream, span.kind, span.name, span.start, span.duration)
            for span in self.spans
        ]
        return spans, [event.time for event in self.events], self.hosts, self.answers


@given(programs)
def test_host_time_never_goes_back(program):
    hosts = Run(program).hosts
    assert hosts == sorted(hosts)


@given(programs)
def test_work_of_a_stream_keeps_its_order_and_never_overlaps(program):
    run = Run(program)
    for stream in run.streams:
        spans = run.of(stream)
        assert all(earlier.end <= later.start for earlier, later in pairwise(spans))
        assert not spans or stream.ready >= spans[-1].end


@given(programs)
def test_copies_of_an_engine_never_overlap(program):
    engines = {}
    for span in Run(program).spans:
        if span.kind != "kernel":
            assert span.start >= engines.get((span.device, span.kind), 0.0)
            engines[span.device, span.kind] = span.end


@given(programs)
def test_the_same_program_gives_the_same_times(program):
    assert Run(program).times() == Run(program).times()


@given(programs)
def test_listening_changes_no_time(program):
    run, deaf = Run([]), Run([])
    deaf.clock.unlisten(deaf.hear)
    for name, *arguments in program:
        run.step(name, list(arguments))
        deaf.step(name, list(arguments))
    assert (run.clock.host, [s.ready for s in run.streams]) == (
        deaf.clock.host,
        [s.ready for s in deaf.streams],
    )
    assert deaf.spans == deaf.waits == []


@given(programs)
def test_every_span_says_when_it_was_launched(program):
    run = Run(program)
    for span in run.spans:
        assert 0.0 <= span.overhead <= span.launched <= span.start


@given(programs)
def test_waits_say_who_waits_for_what_and_how_long(program):
    run = Run([])
    for name, *arguments in program:
        noted, before = len(run.waits), run.clock.host
        run.step(name, arguments)
        new = run.waits[noted:]
        if name == "wait" and run.events:
            (wait,) = new
            assert wait.waiter is arguments[
                0
            ] and wait.asked == run.clock.host <= wait.until >= max(wait.time, wait.waiter.ready)
        elif name.startswith("synchronize") and (run.events or name != "synchronize_event"):
            (wait,) = new
            assert wait.waiter is None and wait.name == name.replace("_", " ")
            assert (wait.asked, wait.until) == (before, run.clock.host) and wait.time <= wait.until
        elif name == "copy" and arguments[-1]:
            (wait,) = new
            assert (
                wait.waiter is None
                and wait.until == wait.time == run.spans[-1].end == run.clock.host
            )
        else:
            assert new == []


def test_several_listen_in_the_order_in_which_they_came():
    clock, heard = Clock(), []
    first, second = lambda what: heard.append(1), lambda what: heard.append(2)
    clock.listen(first)
    clock.listen(second)
    clock.launch(StreamTime(0), 1.0, 0.0)
    clock.unlisten(first)
    clock.launch(StreamTime(0), 1.0, 0.0)
    assert heard == [1, 2, 2]
    with pytest.raises(ValueError, match="does not listen"):
        clock.unlisten(first)


@given(programs, stream_index, seconds)
def test_synchronize_stream_leaves_nothing_undone(program, index, overhead):
    run = Run(program)
    before, ready = run.clock.host, run.streams[index].ready
    run.clock.synchronize_stream(run.streams[index], overhead)
    assert run.clock.host == max(before, ready) + overhead


@given(programs, st.integers(0, 1), seconds)
def test_synchronize_device_leaves_nothing_undone_there_and_waits_for_nothing_else(
    program, device, overhead
):
    run = Run(program)
    before = run.clock.host
    ready = max(stream.ready for stream in run.streams if stream.device_index == device)
    run.clock.synchronize_device(device, overhead)
    assert run.clock.host == max(before, ready) + overhead


@given(programs, stream_index, stream_index, seconds)
def test_work_after_a_wait_starts_after_the_event(program, recorded, waiting, duration):
    run = Run(program)
    event = run.clock.record(run.streams[recorded])
    before = run.clock.host
    run.clock.wait(run.streams[waiting], event)
    assert run.clock.host == before  # the stream waits, not the host
    assert run.clock.launch(run.streams[waiting], duration, 0.0).start >= event.time


@given(programs, stream_index)
def test_an_event_is_done_once_the_host_has_waited_for_it(program, index):
    run = Run(program)
    event = run.clock.record(run.streams[index])
    assert run.clock.query(event, 0.0) == (run.streams[index].ready <= run.clock.host)
    run.clock.synchronize_event(event, 0.0)
    assert run.clock.query(event, 0.0)


def test_a_launch_returns_before_its_work_is_done():
    clock, stream = Clock(), StreamTime(0)
    span = clock.launch(stream, 5.0, 0.5, "matmul")
    assert clock.host == 0.5
    assert (span.device, span.stream, span.kind, span.name, span.start, span.duration) == (
        0,
        0,
        "kernel",
        "matmul",
        0.5,
        5.0,
    )
    clock.synchronize_stream(stream, 0.25)
    assert clock.host == 5.75


def test_elapsed_time_between_two_events_is_the_work_between_them():
    clock, stream = Clock(), StreamTime(0)
    clock.launch(stream, 8.0, 0.5)
    before = clock.record(stream)
    clock.launch(stream, 2.0, 0.5)
    clock.launch(stream, 3.0, 0.5)
    assert clock.record(stream).time - before.time == 5.0


def test_an_event_on_an_idle_stream_happens_now():
    clock, stream = Clock(), StreamTime(0)
    clock.launch(stream, 1.0, 0.0)
    clock.advance_host(4.0)
    before = clock.record(stream, 0.5)
    clock.advance_host(2.0)
    assert (before.time, clock.record(stream).time) == (4.0, 6.5)


def test_only_copies_on_other_streams_overlap_with_kernels():
    clock, compute, side = Clock(), StreamTime(0), StreamTime(0, 1)
    clock.launch(compute, 4.0, 0.0)
    assert clock.copy(compute, "h2d", 1.0, 0.0, blocking=False).start == 4.0
    assert clock.copy(side, "d2h", 1.0, 0.0, blocking=False).start == 0.0
    # The engine of host-to-device copies is busy until the first copy on it is done.
    assert clock.copy(side, "h2d", 1.0, 0.0, blocking=False).start == 5.0
    assert clock.host == 0.0


def test_a_blocking_copy_keeps_the_host():
    clock, stream = Clock(), StreamTime(0)
    clock.launch(stream, 4.0, 0.0)
    span = clock.copy(stream, "d2h", 2.0, 0.5, blocking=True, name="item")
    assert (span.kind, span.name, span.start, clock.host) == ("d2h", "item", 4.0, 6.0)


def test_a_loop_that_asks_an_event_ends():
    clock, stream = Clock(), StreamTime(0)
    clock.launch(stream, 100.0, 0.0)
    event = clock.record(stream)
    asked = 1
    while not clock.query(event, overhead=0.5):
        asked += 1
    assert asked == 200


@pytest.mark.parametrize("wrong", [-1.0, nan, inf])
def test_impossible_durations_are_refused_and_change_nothing(wrong):
    clock, stream = Clock(), StreamTime(0)
    event = clock.record(stream)
    calls = [
        lambda: clock.advance_host(wrong),
        lambda: clock.launch(stream, wrong, 0.0),
        lambda: clock.launch(stream, 0.0, wrong),
        lambda: clock.copy(stream, "h2d", wrong, 0.0, blocking=False),
        lambda: clock.copy(stream, "h2d", 0.0, wrong, blocking=False),
        lambda: clock.record(stream, wrong),
        lambda: clock.query(event, wrong),
        lambda: clock.synchronize_stream(stream, wrong),
        lambda: clock.synchronize_device(0, wrong),
        lambda: clock.synchronize_event(event, wrong),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=f"from 0 on, got {wrong!r}"):
            call()
    assert (clock.host, stream.ready) == (0.0, 0.0)


def test_threads_lose_no_time_and_never_overlap_in_a_stream():
    clock, stream, spans = Clock(), StreamTime(0), []
    clock.listen(spans.append)

    def work(_):
        for _ in range(250):  # 1,000 in total, which fit into the stream's queue
            clock.launch(stream, 1 / 1024, 1 / 2048)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert clock.host == 1000 / 2048
    assert stream.ready == 1 / 2048 + 1000 / 1024
    spans.sort(key=lambda span: span.start)
    assert all(earlier.end <= later.start for earlier, later in pairwise(spans))


# Order


def is_before(clock, stream, count, later):
    return clock.before(later).get(stream, 0) >= count


def test_a_stream_knows_its_own_work_and_no_other_streams():
    clock, a, b = Clock(), StreamTime(0, 1), StreamTime(0, 2)
    clock.launch(a, 1.0, 0.0)
    assert is_before(clock, a, 1, a)
    assert not is_before(clock, a, 1, b)


def test_time_that_has_passed_orders_nothing():
    clock, a, b = Clock(), StreamTime(0, 1), StreamTime(0, 2)
    clock.launch(a, 1.0, 0.0)
    clock.advance_host(100.0)
    assert not is_before(clock, a, 1, b)


def test_an_event_orders_what_was_queued_before_it_and_nothing_after():
    clock, a, b, c = Clock(), StreamTime(0, 1), StreamTime(0, 2), StreamTime(1, 0)
    clock.launch(a, 1.0, 0.0)
    event = clock.record(a)
    clock.launch(a, 1.0, 0.0)
    clock.wait(b, event)
    clock.wait(c, clock.record(b))
    for later in (b, c):
        assert is_before(clock, a, 1, later)
        assert not is_before(clock, a, 2, later)


@pytest.mark.parametrize(
    "wait",
    [
        lambda clock, a: clock.synchronize_stream(a, 0.0),
        lambda clock, a: clock.synchronize_device(0, 0.0),
        lambda clock, a: clock.synchronize_event(clock.record(a), 0.0),
        lambda clock, a: clock.copy(a, "d2h", 1.0, 0.0, blocking=True),
        lambda clock, a: (
            clock.advance_host(10.0)
            or clock.query(clock.record(a))
            or clock.advance_host(9.0)
            or clock.query(clock.record(a))
        ),
    ],
)
def test_what_the_host_has_waited_for_is_before_all_that_it_launches(wait):
    clock, a, b = Clock(), StreamTime(0, 1), StreamTime(1, 2)
    learned = []
    clock.call_when_learned(lambda: learned.append(clock.known[a]))
    clock.launch(a, 1.0, 0.0)
    wait(clock, a)
    assert learned and is_before(clock, a, 1, b)


def test_another_device_is_not_waited_for():
    clock, a, b = Clock(), StreamTime(0, 1), StreamTime(1, 0)
    clock.launch(a, 1.0, 0.0)
    clock.synchronize_device(1, 0.0)
    assert not is_before(clock, a, 1, b)


# A full queue of launches, as measured on an H100 (benchmarks/timing/launch_queue.py).


def fill(clock: Clock, stream: StreamTime, launches: int = QUEUE_LENGTH) -> None:
    """Queue `launches` launches of one second each on a stream, without host time."""
    for _ in range(launches):
        clock.launch(stream, 1.0, 0.0)


@pytest.mark.parametrize(
    "work",
    [
        lambda clock, stream: clock.launch(stream, 1.0, 0.0),
        lambda clock, stream: clock.copy(stream, "h2d", 1.0, 0.0, blocking=False),
        lambda clock, stream: clock.record(stream, timed=True),
    ],
    ids=["kernel", "copy", "timed event"],
)
def test_a_full_queue_holds_the_host_until_its_oldest_launch_ends(work):
    clock, stream = Clock(), StreamTime(0)
    heard = []
    clock.listen(heard.append)
    fill(clock, stream)
    assert clock.host == 0.0
    work(clock, stream)
    assert clock.host == 1.0
    work(clock, stream)
    assert clock.host == 2.0
    waits = [what for what in heard if isinstance(what, Wait)]
    found = [(wait.name, wait.waiter, wait.asked, wait.until) for wait in waits]
    assert found == [("full queue", None, 0.0, 1.0), ("full queue", None, 1.0, 2.0)]


def test_events_without_times_and_waits_take_no_place_in_the_queue():
    clock, stream, other = Clock(), StreamTime(0), StreamTime(0, 7)
    fill(clock, stream)
    event = clock.record(other)
    for _ in range(5):
        clock.record(stream)
        clock.wait(stream, event)
    assert clock.host == 0.0


def test_each_stream_has_a_queue_of_its_own():
    clock = Clock()
    for number in (0, 7, 14):
        fill(clock, StreamTime(0, number))
    assert clock.host == 0.0


def test_work_counts_as_one_launch_within_the_block():
    clock, stream = Clock(), StreamTime(0)
    fill(clock, stream, QUEUE_LENGTH - 1)
    with clock.one_launch(stream, overhead=0.25):
        fill(clock, stream, 3)
    assert clock.host == 0.25
    clock.launch(stream, 1.0, 0.0)
    assert clock.host == 1.0


def test_the_host_does_not_learn_from_a_full_queue_what_is_done():
    clock, stream = Clock(), StreamTime(0)
    fill(clock, stream, QUEUE_LENGTH + 1)
    assert clock.known == {}
