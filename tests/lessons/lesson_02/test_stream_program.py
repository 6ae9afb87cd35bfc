"""Programs on three streams: values, races, and the lab."""

import itertools
import re
from html import unescape

import pytest
import torch

import labkit
from gpulessons.lesson_02.labs import StreamsLab
from gpulessons.lesson_02.labs.stream_program import (
    COPY_IN,
    COPY_OUT,
    HOST_WAIT,
    KERNEL,
    MOST_STEPS,
    ORDERED,
    RACE,
    STALE,
    WAIT,
    ProgramLine,
    code_of,
    run_program,
)
from labkit import progress_file


@pytest.fixture
def used():
    with labkit.use(gpus=1, virtual=True, quiet=True) as machine:
        yield machine


def one_batch(*, waits: bool, host_waits: bool) -> list[ProgramLine]:
    steps = [
        ProgramLine(COPY_IN, "a"),
        ProgramLine(WAIT, "b", "a"),
        ProgramLine(KERNEL, "b"),
        ProgramLine(COPY_OUT, "b"),
        ProgramLine(HOST_WAIT, "b"),
    ]
    if not waits:
        steps = [step for step in steps if step.verb != WAIT]
    if not host_waits:
        steps = [step for step in steps if step.verb != HOST_WAIT]
    return steps


SECOND_BATCH = [
    ProgramLine(COPY_IN, "a"),
    ProgramLine(WAIT, "b", "a"),
    ProgramLine(KERNEL, "b"),
    ProgramLine(COPY_OUT, "b"),
    ProgramLine(HOST_WAIT, "b"),
]
TWO_BATCHES = one_batch(waits=True, host_waits=False) + SECOND_BATCH
TWO_WRITERS = [
    ProgramLine(COPY_IN, "a"),
    ProgramLine(COPY_IN, "b"),
    ProgramLine(HOST_WAIT, "a"),
    ProgramLine(HOST_WAIT, "b"),
]
PROGRAMS = {
    "nothing waits": (one_batch(waits=False, host_waits=False), STALE, [0.0]),
    "the host does not wait": (one_batch(waits=True, host_waits=False), STALE, [0.0]),
    "the kernel does not wait": (one_batch(waits=False, host_waits=True), STALE, [0.0]),
    "all wait": (one_batch(waits=True, host_waits=True), ORDERED, [2.0]),
    "one stream": (
        [ProgramLine(verb, "c") for verb in (COPY_IN, KERNEL, COPY_OUT, HOST_WAIT)],
        ORDERED,
        [2.0],
    ),
    "the next batch too early": (TWO_BATCHES, STALE, [4.0, 4.0]),
    "the next batch in order": (
        [*TWO_BATCHES[:4], ProgramLine(WAIT, "a", "b"), *SECOND_BATCH],
        ORDERED,
        [2.0, 4.0],
    ),
    "two writers, the last of which wins": (
        [
            *TWO_WRITERS,
            ProgramLine(KERNEL, "c"),
            ProgramLine(COPY_OUT, "c"),
            ProgramLine(HOST_WAIT, "c"),
        ],
        RACE,
        [4.0],
    ),
    "nothing is read": ([ProgramLine(KERNEL, "a")], ORDERED, []),
}


@pytest.mark.usefixtures("used")
@pytest.mark.parametrize(("steps", "verdict", "read"), PROGRAMS.values(), ids=PROGRAMS)
def test_what_the_host_reads_and_what_is_said_of_it(steps, verdict, read):
    outcome = run_program(steps)
    assert (outcome.verdict, outcome.read) == (verdict, read)
    assert bool(outcome.trace.races) == (verdict != ORDERED)


@pytest.mark.usefixtures("used")
@pytest.mark.slow
def test_the_races_of_the_same_program_are_reported_every_time():
    """The kit itself would report a race between the same two lines only once."""
    steps = one_batch(waits=False, host_waits=False)
    for _ in range(12):
        outcome = run_program(steps)
        places = [(race.first.line, race.second.line) for race in outcome.trace.races]
        assert places == [("line 1", "line 2"), ("line 3", "line 4")]


