"""Puzzles with a score: `labkit.puzzle("name", function)`.

A puzzle has a correct but wasteful function. A learner rewrites it until its values are right and
it meets a budget on a virtual H200. The score is the same on every computer.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from gputrace import Trace
from gputrace.figures.comparison import memory_compared, timeline_compared
from gputrace.figures.figure import Figure
from labkit import machine
from labkit.checks import checking
from labkit.checks.limits import a_screenful
from labkit.isolation import IsolatedError, isolated_on
from labkit.puzzles import scores
from labkit.puzzles.attempt import Attempt, attempts
from labkit.puzzles.definitions import MODEL, TIME, Measure, Puzzle, find
from labkit.puzzles.outcome import Outcome, Row
from virtualgpu.machines import Request, VirtualGPUs

SECONDS = 120.0  # for the original and the learner's function, each of which runs twice

# What the original functions did. It is always the same, so they run once in a notebook.
_originals: dict[str, Attempt] = {}


def puzzle(name: str, function: Callable[..., Any]) -> Outcome:
    """Run a learner's answer to a puzzle, and return its score and a figure of what it did.

    The function runs in a process of its own, on virtual H200s, with fresh inputs. If real GPUs
    are in use, it also runs there, and the table shows what was measured.

    Args:
        name: the name of the puzzle, such as "free first".
        function: the function that solves the puzzle.

    Raises:
        ValueError: there is no such puzzle. The message names the puzzles.
        TypeError: the function is not a function.
    """
    known = find(name)
    if not callable(function):
        raise TypeError(f"Give labkit.puzzle a function. You gave {function!r}.")
    request = Request(gpus=known.gpus, like=MODEL, memory=None, values=True)
    original, own = _run(known, function, (request, VirtualGPUs), _originals.get(name))
    if original is None or original.trace is None or own.trace is None:
        return Outcome(_verdict(name, False, f"Not yet: {own.trouble}"))
    _originals[name] = original
    rows = [_row("score on a virtual H200", known.score, own.trace, original.trace)]
    rows += _measured(known, function)
    score = known.score.read(own.trace)
    over = _over_limits(known, own.trace)
    solved = not own.trouble and not over and score <= known.budget
    best = scores.note(name, score) if solved else scores.best(name)
    text = known.score.text
    rows += [
        Row("budget", text(known.budget)),
        Row("par", text(known.par)),
        Row("your best so far", "none" if best is None else text(best)),
    ]
    if own.trouble:
        told = f"Not yet: {own.trouble}"
    elif over:
        told = f"Not yet: the values are right, but {over}"
    else:
        told = _told(known, score)
    figure = _figure(known, own.trace, original.trace)
    return Outcome(_verdict(name, solved, told), rows, figure, score if solved else None, best)


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
        ran = isolated_on(gpus, SECONDS, attempts, arguments)
    except IsolatedError as error:
        return original, Attempt(None, str(error))
    with a_screenful():
        print(ran.output, end="")
    first, own = ran.value
    return original or first, own


def _verdict(name: str, solved: bool, told: str) -> checking.Verdict:
    return replace(checking.Verdict(solved, told), points=float(solved), exercise=name)


def _row(label: str, measure: Measure, own: Trace, original: Trace) -> Row:
    text = measure.text
    return Row(label, text(measure.read(own)), f"original {text(measure.read(original))}")


def _over_limits(known: Puzzle, trace: Trace) -> str:
    """Return a sentence about the first limit that the function does not keep, "" if none."""
    for measure, most in known.limits.items():
        found = measure.read(trace)
        if found > most:
            text = measure.text
            return f"the {measure.name} may be at most {text(most)}. Your function: {text(found)}."
    return ""


def _told(known: Puzzle, score: float) -> str:
    """Return the message for right values."""
    text = known.score.text
    if score > known.budget:
        return (
            f"Not yet: the values are right, but the budget is {text(known.budget)}. "
            f"Your {known.score.name}: {text(score)}."
        )
    told = f"Right. Your {known.score.name}: {text(score)}."
    if score > known.par:
        return f"{told} Par is {text(known.par)}."
    return f"{told} That is par."


def _figure(known: Puzzle, own: Trace, original: Trace) -> Figure:
    """Draw the memory or the timeline of both functions."""
    measure = known.score
    text = measure.text
    title = f"{known.name}: {measure.name} {text(measure.read(own))}"
    title += f", original {text(measure.read(original))}"
    if measure.picture == "timeline":
        budget = known.budget if measure is TIME else None
        return timeline_compared(own, original, title, budget)
    return memory_compared(own, original, title, known.budget, measure.picture == "reserved")


def _measured(known: Puzzle, function: Callable[..., Any]) -> list[Row]:
    """Run both functions on the real GPUs in use, and return what was measured.

    The list is empty if no real GPUs are in use, or too few.
    """
    used = machine.current()
    if used is None or used.virtual or used.count < known.gpus:
        return []
    original, own = _run(known, function, (used.request, type(used)), None)
    if original is None or original.trace is None or own.trace is None:
        return [Row(used.badge, own.trouble)]
    return [_row(used.badge, known.score, own.trace, original.trace)]
