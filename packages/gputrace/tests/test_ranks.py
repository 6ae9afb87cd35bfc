"""The traces of several ranks as one."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from gputrace import record
from gputrace.events import ALLOC
from gputrace.ranks import together
from gputrace.sources.this_computer import ComputerTime
from gputrace.spans import HOST, RacingSpan, RecordedRace

pytestmark = pytest.mark.usefixtures("machine")


def recorded(device, size, stays):
    """Return the trace of a rank with a kernel, and with memory of which a part stays."""
    with record() as trace:
        x = torch.ones(size, device=device)
        with torch.profiler.record_function("doubling"):
            y = x * 2
        if not stays:
            del y
        torch.cuda.synchronize(device)
    return trace


@pytest.fixture
def two():
    return recorded("cuda:0", 1000, stays=True), recorded("cuda:1", 5000, stays=False)


def test_each_rank_keeps_its_memory_and_its_work(two):
    whole = together(dict(enumerate(two)), per_node=2)
    assert whole.devices == [0, 1]
    assert whole.peaks == {rank: trace.peaks[rank] for rank, trace in enumerate(two)}
    for rank, trace in enumerate(two):
        assert whole.busy(rank) == trace.busy(rank) > 0
        assert whole.timeline(rank).allocated.tolist() == trace.timeline(rank).allocated.tolist()
        assert list(whole.lines(rank)) == list(trace.lines(rank))
    assert whole.badge == f"2 ranks: {two[0].badge}"


def test_the_time_of_each_process_has_its_rank(two):
    for trace in two:
        trace.computers = [ComputerTime(1.0, [], [])]
    whole = together({0: two[0], 3: two[1]}, per_node=2)
    assert [computer.rank for computer in whole.computers] == [0, 3]
    assert whole.is_virtual


def test_frees_find_the_block_that_they_free(two):
    whole = together(dict(enumerate(two)), per_node=2).events
    freed = np.flatnonzero(whole.birth >= 0)
    assert len(freed) > 0
    for index in freed[whole.action[freed] != ALLOC]:
        birth = whole.birth[index]
        assert (whole.device[birth], whole.address[birth]) == (
            whole.device[index],
            whole.address[index],
        )
        assert whole.time[birth] <= whole.time[index]


def test_a_rank_of_another_node_has_its_own_number(two):
    whole = together({0: two[0], 3: two[1]}, per_node=2)
    assert whole.devices == [0, 3]
    assert whole.peaks[3] == two[1].peaks[1]


def test_marks_are_those_of_the_ranks_own_gpus(two, tmp_path):
    whole = together({0: two[0], 3: two[1]}, per_node=2)
    assert [(mark.name, mark.device) for mark in whole.marks] == [("doubling", 0), ("doubling", 3)]
    whole.save(tmp_path / "ranks.npz")
    assert type(whole).load(tmp_path / "ranks.npz").marks == whole.marks


def test_what_a_backward_pass_launched_is_known(machine):
    with record() as trace:
        torch.ones(4, device="cuda", requires_grad=True).exp().sum().backward()
    whole = together({0: trace}, per_node=1)
    assert whole.spans.backward.tolist() == trace.spans.backward.tolist()
    assert 0 < whole.spans.backward.sum() < len(whole.spans)


def test_races_are_those_of_the_ranks_own_gpus(two):
    side = RacingSpan(0, 1, "add", "train.py:1", 0.0, 0.0, 1.0)
    two[1].races.append(RecordedRace(side, replace(side, device=HOST, stream=0)))
    whole = together({0: two[0], 3: two[1]}, per_node=2)
    [race] = whole.races
    assert (race.first.device, race.second.device) == (2, HOST)
    assert race.second.stream == whole.hosts[1].threads[0]


def test_each_rank_keeps_its_host(two, tmp_path):
    whole = together({0: two[0], 3: two[1]}, per_node=2)
    assert [(host.rank, host.threads) for host in whole.hosts] == [(0, [0]), (3, [1])]
    spans = whole.spans
    for host, trace in zip(whole.hosts, two, strict=True):
        mine = (spans.device == HOST) & np.isin(spans.stream, host.threads)
        assert spans.start[mine].tolist() == trace.spans.start[trace.spans.device == HOST].tolist()
        assert whole.waited_by_host(host.threads) == trace.host_waited > 0
        launched = np.flatnonzero((spans.device == host.rank) & (spans.launch >= 0))
        assert set(spans.stream[spans.launch[launched]].tolist()) == set(host.threads)
        assert (spans.name[launched] == spans.name[spans.launch[launched]]).all()
    assert not whole.tells_of_host
    whole.save(tmp_path / "ranks.npz")
    assert type(whole).load(tmp_path / "ranks.npz").hosts == whole.hosts


def test_phases_of_ranks_have_their_lines(machine):
    with record() as trace:
        torch.ones(4, device="cuda", requires_grad=True).exp().sum().backward()
    whole = together({0: trace, 1: trace}, per_node=1)
    for host in whole.hosts:
        [backward] = [phase for phase in host.phases if phase.name == "backward"]
        assert "exp().sum().backward()" in whole.line(backward.stack).text


def test_figures_and_files_take_it(two, tmp_path):
    whole = together(dict(enumerate(two)), per_node=2)
    told = whole.plot_timeline().alt
    assert told.startswith("Cuda:0 worked ") and "host" not in told
    whole.plot_devices()
    whole.export_chrome(tmp_path / "ranks.json")
    whole.save(tmp_path / "ranks.npz")
    assert type(whole).load(tmp_path / "ranks.npz").peaks == whole.peaks


def test_the_stream_of_nccl_is_known_in_a_saved_trace_too(tmp_path):
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with record(timeline=True) as trace:
            dist.all_reduce(torch.ones(4, device="cuda"), async_op=True).wait()
            torch.cuda.synchronize()
    finally:
        dist.destroy_process_group()
    for each in (trace, together({0: trace}, per_node=1)):
        assert "NCCL stream" in each.stream_names(0).values()
        each.save(tmp_path / "rank.npz")
        assert type(each).load(tmp_path / "rank.npz").stream_names(0) == each.stream_names(0)
