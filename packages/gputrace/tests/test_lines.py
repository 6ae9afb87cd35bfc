"""Memory told line by line."""

import pytest
import torch

import gputrace
import virtualgpu
from gputrace import figures as plots
from gputrace import lines
from gputrace.events import SourceLine
from gputrace.lines import MOST_ROWS, NO_LINE, signed

KiB, MiB = 1 << 10, 1 << 20
HERE = SourceLine(__file__, 1, "test", "x = f()")
INSIDE = SourceLine(torch.__file__, 1, "f", "")


ALLOC, FREE = ("alloc",), ("free_requested", "free_completed")


@pytest.fixture
def lines_of(trace_of):
    """A function that returns the lines of a trace of rows (actions, bytes, stack).

    Stack 1 is the user's line below one of torch's. Stack 2 has only torch's line.
    """

    def make(*rows):
        told = [
            (0.0, action, address / MiB, 512 / MiB, 0, stack)
            for actions, address, stack in rows
            for action in actions
        ]
        return trace_of(told, stacks=[(), (INSIDE, HERE), (INSIDE,)]).lines()

    return make


def test_an_event_belongs_to_the_innermost_line_of_the_users(lines_of):
    lines = lines_of((ALLOC, 512, 1), (ALLOC, 1024, 1), (ALLOC, 1536, 1), (FREE, 512, 1))
    (entry,) = lines
    assert (entry.line, entry.delta, entry.peak, entry.allocated, entry.count) == (
        HERE,
        1024,
        1536,
        1536,
        3,
    )
    assert repr(lines).splitlines()[0] == "cuda:0, measured on paper"
    assert repr(lines).splitlines()[2].split() == [
        "test_lines.py:1",
        "+1",
        "KiB",
        "1.5",
        "KiB",
        "1.5",
        "KiB",
        "3",
        "x",
        "=",
        "f()",
    ]


def test_what_no_line_of_the_users_did_is_listed_apart(lines_of):
    lines = lines_of((ALLOC, 512, 1), (FREE, 512, 2))
    assert {entry.line: entry.delta for entry in lines} == {HERE: 512, NO_LINE: -512}
    assert "no line of yours" in repr(lines)


def test_a_free_of_no_known_line_belongs_to_who_allocated(lines_of):
    (entry,) = lines_of((ALLOC, 512, 1), (ALLOC, 1024, 1), (FREE, 512, 0))
    assert (entry.line, entry.delta, entry.peak) == (HERE, 512, 1024)


def test_each_device_has_its_own_lines():
    with virtualgpu.use(gpus=2), gputrace.record() as trace:
        first = torch.zeros(1000, device="cuda:0")
        second = torch.zeros(3000, device="cuda:1")
    assert [entry.line.text for entry in trace.lines(0)] == [
        'first = torch.zeros(1000, device="cuda:0")'
    ]
    assert [entry.line.text for entry in trace.lines(1)] == [
        'second = torch.zeros(3000, device="cuda:1")'
    ]
    assert trace.lines() == trace.lines(1) and first.shape != second.shape
    with pytest.raises(ValueError, match="device=2: expected one of the recorded devices 0, 1"):
        trace.lines(2)


def test_a_stack_ends_in_the_users_call_as_on_a_real_gpu():
    with virtualgpu.use(gpus=1), gputrace.record() as trace:
        kept = torch.zeros(1000, device="cuda")
    assert {trace.stacks[event.stack][0].filename for event in trace.events} == {
        __file__
    } and kept.is_cuda


def test_a_device_goes_by_the_names_that_pytorch_gives_it():
    with virtualgpu.use(gpus=2), gputrace.record() as trace:
        kept = [torch.zeros(1000, device=f"cuda:{index}") for index in (0, 1, 1)]
    for device in ("cuda:0", torch.device("cuda", 0)):
        assert trace.lines(device) == trace.lines(0) != trace.lines(1)
        assert trace.timeline(device) is trace.timeline(0)
        assert (
            trace.plot_memory(device).alt
            == trace.plot_memory(0).alt
            == plots.trace_memory(trace, device).alt
        )
        assert (
            trace.plot_segments("end", device).alt
            == trace.plot_segments("end", 0).alt
            == plots.segment_map(trace, "end", device).alt
        )
        assert trace.stream_names(device) == {0: "default stream"}
    for other in (
        "1",
        "cuda",
        "cuda:2",
        "cpu:1",
        torch.device("cuda"),
        torch.device("cpu", 0),
        "cuda:-1",
    ):
        with pytest.raises(
            ValueError, match=r"device=.*: expected one of the recorded devices 0, 1"
        ):
            trace.lines(other)
    assert len(kept) == 3


def test_an_empty_block_has_no_lines():
    with virtualgpu.use(gpus=1), gputrace.record() as trace:
        pass
    assert trace.lines() == [] and trace.peak_line is None and trace.peak == 0
    said = (
        "no line of yours allocated or freed memory (cuda:0, virtual GPU, modelled on "
        "NVIDIA Tesla T4)"
    )
    assert (
        repr(trace.lines()) == said
        and said in trace.lines()._repr_html_()
        and "change" not in trace.lines()._repr_html_()
    )
    assert len(trace.events) == 0


@pytest.mark.parametrize(("nbytes", "text"), [(0, "0 B"), (2 * KiB, "+2 KiB"), (-KiB, "-1 KiB")])
def test_changes_have_a_sign(nbytes, text):
    assert signed(nbytes) == text


def test_a_long_table_of_times_says_that_it_is_not_complete():
    seconds = {(f"kernel {number}",): [1.0] for number in range(MOST_ROWS + 2)}
    table = lines._times("kernel or copy", seconds, (), "virtual GPU")
    assert len(table.rows) == MOST_ROWS
    assert table.caption == "The devices' time by kernel or copy, the first 15 of 17, virtual GPU"
