"""A check observes beside the learner's code, judges apart from it, and leaves nothing behind."""

import json
import random

import pytest
import torch

import labkit
from labkit import lessons
from labkit.lessons import checks
from labkit.lessons.checks import Check, is_stub, quote
from labkit.lessons.verdict import Verdict, not_attempted, not_yet, right

DOUBLE = Check(
    "98.1",
    draw=lambda generator: generator.randint(1, 99),
    observe=lambda student, number: student(number),
    judge=lambda observed, number: right("Doubled.") if observed == 2 * number else not_yet(f"{observed} is not twice {number}."),
)


@pytest.fixture
def two_gpus():
    with labkit.use(gpus=2, virtual=True, quiet=True):
        yield


def test_verdicts_read_as_sentences():
    assert repr(Verdict(True, "Right.", 1.0, "01.2")) == "01.2 Right."
    assert (right().message, right("Well done.").message) == ("Right.", "Right. Well done.")
    assert (not_yet("look.").message, not_attempted().message) == ("Not yet: look.", "not attempted")
    assert [verdict.points for verdict in (right(), not_yet(""), not_attempted())] == [1, 0, 0]


def test_an_unknown_exercise_names_those_there_are():
    with pytest.raises(ValueError, match=r"no exercise '99\.9'; there are 00\.1, 01\.1, .*01\.5"):
        labkit.check("99.9", print)
    assert labkit.lessons.exercises().keys() == {check.number for check in lessons.exercises().values()}


def test_a_check_needs_its_gpus():
    with pytest.raises(RuntimeError, match=r"01\.1 needs 2 GPU\(s\) in use, and there are 0: run the lesson's first cell"):
        labkit.check("01.1", print)
    with labkit.use(gpus=1, virtual=True, quiet=True), pytest.raises(RuntimeError, match="there are 1"):
        labkit.check("01.1", print)


def test_run_draws_observes_and_judges(two_gpus):
    assert repr(checks.run(DOUBLE, lambda number: 2 * number)) == "98.1 Right. Doubled."
    verdict = checks.run(DOUBLE, lambda number: number + 1, seed=3)
    assert verdict == checks.run(DOUBLE, lambda number: number + 1, seed=3)
    assert not verdict.passed and "is not twice" in verdict.message


def test_an_answer_that_raises_is_quoted(two_gpus):
    def wrong(number):
        raise KeyError("first line\nsecond line")

    verdict = checks.run(DOUBLE, wrong)
    assert (verdict.passed, verdict.points) == (False, 0)
    assert repr(verdict) == "98.1 Not yet: your answer raised KeyError: 'first line\\nsecond line'"


def test_errors_are_quoted_in_one_line():
    assert quote(ValueError("one\ntwo")) == "ValueError: one"
    assert quote(ValueError()) == "ValueError"
    with pytest.raises(ValueError) as caught, checks.during("a tensor on cuda:1"):
        raise ValueError("bad")
    assert quote(caught.value) == "ValueError: bad (given a tensor on cuda:1)"


def test_stubs_are_told_from_answers():
    def documented(a, b):
        """What it would do."""
        ...

    def passing():
        pass

    def constant():
        return 0

    def echo(a):
        return a

    def forgets_to_return(a):
        echo(a)

    assert all(map(is_stub, (None, ..., documented, passing, lambda: None)))
    assert not any(map(is_stub, (0, "text", constant, echo, forgets_to_return, print, int)))


def test_a_check_leaves_no_memory_and_the_same_current_device(two_gpus):
    kept = []

    def wrong(lengths, size):
        torch.cuda.set_device(1)
        tensor = torch.zeros(1 << 20, device="cuda")
        kept.append("called")
        raise RuntimeError(f"with {tensor.numel()} numbers in a frame that the exception holds")

    before = [torch.cuda.memory_allocated(index) + torch.cuda.memory_reserved(index) for index in range(2)]
    assert "1048576 numbers" in repr(labkit.check("01.1", wrong))
    assert kept
    assert torch.cuda.current_device() == 0
    assert [torch.cuda.memory_allocated(index) + torch.cuda.memory_reserved(index) for index in range(2)] == before


@pytest.mark.parametrize("number", lessons.exercises())
def test_inputs_are_plain_data_and_drawn_afresh(number):
    draw = lessons.find(number).draw
    drawn = [draw(random.Random(seed)) for seed in range(5)]
    assert all(json.loads(json.dumps(inputs)) == inputs for inputs in drawn)
    assert len({json.dumps(inputs) for inputs in drawn}) > 1
    assert draw(random.Random(7)) == draw(random.Random(7))


ANSWERS = {
    "00.1": lambda numbers: torch.tensor(numbers, device="cuda"),
    "01.1": lambda lengths, size: lengths[:, None] > 0,
    "01.2": lambda batch, device: batch,
    "01.3": lambda model: {torch.device("cpu"): 3},
    "01.4": lambda index, work: work(),
    "01.5": lambda source, device, work: source.to(device),
}


@pytest.mark.parametrize("number", lessons.exercises())
def test_observations_are_plain_data_that_can_be_judged_elsewhere(number, two_gpus):
    check = lessons.find(number)
    inputs = check.draw(random.Random(1))
    observation = checks.observe(check, ANSWERS[number], inputs)
    carried = json.loads(json.dumps(observation))
    assert carried == observation
    assert checks.judge(check, carried, inputs) == checks.judge(check, observation, inputs)


def test_no_answer_reaches_the_judge(two_gpus):
    """A tensor whose operators are forged is observed by its values; whatever equals everything is observed by its type."""

    class Agreeable:
        def __eq__(self, other):
            return True

        def __hash__(self):
            return 0

    for number in lessons.exercises():
        assert not labkit.check(number, lambda *arguments: Agreeable()).passed
