"""What the page says about loading a batch, about the step beside it, and about slow lines."""

from dataclasses import replace

import pytest

from gputrace.events import SourceLine
from gputrace.loading import MOST_ROWS, lines_table, loading_sentence
from gputrace.sources.this_computer import ComputerTime, Loading
from gputrace.spans import HOST, KERNEL, LAUNCH, Execution, Spans, Waits

LINE = SourceLine("/home/me/train.py", 3, "main", "for batch in loader:")
PARSE = SourceLine("/home/me/data.py", 9, "parse", "words = line.split()")


def kernel(launched: float, start: float, seconds: float, device: int = 0) -> tuple:
    """Return a launch and its kernel, as two rows of spans. The launch is the first of the two."""
    return (launched, 0.0, HOST, 0, LAUNCH, "k"), (start, seconds, device, 0, KERNEL, "k")


def execution(*kernels: tuple) -> Execution:
    rows = []
    for launch, ran in kernels:
        rows.append((*launch, 0, -1))
        rows.append((*ran, 0, len(rows) - 1))
    return Execution(Spans.of(rows), Waits.of([]), [])


def computer(*batches: tuple[float, float, float], **more) -> ComputerTime:
    """Return the time of a computer, with batches of (seconds, asked, received)."""
    loading = []
    if batches:
        loading = [Loading(LINE, *map(list, zip(*batches, strict=True)))]
    return ComputerTime(**{"seconds": 10.0, "lines": [(PARSE, 4.0)], "loading": loading, **more})


def test_loading_is_said_beside_the_step(trace_of):
    work = execution(kernel(0.1, 0.1, 0.3), kernel(0.2, 0.4, 0.1), kernel(1.1, 1.1, 0.4))
    trace = trace_of([], execution=work, badge="virtual GPU, modelled on paper")
    batches = (0.5, 0.0, 0.0), (0.6, 0.3, 0.9), (0.7, 1.2, 2.0)
    title, said = loading_sentence(trace, computer(*batches))
    assert title == "Loading a batch"
    # The first step's kernels take 0.4 s and its host 0.3 s, and those of the second 0.4 and 0.3 s.
    assert said == (
        "600 ms on this computer, measured (median of 3 calls of the DataLoader's __next__ at "
        "train.py:3). The rest of a step takes 400 ms on the model's clock. Loading is 60% of "
        "both together"
    )


def test_a_step_of_real_gpus_is_measured_and_may_be_the_host_s(trace_of):
    trace = trace_of([], execution=execution(kernel(0.1, 0.1, 0.3)))
    said = loading_sentence(trace, computer((1.0, 0.0, 0.0), (1.0, 1.0, 2.0)))[1]
    assert "takes 1 s, measured. Loading is 50%" in said


def test_a_rank_s_step_is_that_of_its_gpu(trace_of):
    work = execution(kernel(0.1, 0.1, 0.4, 0), kernel(0.1, 0.1, 0.3, 1))
    trace = trace_of([], execution=work, badge="2 ranks: virtual GPU, modelled on paper")
    batches = (0.1, 0.0, 0.0), (0.1, 0.2, 0.3)
    title, said = loading_sentence(trace, computer(*batches, rank=1))
    assert title == "Loading a batch, rank 1"
    assert "takes 300 ms on the model's clock" in said


@pytest.mark.parametrize(("workers", "its"), [(1, "Its worker"), (2, "Its 2 workers")])
def test_workers_load_while_this_computer_does_the_work_of_virtual_gpus(trace_of, workers, its):
    measured = computer((0.5, 0.0, 0.0))
    loading = [replace(measured.loading[0], workers=workers)]
    measured = replace(measured, loading=loading)
    said = loading_sentence(trace_of([], badge="virtual GPU, modelled on paper"), measured)[1]
    assert f". {its} loaded ahead while this computer did the work of the virtual GPU." in said
    assert said.endswith("With num_workers=0 you see how long loading takes")
    assert "ahead" not in loading_sentence(trace_of([]), measured)[1]


def test_one_batch_has_no_step(trace_of):
    said = loading_sentence(trace_of([]), computer((0.5, 0.0, 0.0)))[1]
    assert said.endswith("(one call of the DataLoader's __next__ at train.py:3)")


def test_the_loader_with_most_time_is_named(trace_of):
    measured = computer((0.5, 0.0, 0.0))
    quick = replace(measured.loading[0], seconds=[0.1], line=PARSE)
    said = loading_sentence(trace_of([]), replace(measured, loading=[quick, *measured.loading]))[1]
    assert "train.py:3" in said


def test_without_a_loader_the_slowest_line_is_named(trace_of):
    title, said = loading_sentence(trace_of([]), computer())
    assert title == "Slowest line"
    assert said == (
        "data.py:9 words = line.split() took 4 s outside torch, measured on this computer"
    )


@pytest.mark.parametrize("lines", [[], [(PARSE, 0.004)]])
def test_no_sentence_if_no_line_took_time(trace_of, lines):
    assert loading_sentence(trace_of([]), computer(lines=lines)) is None


def test_the_table_says_that_it_is_measured():
    table = lines_table(computer())
    assert table.rows == (("data.py:9", "4 s", "40%", "words = line.split()"),)
    assert "measured on this computer" in table.caption and "took 10 s" in table.caption
    many = [(replace(PARSE, line=number), 0.1) for number in range(MOST_ROWS + 2)]
    long = lines_table(computer(lines=many, rank=2))
    assert len(long.rows) == MOST_ROWS
    assert "rank 2" in long.caption and long.caption.endswith("the first 15 of 17 lines")
    assert lines_table(computer(lines=[])) is None
