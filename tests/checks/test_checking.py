"""A check observes beside the learner's code, judges apart from it, and leaves nothing behind."""

import contextlib
import json
import random
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch

import labkit
from labkit import checks, processes
from labkit.checks import checking, limits
from labkit.checks.checking import Check, Verdict, is_stub, not_attempted, not_yet, quote, right

DOUBLE = Check(
    "98.1",
    draw=lambda generator: generator.randint(1, 99),
    observe=lambda student, number: student(number),
    judge=lambda observed, number: (
        right("Doubled.")
        if observed == 2 * number
        else not_yet(f"{observed} is not twice {number}.")
    ),
)


@pytest.fixture
def two_gpus():
    with labkit.use(gpus=2, virtual=True, quiet=True):
        yield


def test_verdicts_read_as_sentences():
    assert repr(Verdict(True, "Right.", 1.0, "01.2")) == "01.2 Right."
    assert (right().message, right("Well done.").message) == ("Right.", "Right. Well done.")
    assert (not_yet("look.").message, not_attempted().message) == (
        "Not yet: look.",
        "not attempted",
    )
    assert [verdict.points for verdict in (right(), not_yet(""), not_attempted())] == [1, 0, 0]


def test_a_check_imports_only_the_checks_of_its_lesson(monkeypatch):
    imported = []
    monkeypatch.setattr(
        checks, "import_module", lambda name: imported.append(name) or import_module(name)
    )
    assert checks.find("01.2").number == "01.2" and checks.progress("01").numbers[0] == "01.1"
    assert imported == ["gpulessons.lesson_01.checks"] * 2


def test_an_unknown_exercise_names_those_there_are():
    with pytest.raises(
        ValueError, match=r"no exercise '99\.9'. Choose one of these: 00\.1, 01\.1, .*01\.5"
    ):
        labkit.check("99.9", print)
    for number in ("1.1", 1.1, "01.9"):
        with pytest.raises(ValueError, match=r"Choose one of these: 01\.1, .*01\.5\.$"):
            labkit.check(number, print)
    assert labkit.checks.exercises().keys() == {
        check.number for check in checks.exercises().values()
    }


def test_a_check_needs_its_gpus():
    with pytest.raises(
        RuntimeError, match=r"01\.1 needs 2 GPU\(s\), and 0 are in use. Run the lesson's first cell"
    ):
        labkit.check("01.1", print)
    with (
        labkit.use(gpus=1, virtual=True, quiet=True),
        pytest.raises(RuntimeError, match="1 are in use"),
    ):
        labkit.check("01.1", print)


def test_run_draws_observes_and_judges(two_gpus):
    assert repr(checking.run(DOUBLE, lambda number: 2 * number)) == "98.1 Right. Doubled."
    verdict = checking.run(DOUBLE, lambda number: number + 1, seed=3)
    assert verdict == checking.run(DOUBLE, lambda number: number + 1, seed=3)
    assert not verdict.passed and "is not twice" in verdict.message


def test_a_check_computes_values_on_gpus_that_compute_none():
    """A lesson may choose GPUs without values for its measurements.

    Its exercises still need values, so a check computes them.
    """
    total = Check(
        "98.2",
        draw=lambda generator: generator.randint(1, 9),
        observe=lambda student, number: student(
            torch.full((1 << 20,), float(number), device="cuda")
        ).item(),
        judge=lambda observed, number: (
            right() if observed == number << 20 else not_yet(f"{observed}")
        ),
    )
    with labkit.use(gpus=1, virtual=True, values=False, quiet=True):
        assert checking.run(total, lambda x: (x + 0).sum()).passed
        assert "values not kept" in repr(torch.rand(1000, device="cuda"))


def test_an_answer_that_raises_is_quoted(two_gpus):
    def wrong(number):
        raise KeyError("first line\nsecond line")

    verdict = checking.run(DOUBLE, wrong)
    assert (verdict.passed, verdict.points) == (False, 0)
    assert repr(verdict).startswith(
        "98.1 Not yet: your answer raised KeyError: 'first line\\nsecond line' (line "
    )
    assert repr(verdict).endswith(': raise KeyError("first line\\nsecond line"))')


