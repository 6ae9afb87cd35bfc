"""The steps of a check: draw fresh inputs, observe the answer with them, and judge the observation.

Inputs and observations are plain data (numbers, strings, lists, dicts). So `observe` can run beside
the learner's code, and `judge` in another process, which the learner's code cannot reach.
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

LONGEST_MESSAGE = 400  # the rest of an exception's message is not quoted

Plain = Any  # numbers, strings, None, and lists and dicts of them


@dataclass(frozen=True)
class Verdict:
    """The result of a check. A notebook shows the message with a mark and a colour.

    Attributes:
        passed: whether the answer is right.
        message: what the learner reads. It begins with "Right", "Not yet" or another short word.
        points: how many points the answer earns. A right answer earns 1.
        exercise: the number of the exercise, such as "01.2".
    """

    passed: bool
    message: str
    points: float = 0.0
    exercise: str = ""

    def __repr__(self) -> str:
        return f"{self.exercise} {self.message}".strip()

    def _repr_html_(self) -> str:
        parts = re.fullmatch(r"([\w ]+)[.:]?\s*(.*)", self.message, re.DOTALL)
        assert parts is not None, "every message begins with a word"
        word, told = parts.groups()
        told = re.sub(r"`([^`\n]+)`", r"<code>\1</code>", escape(told)).replace("\n", "<br>")
        return f"<div>{marked(word, self.exercise)} {told}</div>"


_MARKS = {"right": ("✔", "#1a7340"), "not yet": ("✘", "#a33c00")}
_OTHER_MARK = ("○", "#595959")


def marked(word: str, exercise: str) -> str:
    """Return HTML that shows the number of an exercise and a state, such as "Right".

    `word` is the state. It has a mark and a colour, which is readable in the light and in the dark
    theme of JupyterLab.
    """
    mark, colour = _MARKS.get(word.lower(), _OTHER_MARK)
    look = (
        f"background: {colour}; color: white; border-radius: 3px; padding: 1px 6px; "
        "font-weight: bold"
    )
    return f'<span style="{look}">{mark} {exercise} {word}</span>'


def right(note: str = "") -> Verdict:
    """Return the verdict on a right answer, worth one point. `note` is added to the message."""
    return Verdict(True, f"Right. {note}".strip(), points=1.0)


def not_yet(message: str) -> Verdict:
    """Return the verdict on a wrong answer. `message` says what is wrong."""
    return Verdict(False, f"Not yet: {message}")


def wrong_type(returned: Any, expected: str, hint: str = "") -> Verdict:
    """Return the verdict on a function that returned a value of a wrong type.

    `wrong_type("a list", "a tensor", "Use torch.tensor.")` is an example.

    Args:
        returned: the value that the function returned, in words, usually its type.
        expected: the expected value, in words.
        hint: a sentence that is added to the message.
    """
    return not_yet(f"your function returned {returned}, not {expected}. {hint}".rstrip())


def not_attempted() -> Verdict:
    """Return the verdict on an exercise whose cell was not changed yet."""
    return Verdict(False, "not attempted")


@dataclass(frozen=True)
class Check:
    """The check of one exercise.

    Attributes:
        number: the number of the exercise, such as "01.2".
        draw: a function that makes the inputs of one try from a random generator.
        observe: a function of the answer and the inputs. It runs the answer and returns what the
            answer did. An exception in it counts as an exception of the answer.
        judge: a function of the observation and the inputs that returns the verdict. If there is
            an `expect`, its result is the last argument. It has no side effects.
        expect: a function of the inputs that computes what the judge compares the observation with.
            It runs in the judge's process, where the answer cannot find its result. It needs no
            GPU.
        gpus: the number of GPUs that the check needs.
        script: the function that is in the exercise's cell, if the exercise is to fix a function.
        alters: what the answer may change in its arguments: "values" of tensors, lists and
            parameters, or "hooks" of a model.
        children: whether `observe` starts child processes. Their server then starts before the
            answer's time begins.
        section: the heading of the section in the lesson that explains what the exercise needs. The
            message names it after three wrong tries.
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
    """Draw inputs, observe the answer and return the verdict, all in this process.

    With the same `seed`, the inputs are the same. Without a seed, each call has other inputs.
    """
    inputs = drawn(check, seed)
    return judge(check, observe(check, answer, inputs), inputs)


