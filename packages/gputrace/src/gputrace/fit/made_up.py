"""Made-up values for scripts that read values which nothing computed, and advice about this.

An attempt keeps shapes and memory, and computes nothing. A script that reads a value gets a
made-up one. The page names the lines that read integers or truth values. Lines that read
floating-point numbers, such as losses, are not named.
"""

import ast
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from virtualgpu.source_lines import is_users

MOST = 10_000  # values read in one step from which a script seems to wait for another value
LINES = 20  # lines that are kept
NUMBER = 0.5  # scripts stop at NaN, and cannot divide by 0 or take its logarithm


class MadeUp:
    """Function that makes up values. It notes the lines that read them.

    Args:
        end: called when a script reads so many values in one step that it must be waiting for a
            value that never comes.

    Attributes:
        lines: the lines that read integers or truth values, each once.
        last: the last line that was noted.
        is_in_vain: whether `end` was called.
    """

    def __init__(self, end: Callable[[], None]) -> None:
        self.lines: list[str] = []
        self.last = ""
        self.is_in_vain = False
        self._end = end
        self._reads = 0  # the number of reads in this step

    def __call__(self, dtype: torch.dtype) -> bool | int | float:
        """Return a made-up value of this type."""
        self._reads += 1
        in_vain = self._reads > MOST
        # Most scripts print losses. Only whole numbers and truth values decide what they do next.
        if in_vain or not (dtype.is_floating_point or dtype.is_complex):
            self.last = where(traceback.extract_stack())
            if self.last and self.last not in self.lines and len(self.lines) < LINES:
                self.lines.append(self.last)
        if in_vain:
            self.is_in_vain = True
            self._end()
        if dtype.is_floating_point or dtype.is_complex:
            return NUMBER
        if dtype is torch.bool:
            return _is_asserted(self.last.partition(" ")[2])
        return 0

    def begin_step(self) -> None:
        """Begin to count the reads of another step."""
        self._reads = 0


def _is_asserted(line: str) -> bool:
    """Return whether a line of code is an `assert` that succeeds if the value is true."""
    try:
        statements = ast.parse(line).body
    except SyntaxError:  # the line is a part of a statement
        return False
    if not statements or not isinstance(statements[0], ast.Assert):
        return False
    test = statements[0].test
    return not (isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not))


def where(calls: traceback.StackSummary) -> str:
    """Return the innermost line of the user's code, such as "train.py:12 loss.item()", or ""."""
    users = [call for call in calls if is_users(call.filename)]
    if not users:
        return ""
    return f"{Path(users[-1].filename).name}:{users[-1].lineno} {users[-1].line}"


def one_line(error: BaseException) -> str:
    """Return an exception in one line. A long message is reduced to its first and last lines."""
    lines = "".join(traceback.format_exception_only(error)).strip().splitlines()
    return " … ".join(dict.fromkeys((lines[0], lines[-1])))


def told(error: BaseException) -> str:
    """Return an exception in one line, preceded by the innermost line of the user's code."""
    line = where(traceback.extract_tb(error.__traceback__))
    if not line:
        return one_line(error)
    return f"{line}: {one_line(error)}"


# Advice by the code that a line has.
ADVICE = {
    "repeat_interleave(": "Pass output_size= to repeat_interleave.",
    "one_hot(": "Pass num_classes= to one_hot.",
    "bincount(": "Count on the CPU: pass a CPU tensor to bincount.",
    "histc(": "Pass min= and max= to histc.",
    "assert ": "Set the environment variable PYTHONOPTIMIZE=1, and Python leaves out each assert.",
}
IN_VAIN = "Limit the loop by a number of iterations."
OTHERWISE = (
    "Pass a number that is not a result of the GPU: a constant, an argument, or a number of a "
    "CPU tensor."
)


def advice_for(error: BaseException | None, *lines: str) -> str:
    """Return advice on rewriting the lines of a script that need a value.

    `error` is the exception that a made-up value caused, or None.
    """
    for call, advice in ADVICE.items():
        if any(call in line for line in lines) or call in str(error or ""):
            return advice
    return OTHERWISE
