"""Programs of copies, kernels and waits: what the host reads, and what is told of them."""

import itertools

import pytest
import torch

import labkit
from labkit.experiments.stream_program import (
    COPY_IN,
    COPY_OUT,
    HOST_WAIT,
    KERNEL,
    MOST_STEPS,
    ORDERED,
    RACE,
    STALE,
    WAIT,
    Step,
    code_of,
    run_program,
)


@pytest.fixture(autouse=True)
def used():
    with labkit.use(gpus=1, virtual=True, quiet=True) as machine:
        yield machine


def one_batch(*, waits: bool, host_waits: bool) -> list[Step]:
    steps = [Step(COPY_IN, "a"), Step(WAIT, "b", "a"), Step(KERNEL, "b"), Step(COPY_OUT, "b"), Step(HOST_WAIT, "b")]
    return [step for step in steps if (waits or step.verb != WAIT) and (host_waits or step.verb != HOST_WAIT)]


SECOND_BATCH = [Step(COPY_IN, "a"), Step(WAIT, "b", "a"), Step(KERNEL, "b"), Step(COPY_OUT, "b"), Step(HOST_WAIT, "b")]
TWO_BATCHES = one_batch(waits=True, host_waits=False) + SECOND_BATCH
TWO_WRITERS = [Step(COPY_IN, "a"), Step(COPY_IN, "b"), Step(HOST_WAIT, "a"), Step(HOST_WAIT, "b")]
PROGRAMS = {
    "nothing waits": (one_batch(waits=False, host_waits=False), STALE, [0.0]),
    "the host does not wait": (one_batch(waits=True, host_waits=False), STALE, [0.0]),
    "the kernel does not wait": (one_batch(waits=False, host_waits=True), STALE, [0.0]),
    "all wait": (one_batch(waits=True, host_waits=True), ORDERED, [2.0]),
    "one stream": ([Step(verb, "c") for verb in (COPY_IN, KERNEL, COPY_OUT, HOST_WAIT)], ORDERED, [2.0]),
    "the next batch too early": (TWO_BATCHES, STALE, [4.0, 4.0]),
    "the next batch in order": ([*TWO_BATCHES[:4], Step(WAIT, "a", "b"), *SECOND_BATCH], ORDERED, [2.0, 4.0]),
    "two writers, the last of which wins": (
        [*TWO_WRITERS, Step(KERNEL, "c"), Step(COPY_OUT, "c"), Step(HOST_WAIT, "c")],
        RACE,
        [4.0],
    ),
    "nothing is read": ([Step(KERNEL, "a")], ORDERED, []),
}


@pytest.mark.parametrize(("steps", "verdict", "read"), PROGRAMS.values(), ids=PROGRAMS)
def test_what_the_host_reads_and_what_is_said_of_it(steps, verdict, read):
    outcome = run_program(steps)
    assert (outcome.verdict, outcome.read) == (verdict, read)
    assert bool(outcome.trace.races) == (verdict != ORDERED)


@pytest.mark.slow
def test_the_same_program_is_told_of_every_time():
    """A machine tells of the same two lines once; and it hands out its streams in turn."""
    steps = one_batch(waits=False, host_waits=False)
    for _ in range(12):
        outcome = run_program(steps)
        places = [(race.first.line, race.second.line) for race in outcome.trace.races]
        assert places == [(f"{outcome.program}:1", f"{outcome.program}:2"), (f"{outcome.program}:3", f"{outcome.program}:4")]


def test_the_timeline_has_the_streams_by_their_letters():
    trace = run_program([Step(KERNEL, "c"), Step(KERNEL, "a")]).trace
    assert list(trace.stream_names(0).values())[:4] == ["default stream", "stream a", "stream b", "stream c"]
    assert trace.busy(kind="kernel") > 0


def test_the_code_is_pytorch():
    code = code_of([*one_batch(waits=True, host_waits=True), Step(COPY_IN, "a")])
    assert code.splitlines() == [
        "with torch.cuda.stream(a): x.copy_(batches[0], non_blocking=True)",
        "b.wait_stream(a)",
        "with torch.cuda.stream(b): torch.mm(x, double, out=y)",
        "with torch.cuda.stream(b): results[0].copy_(y, non_blocking=True)",
        "b.synchronize()",
        "with torch.cuda.stream(a): x.copy_(batches[1], non_blocking=True)",
        "read = [result[0, 0].item() for result in results[:1]]",
    ]


@pytest.mark.slow
def test_no_memory_is_kept():
    run_program(one_batch(waits=True, host_waits=True))
    before = torch.cuda.memory_allocated()
    for verb, stream in itertools.product((KERNEL, COPY_IN), "abc"):
        run_program([Step(verb, stream)])
    assert torch.cuda.memory_allocated() - before <= 6 * 3 * (10 << 20)  # cuBLAS keeps a workspace for each new stream


def test_bad_steps_and_programs_are_refused():
    for arguments, message in (
        (("jump", "a"), "verb='jump': choose one of 'copy in'"),
        ((KERNEL, "d"), "stream='d'.*choose from 'a', 'b', 'c'"),
        ((WAIT, "a", ""), "other=''"),
        ((WAIT, "a", "a"), "stream a is in order with itself"),
    ):
        with pytest.raises(ValueError, match=message):
            Step(*arguments)
    for steps, message in (
        ([], "1 to 12 steps, this one has 0"),
        ([Step(KERNEL, "a")] * (MOST_STEPS + 1), "this one has 13"),
        ([Step(COPY_IN, "a")] * 4, 'at most 3 steps "copy in"'),
        ([Step(COPY_OUT, "a")] * 4, 'at most 3 steps "copy out"'),
    ):
        with pytest.raises(ValueError, match=message):
            run_program(steps)
    labkit.use(None)
    with pytest.raises(RuntimeError, match="no GPU is in use"):
        run_program([Step(KERNEL, "a")])


@pytest.mark.gpu
def test_a_real_gpu_is_refused():
    labkit.use(None)
    with labkit.use(gpus=1, virtual=False, quiet=True), pytest.raises(RuntimeError, match="does not tell of races"):
        run_program([Step(KERNEL, "a")])