def drawn(check: Check, seed: int | None = None) -> Plain:
    """Return the inputs of one try. They depend on `seed`, and differ in each call without one."""
    return check.draw(random.Random(seed))


_KEPT = (
    "labkit.use cannot change the GPUs while labkit.check runs your answer. Remove the call: the "
    "lesson's first cell has chosen the GPUs."
)
LOST = (
    "After this error the GPU takes no more work. Call labkit.use(None) and run the lesson's first "
    "cell again. On a real GPU, restart the kernel first"
)


def observe(check: Check, answer: Any, inputs: Plain) -> Plain:
    """Run the answer with the inputs, and return what it did as a dictionary.

    The dictionary is one of these:

    - `{"observed": ..., "left": ...}` has what the check's `observe` returned. "left" is a sentence
      about something that the answer changed and should not have changed, "" if there is none.
    - `{"raised": ...}` has the exception of the answer as text.
    - `{"attempted": False}` means that the exercise's cell is still as it came.

    PyTorch has its default settings while the answer runs. Values are computed, also on virtual
    GPUs with `values=False`. Afterwards the current device, the current streams and the memory in
    use are as before.

    Raises RuntimeError if too few GPUs are in use.
    """
    _require_gpus(check)
    if is_stub(answer, check.script):
        return {"attempted": False}
    if inspect.iscoroutinefunction(answer):
        return {
            "raised": "nothing, but it did not run either. A function with `async def` returns a "
            "coroutine, which must be awaited. Write `def` instead."
        }
    used = machine.in_use()
    try:
        with used.kept(_KEPT), used.with_values(), undisturbed(), defaults():
            try:
                if not callable(answer):
                    return {"observed": check.observe(answer, inputs), "left": ""}
                followed = Followed(answer, check.alters)
                observed = check.observe(followed, inputs)
                return {"observed": observed, "left": next(iter(followed.left), "")}
            except (Exception, SystemExit) as error:
                return {"raised": quote(error, answer)}
    except RuntimeError as error:  # the GPUs cannot be restored, because they no longer work
        return {"raised": f"{quote(error)}. {LOST}"}


def judge(check: Check, observation: Plain, inputs: Plain) -> Verdict:
    """Return the verdict on what `observe` returned. None of the learner's code runs."""
    if "observed" in observation:
        arguments = [observation["observed"], inputs]
        if check.expect:
            arguments.append(check.expect(inputs))
        verdict = check.judge(*arguments)
        if verdict.passed and observation["left"]:
            verdict = not_yet(observation["left"])
    elif "raised" in observation:
        verdict = not_yet(f"your answer raised {observation['raised']}")
    else:
        verdict = not_attempted()
    return replace(verdict, exercise=check.number)


def _require_gpus(check: Check) -> None:
    """Raise RuntimeError if there are fewer GPUs in use than the check needs."""
    used = machine.current()
    available = 0
    if used is not None:
        available = used.count
    if used is None or available < check.gpus:
        raise RuntimeError(
            f"the check of {check.number} needs {check.gpus} GPU(s), and {available} are in use. "
            "Run the lesson's first cell, which calls labkit.use."
        )


# The bytecode of a function whose body is `...`, `pass` or a docstring, in Python 3.11 to 3.14.
_EMPTY = {"RESUME", "NOP", "LOAD_CONST", "RETURN_CONST", "RETURN_VALUE"}


def is_stub(answer: Any, script: Callable[..., Any] | None = None) -> bool:
    """Return whether the answer is still as it came in the exercise's cell.

    The cell has None, `...`, a function that does nothing, or the `script` that is to be fixed.
    """
    if not isinstance(answer, types.FunctionType):
        return answer is None or answer is ...
    if script is not None and _content(answer) == _content(_alone(script)):
        return True
    for instruction in dis.get_instructions(answer):
        if instruction.opname not in _EMPTY:
            return False
        is_constant = instruction.opname in ("LOAD_CONST", "RETURN_CONST")
        if is_constant and instruction.argval is not None:
            return False
    return True


def _alone(function: Any) -> Any:
    """Return a function compiled outside its module, as it would be in an exercise's cell.

    An import beside a function would change the function's bytecode.
    """
    names = dict(function.__globals__)
    exec(inspect.getsource(function), names)
    return names[function.__name__]