def test_an_async_answer_is_told_what_it_is(two_gpus):
    async def double(number):
        return 2 * number

    assert repr(checking.run(DOUBLE, double)).endswith(
        "A function with `async def` returns a coroutine, which must be awaited. Write `def` "
        "instead."
    )


def test_an_answer_that_leaves_the_program_has_a_verdict(two_gpus):
    assert "raised SystemExit" in repr(checking.run(DOUBLE, lambda number: exit()))


def test_an_answer_that_ends_the_gpus_work_has_a_verdict():
    with labkit.use(gpus=2, virtual=True, quiet=True):
        verdict = checking.run(
            DOUBLE,
            lambda number: torch.zeros(1, device="cuda")[torch.tensor([5], device="cuda")].item(),
        )
        assert (
            "device-side assert triggered. After this error the GPU takes no more work. Call "
            "labkit.use(None)" in repr(verdict)
        )


REPLICA = (
    "Caught OSError in replica 1 on device 1.\nOriginal Traceback (most recent call last):\n"
    "  File\nOSError: no weights"
)


@pytest.mark.parametrize(
    ("message", "quoted"),
    [
        ("one\ntwo", "ValueError: one"),
        ("", "ValueError"),
        (
            "Error(s) in loading state_dict:\n\tsize mismatch for weight\n\tand more",
            "ValueError: Error(s) in loading state_dict: size mismatch for weight",
        ),
        (REPLICA, "ValueError: Caught OSError in replica 1 on device 1. OSError: no weights"),
        ("x" * 500, "ValueError: " + "x" * 399 + "…"),
    ],
)
def test_errors_are_quoted_by_what_they_say(message, quoted):
    assert quote(ValueError(message)) == quoted


def test_an_error_is_quoted_with_what_was_given():
    with pytest.raises(ValueError) as caught, checking.during("a tensor on cuda:1"):
        raise ValueError("bad")
    assert quote(caught.value) == "ValueError: bad (given a tensor on cuda:1)"


WITHOUT = ("07",)  # lessons whose checks name no section yet
NAMING = [
    check
    for check in checks.exercises().values()
    if check.section or check.number[:2] not in WITHOUT
]


@pytest.mark.parametrize("check", NAMING, ids=lambda check: check.number)
def test_the_section_that_a_check_names_is_in_its_lesson(check):
    (lesson,) = Path("notebooks").glob(f"{check.number[:2]}_*.ipynb")
    text = "\n".join(
        "".join(cell["source"])
        for cell in json.loads(lesson.read_text())["cells"]
        if cell["cell_type"] == "markdown"
    )
    assert check.section in [line.strip("# ") for line in text.splitlines() if line.startswith("#")]


def test_stubs_are_told_from_answers():
    def documented(a, b):
        """Return the sum of a and b."""
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


def script(numbers: list, start: int = 0) -> torch.Tensor:
    """Add them up."""

    def add(a, b):
        return a + b

    for number in [n for n in numbers if n > 0]:
        start = add(start, number)
    return torch.tensor(start)


AS_HANDED_OUT = '''
def script(numbers, start=0):
    """Add them up."""
    def add(a, b): return a + b
    for number in [n for n in numbers if n > 0]:
        start = add(start, number)
    return torch.tensor(
        start,  # the sum
    )
'''
MENDED = (
    ("n > 0", "n > 1"),
    ("a + b", "a - b"),
    ("start=0", "start=1"),
    ("add(start, number)", "start"),
    ("in numbers", "in set(numbers)"),
)


def defined(source):
    """Return the function that an exercise cell defines."""
    names = {"torch": torch}
    exec(source, names)
    return names["script"]


