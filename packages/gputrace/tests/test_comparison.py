"""What changed from one trace to another, by line and by kernel."""

import re

import pytest
import torch

import gputrace
from gputrace import Trace, commands, comparison
from gputrace.peak import held_at_peak
from gputrace.sources.this_computer import ComputerTime, Loading
from virtualgpu.source_lines import SourceLine

MIB = 1 << 20

BEFORE = """
import torch
def step():
    x = torch.ones(1 << 20, device="cuda")
    y = x * 2
    return (x + y).sum()
for _ in range(2):
    step()
"""
AFTER = """
import torch


def step():
    x = torch.ones(1 << 20, device="cuda")
    y = x.mul_(2)
    return (x + y).sum()
for _ in range(2):
    step()
"""


def recorded(tmp_path, name, source) -> Trace:
    path = tmp_path / name.removesuffix(".trace") / "train.py"
    path.parent.mkdir()
    path.write_text(source)
    with gputrace.record(timeline=True) as trace:
        exec(compile(source, str(path), "exec"), {"__name__": "__main__"})
    trace.save(tmp_path / name)
    return trace


@pytest.fixture
def two(machine, tmp_path):
    torch.zeros(1, device="cuda").sum()
    yield (
        recorded(tmp_path, "before.trace", BEFORE),
        recorded(tmp_path, "after.trace", AFTER),
    )


def test_what_is_held_at_the_peak_adds_up_to_it(training, two):
    for trace in (training, *two):
        assert sum(held_at_peak(trace, 0).values()) == trace.peak > 0


def test_blocks_from_before_the_recording_are_held_too(machine):
    kept, gone = (torch.ones(MIB, device="cuda") for _ in range(2))
    with gputrace.record() as trace:
        del gone
        torch.ones(4 * MIB, device="cuda")
    assert sum(held_at_peak(trace, 0).values()) == trace.peak >= 20 * MIB
    assert kept.is_cuda


def test_the_change_of_the_peak_is_that_of_the_lines(two):
    before, after = two
    found = before.compare(after)
    assert before.peak - after.peak == 4 * MIB
    assert "The peak fell by 4 MiB" in found.finding
    [row] = found.memory.rows
    assert row[1:3] == ("4 MiB", "0 B") and row[4] == "y = x * 2"
    assert row[0] == "train.py:5, only before" and row[3].startswith("-4 MiB")


def test_a_line_that_only_moved_did_not_change(two):
    texts = [row[-1] for row in two[0].compare(two[1]).memory.rows]
    assert 'x = torch.ones(1 << 20, device="cuda")' not in texts


def test_time_is_compared_by_line_and_by_kernel(two):
    found = two[0].compare(two[1])
    lines = {row[-1]: row for row in found.lines.rows}
    assert lines["y = x.mul_(2)"][0].endswith(", only after")
    assert lines["y = x.mul_(2)"][1] == "0 µs" and lines["y = x.mul_(2)"][3].startswith("+")
    kernels = {row[0]: row for row in found.kernels.rows}
    assert kernels["mul_"][1] == "0 µs" and kernels["mul"][2] == "0 µs"
    assert "sum" not in kernels


def test_a_trace_beside_itself_has_not_changed(two):
    found = two[0].compare(two[0])
    assert "The peak is the same" in found.finding and "the time is the same" in found.finding
    assert not found.memory.rows and not found.lines.rows and not found.kernels.rows


def test_traces_of_memory_alone_are_compared(training):
    found = training.compare(training)
    assert found.lines is None and "peak of cuda:0" in repr(found)
    assert "Times by line and by kernel are not compared" in found.finding


def test_different_gpus_are_named_in_the_finding(trace_of):
    both = [trace_of([], badge=f"virtual GPU, modelled on {name}") for name in ("a T4", "an L4")]
    said = "The GPUs differ: before virtual GPU, modelled on a T4, after virtual GPU"
    assert said in both[0].compare(both[1]).finding
    assert "differ" not in both[0].compare(both[0]).finding


def test_a_long_table_says_that_it_is_not_complete():
    both = [{f"k{number}": 1.0 for number in range(30)}, {}]
    table = comparison._table("Time", both, str, str)
    assert len(table.rows) == comparison.MOST_ROWS
    assert table.caption == "Time: 30 changed, 0 did not. These changed most: 20"


def test_the_command_writes_the_page(two, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert commands.main(["trace", "--compare", "before.trace", "after.trace"]) == 0
    told = capsys.readouterr()
    assert told.out.startswith("The peak fell by 4 MiB")
    page = (tmp_path / "comparison.html").read_text("utf-8")
    assert "before.trace" in page and "after.trace" in page and "y = x * 2" in page
    assert page.count("<img") == 2 and "default-src 'none'" in page
    assert not re.search(r"<script|src=\"http", page)


def test_mistakes_are_refused(two, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("1")
    assert commands.main(["trace", "--compare", "before.trace", "train.py"]) == 2
    assert commands.main(["trace", "--compare", "before.trace", "none.trace"]) == 2
    assert commands.main(["trace", "--compare", "before.trace", "after.trace", "train.py"]) == 2
    several = ["--gpus", "2", "--no-values"]
    assert commands.main(["trace", *several, "--compare", "before.trace", "after.trace"]) == 2
    assert commands.main(["trace"]) == 2
    told = capsys.readouterr().err
    assert "train.py holds no trace. It is another kind of file" in told and "pickle" not in told
    assert "none.trace: No such file or directory" in told and "Errno" not in told
    assert "leave out --gpus, --no-values" in told
    assert "leave out train.py" in told and "name the script to run" in told


def test_the_page_says_how_long_loading_took(trace_of):
    def measured(seconds: float) -> Trace:
        line = SourceLine("/home/me/train.py", 3, "main", "for batch in loader:")
        loading = [Loading(line, [seconds], [0.0], [0.0])]
        return trace_of([], computers=[ComputerTime(10.0, [], loading)])

    page = measured(0.5).compare(measured(0.25)).page()
    assert page.index("Loading a batch: 500 ms") < page.index("Loading a batch: 250 ms")
