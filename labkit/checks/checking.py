"""How a check works: fresh inputs are drawn, the answer is observed with them, and what was observed is judged.

Inputs and observations are plain data (numbers, strings, lists, dicts), so that `observe` can run beside the learner's code and `judge`
somewhere else, in a process that the learner's code never reaches.
"""

import dis
import inspect
import numbers
import random
import re
import traceback
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from decimal import Decimal
from html import escape
from typing import Any

import torch

from labkit import machine
from labkit.checks.defaults import defaults
from labkit.checks.left_behind import Followed
from labkit.checks.undisturbed import undisturbed

LONGEST_MESSAGE = 400  # characters of an exception's message that are quoted

Plain = Any  # numbers, strings, None, and lists and dicts of them


@dataclass(frozen=True)
class Verdict:
    """Whether an answer passed, a message that helps, and the points it earns (an exercise is worth one).

    A notebook shows it as its message, with a mark, a word and a colour.
    """

    passed: bool
    message: str
    points: float = 0.0
    exercise: str = ""

    def __repr__(self) -> str:
        return f"{self.exercise} {self.message}".strip()

    def _repr_html_(self) -> str:
        word, told = re.fullmatch(r"([\w ]+)[.:]?\s*(.*)", self.message, re.DOTALL).groups()  # type: ignore[union-attr]  # all begin so
        told = re.sub(r"`([^`\n]+)`", r"<code>\1</code>", escape(told)).replace("\n", "<br>")
        return f"<div>{marked(word, self.exercise)} {told}</div>"


_MARKS = {"right": ("✔", "#1a7340"), "not yet": ("✘", "#a33c00")}  # all else is open


def marked(word: str, exercise: str) -> str:
    """An exercise and how far it is, in HTML, with a mark and a colour that both themes of JupyterLab let read."""
    mark, colour = _MARKS.get(word.lower(), ("○", "#595959"))
    look = f"background: {colour}; color: white; border-radius: 3px; padding: 1px 6px; font-weight: bold"
    return f'<span style="{look}">{mark} {exercise} {word}</span>'


def right(note: str = "") -> Verdict:
    return Verdict(True, f"Right. {note}".strip(), points=1.0)


def not_yet(message: str) -> Verdict:
    return Verdict(False, f"Not yet: {message}")


def wrong_type(returned: Any, expected: str, hint: str = "") -> Verdict:
    """Return the verdict on a function that returned something of another type.

    `returned` names what the function returned, usually its type.
    """
    return not_yet(f"your function returned {returned}, not {expected}. {hint}".rstrip())


def not_attempted() -> Verdict:
    return Verdict(False, "not attempted")


@dataclass(frozen=True)
class Check:
    """One exercise's check.

    Attributes:
        number: of the exercise, such as "01.2".
        draw: makes the inputs of one try.
        observe: gives the answer those inputs and returns what it did. An exception in it is the answer's.
        judge: says what to make of it. Pure.
        expect: makes of the inputs what the judge compares with, its last argument. It runs where answers are judged: no answer finds it
            there. It needs no GPU.
        gpus: how many the check needs.
        script: what the exercise cell holds where the exercise is to mend a function.
        alters: what the answer is to alter of what it is given: "values" of tensors, lists and parameters; "hooks" of a model.
        children: whether `observe` starts child processes, whose server is then there before the answer's time begins.
        section: the heading of the lesson's section that explains what the exercise needs. Those who fail three times are sent there.
    """

    number: str
    draw: Callable[[random.Random], Plain]
    observe: Callable[[Any, Plain], Plain]
    judge: Callable[..., Verdict]
    gpus: int = 1
    script: Callable[..., Any] | None = None
    alters: tuple[str, ...] = ()
    children: bool = False
    section: str = ""
    expect: Callable[[Plain], Plain] | None = None


def run(check: Check, answer: Any, seed: int | None = None) -> Verdict:
    """Draw, observe and judge, here and now. `seed` repeats a draw; without it, each call draws anew."""
    inputs = drawn(check, seed)
    return judge(check, observe(check, answer, inputs), inputs)


def drawn(check: Check, seed: int | None = None) -> Plain:
    """The inputs of one try: those of `seed`, or others at each call."""
    return check.draw(random.Random(seed))


_KEPT = (
    "labkit.use cannot change the GPUs while labkit.check runs your answer. Remove the call: the lesson's first cell has chosen the GPUs."
)
LOST = "The GPU takes no work after that: call labkit.use(None) and run the first cell again, on a real GPU in a new kernel"


def observe(check: Check, answer: Any, inputs: Plain) -> Plain:
    """What `answer` does with `inputs`: {"observed": …, "left": what is otherwise afterwards}, {"raised": …} or {"attempted": False}.

    Leaves the GPUs as they were: the current device and streams, and the memory in use. PyTorch's settings are its own meanwhile, not the
    notebook's. Values are computed, also on virtual GPUs with `values=False`.
    """
    _require_gpus(check)
    if is_stub(answer, check.script):
        return {"attempted": False}
    if inspect.iscoroutinefunction(answer):
        return {"raised": "nothing and ran nothing: a function of `async def` returns a coroutine, and nobody awaits it. Write `def`."}
    used = machine.in_use()
    try:
        with used.kept(_KEPT), used.with_values(), undisturbed(), defaults():
            try:
                followed = Followed(answer, check.alters) if callable(answer) else answer
                observed = check.observe(followed, inputs)
                return {"observed": observed, "left": next(iter(getattr(followed, "left", [])), "")}
            except (Exception, SystemExit) as error:
                return {"raised": quote(error, answer)}
    except RuntimeError as error:  # the GPUs cannot be left as they were: the answer has ended all work on them
        return {"raised": f"{quote(error)}. {LOST}"}