@pytest.mark.usefixtures("used")
def test_the_timeline_has_the_streams_by_their_letters():
    trace = run_program([ProgramLine(KERNEL, "c"), ProgramLine(KERNEL, "a")]).trace
    assert list(trace.stream_names(0).values())[:4] == [
        "default stream",
        "stream a",
        "stream b",
        "stream c",
    ]
    assert trace.busy(kind="kernel") > 0


@pytest.mark.usefixtures("used")
def test_the_code_is_pytorch():
    code = code_of([*one_batch(waits=True, host_waits=True), ProgramLine(COPY_IN, "a")])
    assert code.splitlines() == [
        "with torch.cuda.stream(a): x.copy_(batches[0], non_blocking=True)",
        "b.wait_stream(a)",
        "with torch.cuda.stream(b): torch.mm(x, double, out=y)",
        "with torch.cuda.stream(b): results[0].copy_(y, non_blocking=True)",
        "b.synchronize()",
        "with torch.cuda.stream(a): x.copy_(batches[1], non_blocking=True)",
        "read = [result[0, 0].item() for result in results[:1]]",
    ]


@pytest.mark.usefixtures("used")
@pytest.mark.slow
def test_no_memory_is_kept():
    run_program(one_batch(waits=True, host_waits=True))
    before = torch.cuda.memory_allocated()
    for verb, stream in itertools.product((KERNEL, COPY_IN), "abc"):
        run_program([ProgramLine(verb, stream)])
    # cuBLAS keeps a workspace for each new stream.
    assert torch.cuda.memory_allocated() - before <= 6 * 3 * (10 << 20)


@pytest.mark.usefixtures("used")
def test_bad_steps_and_programs_are_refused():
    for arguments, message in (
        (("jump", "a"), "expected a verb of 'copy in'.*, got 'jump'"),
        ((KERNEL, "d"), "expected a stream of 'a', 'b', 'c', got 'd'"),
        ((WAIT, "a", ""), "got ''"),
        ((WAIT, "a", "a"), "stream a is always in order with itself"),
    ):
        with pytest.raises(ValueError, match=message):
            ProgramLine(*arguments)
    for steps, message in (
        ([], "expected a program of 1 to 12 steps, got 0"),
        ([ProgramLine(KERNEL, "a")] * (MOST_STEPS + 1), "got 13"),
        ([ProgramLine(COPY_IN, "a")] * 4, 'at most 3 steps "copy in"'),
        ([ProgramLine(COPY_OUT, "a")] * 4, 'at most 3 steps "copy out"'),
    ):
        with pytest.raises(ValueError, match=message):
            run_program(steps)
    labkit.use(None)
    with pytest.raises(RuntimeError, match="no GPU is in use"):
        run_program([ProgramLine(KERNEL, "a")])


@pytest.mark.usefixtures("used")
@pytest.mark.gpu
def test_a_real_gpu_is_refused():
    labkit.use(None)
    with (
        labkit.use(gpus=1, virtual=False, quiet=True),
        pytest.raises(RuntimeError, match="does not report races"),
    ):
        run_program([ProgramLine(KERNEL, "a")])


@pytest.fixture
def lab():
    with labkit.use(gpus=1, virtual=True, quiet=True):
        yield StreamsLab()


def run(lab, predicted: str) -> str:
    lab.answer.value = predicted
    lab.run_button.click()
    return said(lab)


def said(lab) -> str:
    return re.sub("<[^>]*>", "", unescape(lab.message.value))


def insert(lab, at: int, verb: str, stream: str, other: str = "a") -> str:
    lab.program.index = at - 1
    lab.action.value, lab.stream.value, lab.other.value = verb, stream, other
    lab.add_button.click()
    return said(lab)


