"""Puzzles with a score: `labkit.puzzle("name", function)`.

A puzzle has a correct but wasteful function. A learner rewrites it until its values are right and
it meets a budget on virtual GPUs. The score is the same on every computer.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from gputrace import Trace
from gputrace.figures.comparison import memory_compared, timeline_compared
from gputrace.figures.figure import Figure
from labkit import machine
from labkit.checks import checking
from labkit.checks.limits import a_screenful
from labkit.isolation import IsolatedError, isolated_on
from labkit.processes import by_value
from labkit.puzzles import scores
from labkit.puzzles.attempt import Attempt, attempts, guarded_attempt
from labkit.puzzles.definitions import TIME, Measure, Puzzle, find
from labkit.puzzles.outcome import NOT_RUN, OVER_BUDGET, RIGHT, WRONG, Judgement, Outcome, Row
from labkit.puzzles.replaced import Replaced
from virtualgpu.allocator import VARIABLES
from virtualgpu.machines import Request, VirtualGPUs

SECONDS = 120.0  # for the original and the learner's function, each of which runs twice

NEAR = 0.98  # the share of par from which on a score counts as par

# What the original functions did. It is always the same, so they run once in a notebook.
_originals: dict[str, Attempt] = {}


def puzzle(name: str, function: Callable[..., Any]) -> Outcome:
    """Run a learner's answer to a puzzle, and return its score and a figure of what it did.

    The function runs in a process of its own, on as many virtual GPUs as the puzzle needs, with
    fresh inputs. If real GPUs are in use and there are enough, it also runs there, and the table
    shows what was measured.

    Args:
        name: the name of the puzzle, such as "free first".
        function: the function that solves the puzzle.

    Raises:
        ValueError: there is no such puzzle. The message names the puzzles.
        TypeError: the function is not a function, or uses something that cannot be copied to
            another process, such as an open file.
    """
    known = find(name)
    copied(function)
    original, own = _run(known, function, (request(known), VirtualGPUs), _originals.get(name))
    if original is None or original.trace is None or own.trace is None:
        return Outcome(_verdict(name, False, f"Not yet: {own.trouble}"))
    _originals[name] = original
    rows = [_row(f"score on {_gpus(known)}", known.score, own.trace, original.trace)]
    rows += _measured(known, function)
    for limit, most in known.limits.items():
        found = limit.read(own.trace)
        if found or most:
            rows.append(Row(limit.name, limit.text(found), f"at most {limit.text(most)}"))
    judgement = judged(known, own)
    score, solved = judgement.score, judgement.status == RIGHT
    best = scores.best(name)
    if solved and score is not None:
        best = scores.note(name, score)
    text = known.score.text
    rows += [
        Row("budget", text(known.budget)),
        Row("par", text(known.par)),
        Row("your best so far", "none" if best is None else text(best)),
    ]
    verdict = _verdict(name, solved, judgement.message)
    figure = _figure(known, own.trace, original.trace)
    return Outcome(verdict, rows, figure, score if solved else None, best)


def request(known: Puzzle) -> Request:
    """Return the request for the virtual GPUs on which a puzzle is scored."""
    return Request(gpus=known.gpus, like=known.like, memory=None, values=True)


def copied(function: Callable[..., Any]) -> bytes:
    """Pickle a learner's function, with the variables of the notebook that it uses.

    Raises TypeError if it is not a function, or uses something that cannot be copied.
    """
    if not callable(function):
        raise TypeError(f"Give labkit.puzzle a function. You gave {function!r}.")
    try:
        return by_value.dumps(function)
    except Exception as error:
        raise TypeError(
            "your function uses something that cannot be copied to another process "
            f"({checking.quote(error)}). Leave it out."
        ) from None


def judged(known: Puzzle, own: Attempt) -> Judgement:
    """Return the judgement on what a function did in its attempt at a puzzle."""
    if own.trace is None:
        return Judgement(NOT_RUN, f"Not yet: {own.trouble}")
    score = known.score.read(own.trace)
    if own.trouble:
        return Judgement(WRONG, f"Not yet: {own.trouble}", score)
    over = _over_budget(known, score) or _over_limits(known, own.trace)
    if over:
        return Judgement(OVER_BUDGET, f"Not yet: the values are right, but {over}", score)
    return Judgement(RIGHT, _told(known, score), score)


def judged_here(
    name: str, load: Callable[[], Callable[..., Any]], draw: Callable[[int], int]
) -> Judgement:
    """Judge a function in this process, which is the function's own.

    The GPUs of `request` are in use.

    Args:
        name: the name of the puzzle.
        load: a function that returns the learner's function. It may run code of the learner.
        draw: a function that draws the seed of the inputs. It gets the number of bits.
    """
    known = find(name)
    replaced = Replaced()
    try:
        function = load()
    except Exception as error:
        return judged(known, Attempt(None, f"your function raised {checking.quote(error)}"))
    return judged(known, guarded_attempt(known, function, replaced, draw))


def _run(
    known: Puzzle,
    function: Callable[..., Any],
    gpus: tuple[Request, type[machine.GPUsInUse]],
    original: Attempt | None,
) -> tuple[Attempt | None, Attempt]:
    """Run a function in a new process, and print what it prints. Return what it did.

    The original function runs there too, unless `original` is what it did before.
    """
    arguments = known.name, function, original is None
    try:
        with _default_allocator():
            ran = isolated_on(gpus, SECONDS, attempts, arguments)
    except IsolatedError as error:
        return original, Attempt(None, str(error))
    except KeyboardInterrupt:  # without the kit's own lines about how it waits
        raise KeyboardInterrupt("the puzzle was interrupted while your function ran") from None
    with a_screenful():
        print(ran.output, end="")
    first, own = ran.value
    return original or first, own


@contextmanager
def _default_allocator() -> Iterator[None]:
    """Let processes that start in the block use the allocator with PyTorch's default settings.

    So the settings of a notebook change no score.
    """
    kept = {name: os.environ.pop(name) for name in VARIABLES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)


def _verdict(name: str, solved: bool, told: str) -> checking.Verdict:
    return replace(checking.Verdict(solved, told), points=float(solved), exercise=name)


def _gpus(known: Puzzle) -> str:
    """Return the virtual GPUs of a puzzle in words."""
    if known.gpus == 1:
        return f"a virtual {known.like}"
    return f"{known.gpus} virtual {known.like}s"


def _row(label: str, measure: Measure, own: Trace, original: Trace) -> Row:
    text = measure.text
    return Row(label, text(measure.read(own)), f"original {text(measure.read(original))}")


def _over_budget(known: Puzzle, score: float) -> str:
    """Return a sentence that says that a score is over the budget, or "" if it is not."""
    if score <= known.budget:
        return ""
    text = known.score.text
    return f"the budget is {text(known.budget)}. Your {known.score.name}: {text(score)}."


def _over_limits(known: Puzzle, trace: Trace) -> str:
    """Return a sentence about the first limit that the recording exceeds, or ""."""
    for measure, most in known.limits.items():
        found = measure.read(trace)
        if found > most:
            text = measure.text
            return f"the {measure.name} may be at most {text(most)}. Your function: {text(found)}."
    return ""


def _told(known: Puzzle, score: float) -> str:
    """Return the message about a solution, which compares its score with par."""
    text = known.score.text
    own, par = text(score), text(known.par)
    told = f"Right. Your {known.score.name}: {own}."
    if own == par or NEAR * known.par <= score < known.par:
        return f"{told} That is par."
    if score > known.par:
        return f"{told} Par is {par}."
    return f"{told} That is better than par, which is {par}."


def _figure(known: Puzzle, own: Trace, original: Trace) -> Figure:
    """Draw the memory or the timeline of the learner's recording and of the original.

    The original is drawn in grey.
    """
    measure = known.score
    text = measure.text
    title = f"{known.name}: {measure.name} {text(measure.read(own))}"
    title += f", original {text(measure.read(original))}"
    if measure.picture == "timeline":
        budget = known.budget if measure is TIME else None
        return timeline_compared(own, original, title, budget)
    return memory_compared(own, original, title, known.budget, measure.picture == "reserved")


def _measured(known: Puzzle, function: Callable[..., Any]) -> list[Row]:
    """Run both functions on real GPUs, and return what was measured.

    The list is empty if no real GPUs are in use, or if this computer has too few.
    """
    used = machine.current()
    if used is None or used.virtual or machine.real_gpus() < known.gpus:
        return []
    there = replace(used.request, gpus=known.gpus)
    original, own = _run(known, function, (there, type(used)), None)
    if original is None or original.trace is None or own.trace is None:
        return [Row(used.badge, own.trouble)]
    return [_row(used.badge, known.score, own.trace, original.trace)]