def judge(check: Check, observation: Plain, inputs: Plain) -> Verdict:
    """The verdict on what `observe` returned. Runs none of the learner's code."""
    if "observed" in observation:
        due = [check.expect(inputs)] if check.expect else []
        verdict = check.judge(observation["observed"], inputs, *due)
        if verdict.passed and observation["left"]:
            verdict = not_yet(observation["left"])
    elif "raised" in observation:
        verdict = not_yet(f"your answer raised {observation['raised']}")
    else:
        verdict = not_attempted()
    return replace(verdict, exercise=check.number)


def _require_gpus(check: Check) -> None:
    used = machine.current()
    if used is None or used.count < check.gpus:
        raise RuntimeError(
            f"the check of {check.number} needs {check.gpus} GPU(s) in use, and there are {used.count if used else 0}: "
            "run the lesson's first cell, which calls labkit.use"
        )


# What a function whose body is `...`, `pass` or a docstring compiles to, in Python 3.11 to 3.14.
_EMPTY = {"RESUME", "NOP", "LOAD_CONST", "RETURN_CONST", "RETURN_VALUE"}


def is_stub(answer: Any, script: Callable[..., Any] | None = None) -> bool:
    """Whether `answer` is still what the exercise cell holds: nothing, a function that does nothing, or the `script` to mend."""
    if not isinstance(answer, types.FunctionType):
        return answer is None or answer is ...
    if script is not None and _content(answer) == _content(_alone(script)):
        return True
    instructions = list(dis.get_instructions(answer))
    does_nothing = all(instruction.opname in _EMPTY for instruction in instructions)
    return does_nothing and all(i.argval is None for i in instructions if i.opname in ("LOAD_CONST", "RETURN_CONST"))


def _alone(function: Any) -> Any:
    """The function compiled without its module, as an exercise cell is: an import beside a function changes how it is compiled."""
    names = dict(function.__globals__)
    exec(inspect.getsource(function), names)
    return names[function.__name__]


def _content(function: Any) -> tuple:
    """What a function does, wherever it was written: the same for the same source, whatever its comments and line breaks."""
    return _code(function.__code__), function.__defaults__, function.__kwdefaults__


def _code(code: types.CodeType) -> tuple:
    constants = tuple(_code(constant) if isinstance(constant, types.CodeType) else constant for constant in code.co_consts)
    return code.co_code, code.co_exceptiontable, constants, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars


@contextmanager
def during(what: str) -> Iterator[None]:
    """Say in an exception raised in the block what the answer was given: `with during("a tensor on cuda:1"):`."""
    try:
        yield
    except Exception as error:
        error.add_note(what)
        raise


def quote(error: BaseException, answer: Any = None) -> str:
    """An exception in a sentence: its class, what its message says, what `during` said, and the line of `answer` that it came through."""
    text = ": ".join(part for part in (type(error).__name__, _gist(str(error))) if part)
    notes = getattr(error, "__notes__", [])
    given = [f"given {notes[-1]}"] if notes else []
    aside = "; ".join(given + own_line(error, answer))
    return f"{text} ({aside})" if aside else text


def _gist(message: str) -> str:
    """A message's first line, and the line that says what is wrong: the next one after a colon, the last one of a replica's traceback."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    told = lines[:1]
    if any(line.endswith("Traceback (most recent call last):") for line in lines):
        told.append(lines[-1])
    elif len(lines) > 1 and lines[0].endswith(":"):
        told.append(lines[1])
    gist = " ".join(told)
    return gist if len(gist) <= LONGEST_MESSAGE else gist[: LONGEST_MESSAGE - 1] + "…"


def own_line(error: BaseException, answer: Any) -> list[str]:
    """Where `answer` was when it raised: the innermost of its own lines."""
    code = getattr(inspect.unwrap(answer) if callable(answer) else None, "__code__", None)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if code and frame.filename == code.co_filename]
    return [f"line {frames[-1].lineno}: {frames[-1].line}".removesuffix(": ")] if frames else []


def describe(value: Any) -> Plain:
    """A tensor as plain data: device, dtype, shape and values in one list. Of anything else, the name of its type."""
    name = type(value).__name__
    if not isinstance(value, torch.Tensor) or type(value).__module__ == "__main__":  # a notebook's own class may say anything of itself
        return {"type": f"a {name} of its own" if name == "Tensor" else name}
    flat = value.detach().cpu().flatten().tolist()
    return {"type": "Tensor", "device": str(value.device), "dtype": str(value.dtype), "shape": list(value.shape), "values": flat}


def plural(count: int, noun: str) -> str:
    """Return the count and the noun, such as "1 row" or "3 rows"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def one_number(value: Any) -> int | float | None:
    """Return what `number` does, and also the number in a tensor without dimensions."""
    if not isinstance(value, torch.Tensor) or type(value).__module__ == "__main__":
        return number(value)
    return number(value.item()) if value.dim() == 0 else None


def number_or_type(value: Any) -> int | float | str:
    """Return what `number` does, or else the name of the value's type."""
    found = number(value)
    return type(value).__name__ if found is None else found


def number(value: Any) -> int | float | None:
    """`value` as a plain number, NumPy's and decimals too; None for what is no number: a bool, text, a tensor."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real | Decimal):
        return None
    return int(value) if isinstance(value, numbers.Integral) else float(value)
