"""Traces in files: what comes back, and what is refused."""

import json
import pickle

import numpy as np
import pytest
import torch

import gputrace
from gputrace import Trace
from gputrace.sources.this_computer import ComputerTime, Loading
from virtualgpu.source_lines import SourceLine


@pytest.fixture
def trace(machine):
    with gputrace.record() as trace:
        net = torch.nn.Linear(64, 64, device="cuda")
        net(torch.zeros(8, 64, device="cuda")).sum().backward()
    return trace


def test_a_loaded_trace_is_the_same(trace, tmp_path):
    trace.save(tmp_path / "a.trace")
    loaded = Trace.load(str(tmp_path / "a.trace"))
    assert list(loaded.events) == list(trace.events)
    assert (loaded.events.birth == trace.events.birth).all() and (
        loaded.events.category == trace.events.category
    ).all()
    for name in (
        "stacks",
        "start",
        "settings",
        "phases",
        "used",
        "totals",
        "seconds",
        "badge",
        "origin",
    ):
        assert getattr(loaded, name) == getattr(trace, name)
    assert loaded.segments("peak") == trace.segments("peak")
    assert (repr(loaded), repr(loaded.lines())) == (repr(trace), repr(trace.lines()))
    assert loaded.plot_memory().alt == trace.plot_memory().alt


def test_the_time_of_this_computer_comes_back_and_older_files_have_none(trace, tmp_path):
    line = SourceLine("train.py", 3, "main", "for batch in loader:")
    loading = Loading(line, [0.5], [0.0], [0.1])
    trace.computers = [ComputerTime(2.0, [(line, 1.5)], [loading], rank=1)]
    trace.save(tmp_path / "a.trace")
    assert Trace.load(tmp_path / "a.trace").computers == trace.computers
    with np.load(tmp_path / "a.trace") as stored:
        columns = dict(stored)
    header = json.loads(columns["header"].tobytes())
    del header["computers"]
    columns["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    with open(tmp_path / "older.trace", "wb") as file:
        np.savez(file, **columns)
    assert Trace.load(tmp_path / "older.trace").computers == []


def stores(content):
    def write(path):
        with open(path, "wb") as file:
            content(file)

    return write


@pytest.mark.parametrize(
    "write",
    [
        stores(lambda file: None),
        stores(lambda file: file.write(b"words")),
        stores(lambda file: file.write(b"PK\x03\x04 cut off")),
        stores(lambda file: np.save(file, np.zeros(3))),
        stores(lambda file: np.savez(file, header=np.frombuffer(b"{}", np.uint8))),
        stores(lambda file: np.savez(file, other=np.zeros(3))),
        stores(lambda file: pickle.dump([], file)),
    ],
    ids=[
        "empty",
        "text",
        "half an archive",
        "one array",
        "no events",
        "another archive",
        "a pickle",
    ],
)
def test_another_file_is_no_trace(tmp_path, write):
    write(tmp_path / "thing")
    with pytest.raises(ValueError, match="thing holds no trace"):
        Trace.load(tmp_path / "thing")


def test_a_damaged_trace_says_so_and_another_file_gets_no_advice_of_numpy(machine, tmp_path):
    with gputrace.record() as trace:
        torch.zeros(1000, device="cuda")
    trace.save(tmp_path / "good.trace")
    whole = (tmp_path / "good.trace").read_bytes()
    encrypted = bytearray(whole)
    encrypted[whole.index(b"PK\x01\x02") + 8] |= 1  # a flag of the first file in the archive
    for damaged in (whole[: len(whole) // 2], encrypted):
        (tmp_path / "bad.trace").write_bytes(damaged)
        with pytest.raises(ValueError, match="bad.trace holds no trace. It is damaged"):
            Trace.load(tmp_path / "bad.trace")
    (tmp_path / "train.py").write_text("import torch")
    with pytest.raises(ValueError, match="It is another kind of file") as found:
        Trace.load(tmp_path / "train.py")
    assert "pickle" not in str(found.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"missing\.trace"):
        Trace.load(tmp_path / "missing.trace")


def test_a_snapshot_that_cannot_be_made_leaves_no_file(machine, tmp_path):
    with gputrace.record(max_events=1) as trace:
        torch.zeros(1000, device="cuda")
    with pytest.raises(ValueError, match="events were lost"):
        trace.export_snapshot(tmp_path / "a.pickle")
    assert not (tmp_path / "a.pickle").exists()