def test_a_script_to_mend_is_a_stub_until_it_does_something_else():
    assert is_stub(defined(AS_HANDED_OUT), script)
    often = defined(AS_HANDED_OUT)
    for _ in range(100):
        # Python rewrites the code of a function that is called often
        assert often([1, 2, -3]) == script([1, 2, -3]) == 3
    assert is_stub(often, script)
    for before, after in MENDED:
        assert before in AS_HANDED_OUT and not is_stub(
            defined(AS_HANDED_OUT.replace(before, after)), script
        )
    assert is_stub(None, script) and is_stub(lambda: None, script)
    assert not is_stub(print, script) and not is_stub(often)


def test_a_script_that_was_not_touched_is_not_attempted(two_gpus):
    mend = replace(DOUBLE, script=script)
    assert repr(checking.run(mend, defined(AS_HANDED_OUT))) == "98.1 not attempted"
    assert checking.run(mend, lambda number: number + number).passed


def test_a_check_leaves_no_memory_and_the_same_current_device(two_gpus):
    kept = []

    def wrong(lengths, size):
        torch.cuda.set_device(1)
        tensor = torch.zeros(1 << 20, device="cuda")
        kept.append("called")
        raise RuntimeError(f"with {tensor.numel()} numbers in a frame that the exception holds")

    before = [
        torch.cuda.memory_allocated(index) + torch.cuda.memory_reserved(index) for index in range(2)
    ]
    assert "1048576 numbers" in repr(labkit.check("01.1", wrong))
    assert kept
    assert torch.cuda.current_device() == 0
    assert [
        torch.cuda.memory_allocated(index) + torch.cuda.memory_reserved(index) for index in range(2)
    ] == before


def test_a_check_leaves_the_same_current_streams(two_gpus):
    def answer(number):
        torch.cuda.set_stream(torch.cuda.Stream("cuda:1"))
        return 2 * number

    assert not checking.run(DOUBLE, answer).passed
    assert [torch.cuda.current_stream(index) for index in range(2)] == [
        torch.cuda.default_stream(index) for index in range(2)
    ]


WITHOUT_INPUTS = ("13.5",)  # a verdict of the learner's own brings its inputs along


@pytest.mark.parametrize("number", checks.exercises())
def test_inputs_are_plain_data_and_drawn_afresh(number):
    draw = checks.find(number).draw
    drawn = [draw(random.Random(seed)) for seed in range(5)]
    assert all(json.loads(json.dumps(inputs)) == inputs for inputs in drawn)
    if number in WITHOUT_INPUTS:
        assert drawn == [{}] * 5
    else:
        assert len({json.dumps(inputs) for inputs in drawn}) > 1
    assert draw(random.Random(7)) == draw(random.Random(7))


@pytest.mark.slow
def test_the_server_of_children_is_there_before_an_answers_time_begins(two_gpus, monkeypatch):
    """The server imports torch, which may take most of an answer's time.

    A learner who has written nothing does not wait for the server.
    """
    happened = []
    monkeypatch.setattr(processes, "start_server", lambda: happened.append("server"))

    @contextlib.contextmanager
    def in_time(*_):
        happened.append("time")
        yield

    monkeypatch.setattr(limits, "in_time", in_time)
    for children, answer, expected in (
        (True, lambda x: 2 * x, ["server", "time"]),
        (False, lambda x: 2 * x, ["time"]),
        (True, ..., ["time"]),
    ):
        monkeypatch.setattr(
            checks, "find", lambda number, children=children: replace(DOUBLE, children=children)
        )
        happened.clear()
        checks.check("98.1", answer)
        assert happened == expected


def each_exercise() -> list:
    """Return the number of each exercise as a parameter of a test.

    Checks that start processes are marked as slow.
    """
    found = []
    for number in checks.exercises():
        marks = [pytest.mark.slow] if checks.find(number).children else []
        found.append(pytest.param(number, marks=marks))
    return found


@pytest.mark.parametrize("number", each_exercise())
def test_no_answer_reaches_the_judge(two_gpus, number):
    """Check that a tensor with forged operators is observed by its values.

    An object that equals everything is observed by its type.
    """

    class Agreeable:
        def __eq__(self, other):
            return True

        def __hash__(self):
            return 0

    assert not labkit.check(number, lambda *arguments: Agreeable()).passed