def test_a_race_is_repaired_wait_by_wait(lab):
    message = run(lab, "ordered")
    assert "Stale value: the host reads 0. Line by line, it would read 2." in message
    assert "But nothing orders line 1 and line 2" in message
    assert "You predicted: ordered. 0 of 1 predictions came true." in said(lab)
    assert re.search(r"race", lab.picture.value) and "2 races" in lab.figure().alt
    lab.add_button.click()  # the new line that is offered: b waits for a, before the kernel
    assert lab.program.options[1] == " 2  b.wait_stream(a)"
    assert "nothing orders" in run(lab, "stale value") and "As you predicted. 1 of 2" in said(lab)
    assert len(progress_file.tries["StreamsLab"]) >= 2
    assert "Line 5 is new" in insert(lab, 5, HOST_WAIT, "b")
    assert run(lab, "ordered").startswith("Ordered: the host reads 2. All lines")
    assert "1 wait of a stream" in lab.figure().alt
    lab.program.index = 1
    lab.remove_button.click()
    assert "b.wait_stream(a)" not in " ".join(lab.program.options)
    assert "Stale value" in run(lab, "ordered")


def test_a_race_whose_values_are_right(lab):
    while len(lab.program.options) > 1:
        lab.program.index = 0
        lab.remove_button.click()
    for verb, stream in (
        (COPY_IN, "a"),
        (COPY_IN, "b"),
        (HOST_WAIT, "a"),
        (HOST_WAIT, "b"),
        (KERNEL, "c"),
        (COPY_OUT, "c"),
        (HOST_WAIT, "c"),
    ):
        insert(lab, len(lab.program.options), verb, stream)
    assert run(lab, "race").startswith(
        "Race: the host reads 4, which is right this time. But nothing orders"
    )
    assert "As you predicted. 1 of 1" in said(lab)


def test_every_change_asks_for_a_prediction_anew(lab):
    assert "First predict" in run(lab, "")
    lab.answer.value = "race"
    lab.add_button.click()
    assert lab.answer.value == ""
    lab.answer.value = "race"
    lab.remove_button.click()
    assert lab.answer.value == ""


def test_silly_input_is_answered(lab):
    assert "Stream a is always in order with itself" in insert(lab, 1, WAIT, "a", "a")
    for _ in range(2):
        insert(lab, 1, COPY_IN, "a")
    assert 'at most 3 steps "copy in"' in insert(lab, 1, COPY_IN, "a")
    lab.program.index = len(lab.program.options) - 1
    lab.remove_button.click()
    assert "The last line, in which the host reads, stays" in said(lab)
    for _ in range(MOST_STEPS - 5):
        insert(lab, 1, KERNEL, "a")
    assert "Expected a program of 1 to 12 steps, got 13." in insert(lab, 1, KERNEL, "a")
    while len(lab.program.options) > 1:
        lab.program.index = 0
        lab.remove_button.click()
    assert "got 0" in run(lab, "ordered") and lab.picture.value == ""


def test_reset_goes_back_to_the_first_program(lab):
    first = lab.program.options
    run(lab, "ordered")
    lab.remove_button.click()
    lab.reset_button.click()
    assert lab.program.options == first
    assert lab.picture.value == ""
    assert "first program again" in said(lab)
    assert "0 of 1 predictions" in run(lab, "ordered")


def test_the_other_stream_is_asked_for_only_where_one_is_waited_for(lab):
    assert lab.other.layout.display is None
    lab.action.value = KERNEL
    assert lab.other.layout.display == "none"


def test_the_figure_before_the_first_run_is_that_of_the_program(lab):
    assert "2 races: nothing orders" in lab.figure().alt and lab.outcome is None


def test_without_a_virtual_gpu_the_message_says_so():
    assert "no GPU is in use" in run(StreamsLab(), "ordered")


@pytest.mark.parametrize(
    ("verb", "needed"),
    [(COPY_IN, False), (KERNEL, False), (COPY_OUT, False), (WAIT, True), (HOST_WAIT, False)],
)
def test_a_stream_can_be_chosen_for_every_kind_of_line_and_a_second_one_for_a_wait(
    lab, verb, needed
):
    lab.action.value = verb
    assert lab.stream.layout.display is None
    assert (lab.other.layout.display is None) is needed
