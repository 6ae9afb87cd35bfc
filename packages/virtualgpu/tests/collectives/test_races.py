"""Races between collectives and operators that use the same memory, in a world of one rank."""

import pytest
import torch
import torch.distributed as dist

import virtualgpu
from virtualgpu import hardware
from virtualgpu.streams import lone_stream
from virtualgpu.streams.race_reports import RaceWarning


@pytest.fixture(autouse=True)
def world_of_its_own():
    """Make a world on a machine of its own, because a machine reports a race only once."""
    with virtualgpu.use(gpus=1, like="H200"):
        torch.cuda.init()
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        yield
        dist.destroy_process_group()


def found() -> list[tuple[str, str, str]]:
    return [(race.kind, race.first.name, race.second.name) for race in virtualgpu.races()]


@pytest.fixture(params=["one stream", "several streams"])
def streams(request):
    if request.param == "several streams":
        torch.cuda.Stream()


@pytest.mark.usefixtures("streams")
def test_a_result_that_nobody_waited_for_is_read_too_early():
    x, result = torch.ones(3, device="cuda"), torch.zeros(3, device="cuda")
    work = dist.all_gather([result], x, async_op=True)
    x + 1  # the collective reads this tensor, too
    with pytest.warns(
        RaceWarning,
        match=(
            r"`add` on the default stream of cuda:0 \(test_races.py:\d+\) may run before "
            r"`all_gather` on N"
        ),
    ):
        read = result + 0
    assert read.tolist() == [0, 0, 0]
    work.wait()
    assert (result + 0).tolist() == [1, 1, 1]
    assert found() == [("stale read", "all_gather", "add")]
    assert virtualgpu.races()[0].first.text == "work = dist.all_gather([result], x, async_op=True)"


@pytest.mark.usefixtures("streams")
def test_what_is_sent_is_overwritten_too_early():
    x, result = torch.ones(3, device="cuda"), torch.zeros(3, device="cuda")
    work = dist.all_gather([result], x, async_op=True)
    with pytest.warns(
        RaceWarning,
        match=r"Call `wait\(\)` of the collective's work while the later stream is current",
    ):
        x.zero_()
    work.wait()
    assert found() == [("overwritten too early", "all_gather", "zero_")]


@pytest.mark.usefixtures("streams")
def test_a_collective_on_another_group_does_not_wait_either():
    x, other = torch.ones(3, device="cuda"), dist.new_group([0])
    work = dist.all_reduce(x, async_op=True)
    with pytest.warns(RaceWarning):
        dist.all_reduce(x, group=other)
    work.wait()
    dist.all_reduce(x, group=other)
    assert found() == [("stale read", "all_reduce", "all_reduce")]


def test_a_collective_from_a_stream_that_did_not_wait_sends_too_early():
    x, side = torch.ones(3, device="cuda"), torch.cuda.Stream()
    x.mul_(2)
    message = "A collective waits only for the stream that is current when it is called"
    with torch.cuda.stream(side), pytest.warns(RaceWarning, match=message):
        work = dist.all_reduce(x, async_op=True)
    work.wait()
    assert found() == [("stale read", "mul_", "all_reduce")]


def test_who_waits_on_another_stream_still_reads_the_old_values():
    x, result, side = (
        torch.ones(3, device="cuda"),
        torch.full((3,), 5.0, device="cuda"),
        torch.cuda.Stream(),
    )
    work = dist.all_gather([result], x, async_op=True)
    with torch.cuda.stream(side):
        work.wait()
        in_time = result + 0
    with pytest.warns(RaceWarning):
        read = result + 0
    torch.cuda.current_stream().wait_stream(side)
    assert [x.tolist() for x in (in_time, read, result + 0)] == [[1, 1, 1], [5, 5, 5], [1, 1, 1]]
    assert len(virtualgpu.races()) == 1


@pytest.mark.usefixtures("streams")
@pytest.mark.parametrize(
    "wait",
    ["work", "a later one", "device", "asked", "event", "future", "batch", "sync", "watchdog"],
)
def test_what_was_waited_for_is_no_race(wait):
    x, y = torch.ones(3, device="cuda"), torch.ones(3, device="cuda")
    if wait == "sync":
        dist.all_reduce(x)
    elif wait == "batch":
        for each in dist.batch_isend_irecv(
            [dist.P2POp(dist.irecv, y, 0), dist.P2POp(dist.isend, x, 0)]
        ):
            each.wait()
    else:
        work = dist.all_reduce(x, async_op=True)
        if wait == "work":
            work.wait()
        elif wait == "a later one":
            dist.all_reduce(y, async_op=True).wait()
        elif wait == "device":
            torch.cuda.synchronize()
        elif wait == "asked":
            while not work.is_completed():
                pass
        elif wait == "event":
            with torch.cuda.stream(torch.cuda.Stream()):
                work.wait()
                done = torch.cuda.Event()
                done.record()
            done.synchronize()
        elif wait == "future":
            work.get_future().wait()
        else:
            work.is_completed()
            torch.cuda._sleep(10**9)
            torch.cuda.synchronize()
            dist.all_reduce(y)
        del work
    x.add_(1)
    y.add_(1)
    assert not virtualgpu.races()


def test_the_root_of_a_broadcast_may_read_at_once():
    x = torch.ones(3, device="cuda")
    work = dist.broadcast(x, 0, async_op=True)
    x + 1
    work.wait()
    assert not virtualgpu.races()


def test_parts_that_lie_beside_each_other_do_not_race():
    x = torch.ones(12, device="cuda")
    work = dist.all_reduce(x[4:8], async_op=True)
    x[:4].add_(1)
    x[8:].add_(1)
    work.wait()
    assert not virtualgpu.races()


def test_a_program_that_stays_on_a_stream_of_its_own_is_looked_at_while_a_collective_is_under_way(
    monkeypatch,
):
    monkeypatch.setattr(lone_stream, "ALONE", 3)
    x = torch.ones(3, device="cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(4):
            x + 1
        work = dist.all_reduce(x, async_op=True)
        assert hardware.machine().races.lone.stream is stream._time
        with pytest.warns(RaceWarning, match=r"`add` on stream \d+ of cuda:0"):
            x + 1
        work.wait()
        x.add_(1)
        assert hardware.machine().races.lone.stream is stream._time
    assert found() == [("stale read", "all_reduce", "add")]
