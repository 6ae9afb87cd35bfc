"""The race detector skips a program on one stream until another stream has work."""

import pytest
import torch

from virtualgpu.streams import lone_stream
from virtualgpu.streams.race_detector import RaceDetector
from virtualgpu.streams.race_reports import STALE

from .racing import RACES, here, kinds

pytestmark = pytest.mark.usefixtures("raced")
FEW = 10


@pytest.fixture
def looked(monkeypatch):
    """A list that collects the names of the operators that the detector compares."""
    monkeypatch.setattr(lone_stream, "ALONE", FEW)
    names, look = [], RaceDetector._ordered
    monkeypatch.setattr(
        RaceDetector,
        "_ordered",
        lambda self, call, *rest: names.append(call.op.name) or look(self, call, *rest),
    )
    return names


def stay(x):
    for _ in range(2 * FEW):
        x.add_(1)


def test_who_stays_on_one_stream_is_looked_at_no_more(side, looked):
    with torch.cuda.stream(side):
        x = torch.zeros(4, device="cuda")
        stay(x)
        looked.clear()
        y = x.mul(2).add_(1)
        assert y.tolist() == [2 * 2 * FEW + 1.0] * 4
    assert not {"mul", "add_"} & set(looked)


def test_until_another_stream_has_work(side, looked):
    x = torch.zeros(4, device="cuda")
    side.wait_stream(here())
    with torch.cuda.stream(side):
        stay(x)
    here().wait_stream(side)
    looked.clear()
    y = x * 2
    with torch.cuda.stream(side):
        x + 1
    assert looked == ["mul", "add"] and y.tolist() == [4.0 * FEW] * 4 and not kinds()


@RACES
@pytest.mark.parametrize("new", [False, True])
def test_what_was_written_meanwhile_is_still_known(side, looked, new):
    x = torch.zeros(4, device="cuda")
    side.wait_stream(here())
    with torch.cuda.stream(side):
        stay(x)
        y = x * 2 if new else x
    y + 1
    assert kinds() == [STALE]


def test_memory_that_it_did_not_write_is_free_to_all(side, looked):
    x, other = torch.zeros(4, device="cuda"), torch.ones(4, device="cuda")
    side.wait_stream(here())
    with torch.cuda.stream(side):
        stay(x)
        other + x
    assert (other + 1).tolist() == [2.0] * 4 and not kinds()


def test_nobody_is_alone_while_another_stream_has_work_left(side, looked):
    torch.cuda._sleep(10**9)
    with torch.cuda.stream(side):
        x = torch.zeros(4, device="cuda")
        stay(x)
        looked.clear()
        x + 1
    assert looked == ["add"]