def _content(function: Any) -> tuple:
    """Return a function's code and defaults in a form that can be compared.

    Comments and line breaks do not matter.
    """
    return _code(function.__code__), function.__defaults__, function.__kwdefaults__


def _code(code: types.CodeType) -> tuple:
    """Return the parts of a code object that matter for comparisons.

    The file, the name and the line numbers are left out.
    """
    constants: list[Any] = []
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            constant = _code(constant)
        constants.append(constant)
    return (
        code.co_code,
        code.co_exceptiontable,
        tuple(constants),
        code.co_names,
        code.co_varnames,
        code.co_freevars,
        code.co_cellvars,
    )


@contextmanager
def during(what: str) -> Iterator[None]:
    """Add a note about the answer's arguments to an exception that is raised in the block.

    `with during("a tensor on cuda:1"):` is an example. The message of the check quotes the note.
    """
    try:
        yield
    except Exception as error:
        error.add_note(what)
        raise


def quote(error: BaseException, answer: Any = None) -> str:
    """Return a text about an exception.

    It has the exception's class and message, the note of `during`, and the line of `answer` that
    raised it.
    """
    text = ": ".join(part for part in (type(error).__name__, _gist(str(error))) if part)
    notes = getattr(error, "__notes__", [])
    asides = [f"given {note}" for note in notes[-1:]] + own_line(error, answer)
    if not asides:
        return text
    return f"{text} ({'; '.join(asides)})"


def _gist(message: str) -> str:
    """Return the most important lines of an error message: the first, and the one with the cause.

    The second is the next line if the first ends with a colon, and the last line if the message
    quotes the traceback of a replica.
    """
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    told = lines[:1]
    if any(line.endswith("Traceback (most recent call last):") for line in lines):
        told.append(lines[-1])
    elif len(lines) > 1 and lines[0].endswith(":"):
        told.append(lines[1])
    gist = " ".join(told)
    if len(gist) > LONGEST_MESSAGE:
        gist = gist[: LONGEST_MESSAGE - 1] + "…"
    return gist


def own_line(error: BaseException, answer: Any) -> list[str]:
    """Return the line of `answer` that raised the error, as a list with one text.

    The list is empty if the line is unknown.
    """
    if not callable(answer):
        return []
    code = getattr(inspect.unwrap(answer), "__code__", None)
    if code is None:
        return []
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == code.co_filename]
    if not own:
        return []
    return [f"line {own[-1].lineno}: {own[-1].line}".removesuffix(": ")]


def describe(value: Any) -> Plain:
    """Return a tensor as plain data, or only the name of the type for any other value.

    `describe(torch.ones(2))` returns `{"type": "Tensor", "device": "cpu", "dtype": "torch.float32",
    "shape": [2], "values": [1.0, 1.0]}`. `values` is always one flat list.
    """
    name = type(value).__name__
    if not _is_trusted_tensor(value):
        if name == "Tensor":
            name = "a Tensor of its own"
        return {"type": name}
    return {
        "type": "Tensor",
        "device": str(value.device),
        "dtype": str(value.dtype),
        "shape": list(value.shape),
        "values": value.detach().cpu().flatten().tolist(),
    }


def _is_trusted_tensor(value: Any) -> bool:
    """Return whether the value is a tensor whose class the notebook did not define.

    A class of the notebook could report a wrong device, shape or value.
    """
    return isinstance(value, torch.Tensor) and type(value).__module__ != "__main__"


def plural(count: int, noun: str) -> str:
    """Return the count and the noun, such as "1 row" or "3 rows"."""
    if count == 1:
        return f"1 {noun}"
    return f"{count} {noun}s"


def one_number(value: Any) -> int | float | None:
    """Return a number as `number` does, and also accept a tensor with a single element."""
    if not _is_trusted_tensor(value):
        return number(value)
    return number(value.item()) if value.dim() == 0 else None


def number_or_type(value: Any) -> int | float | str:
    """Return a number as `number` does, or the name of the value's type if it is not a number."""
    found = number(value)
    if found is None:
        return type(value).__name__
    return found


def number(value: Any) -> int | float | None:
    """Return the value as an int or float, or None if it is not a number.

    Numbers of NumPy and decimals are numbers. Truth values, texts and tensors are not.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real | Decimal):
        return None
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value)
