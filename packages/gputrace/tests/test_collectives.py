"""Collectives of several ranks: which spans are one, and which rank waited for which."""

import numpy as np
import pytest

from gputrace.collectives import collectives_of, hosts_table, waits_for_ranks
from gputrace.explorer import columns
from gputrace.phases import Phase
from gputrace.spans import HOST, KERNEL, WAIT, Execution, Moved, RankHost, Spans, Waits

MIB = 1 << 20


def two_pairs(real=False):
    """Return a trace of two all_reduces, of the ranks (0, 1) and (2, 3), that end together.

    Ranks 1 and 2 are late.
    """
    ready = [1.0, 4.0, 4.0, 2.0]
    rows, moved = [], {}
    for rank in range(4):
        start = ready[rank] if real else 4.0
        stack = 1 + rank % 2
        rows.append((start, 6.0 - start, rank, 7, KERNEL, "nccl all_reduce", stack, -1))
        moved[rank] = Moved(8 * MIB, None if real else ready[rank], 1 + rank // 2)
    rows.append((0.5, 2.0, HOST, 1, WAIT, "synchronize", 0, -1))
    hosts = [RankHost(rank, [rank], []) for rank in range(4)]
    hosts[1].phases.append(Phase("backward", 0.5, 3.0, 2))
    return Execution(Spans.of(rows, moved), Waits.of([]), [], hosts=hosts)


@pytest.fixture(params=[False, True], ids=["virtual", "real"])
def trace(request, trace_of):
    rows = [(0.0, "segment_alloc", 100, 20, device) for device in range(4)]
    rows = [(*row, 0, 0, 0) for row in rows]
    return trace_of(rows, execution=two_pairs(request.param), seconds=7.0)


def test_spans_of_one_collective_belong_together(trace):
    found = collectives_of(trace)
    devices = [trace.spans.device[one.spans].tolist() for one in found]
    assert sorted(devices) == [[0, 1], [2, 3]]
    assert {one.nbytes for one in found} == {8 * MIB}


def test_who_waited_for_whom_and_for_how_long(trace):
    table = waits_for_ranks(trace, collectives_of(trace))
    assert [row[:5] for row in table.rows] == [
        ("rank 0", "rank 1", "3 s", "1", "3 s"),
        ("rank 3", "rank 2", "2 s", "1", "2 s"),
    ]
    assert table.rows[0][5:] == ("nccl all_reduce", "train.py:12", "loss.backward()")


def test_nobody_waited(trace_of):
    assert waits_for_ranks(trace_of([]), []) is None


def test_hosts_of_ranks_have_their_phases_and_waits(trace):
    rows = hosts_table(trace).rows
    assert rows[1][:5] == ("rank 1", "0 µs", "2.5 s", "0 µs", "2 s")
    assert rows[0][4] == "0 µs"


def test_the_explorer_draws_lines_between_ranks_and_the_waits(trace):
    told = columns.of(trace)
    links = [link for link in told["links"] if link["kind"] == "collective"]
    names = [{told["lanes"][end[0]]["name"] for end in link["ends"]} for link in links]
    assert sorted(map(sorted, names)) == [
        ["cuda:0 NCCL", "cuda:1 NCCL"],
        ["cuda:2 NCCL", "cuda:3 NCCL"],
    ]
    assert {end[2] for link in links for end in link["ends"]} == {6_000_000_000}
    lanes = {lane["name"]: lane for lane in told["lanes"]}
    first = lanes["cuda:0 NCCL"]
    waited = [told["names"][number] for number in first["called"]].index("waits for rank 1")
    assert first["duration"][waited] == 3_000_000_000
    assert np.cumsum(first["start"])[waited] == 1_000_000_000
    assert set(first["nbytes"].values()) == {8 * MIB}
    assert "waits for rank 2" not in [told["names"][n] for n in lanes["cuda:2 NCCL"]["called"]]
    order = [lane["name"] for lane in told["lanes"]]
    assert order.index("rank 1 phases") + 1 == order.index("rank 1 host")
