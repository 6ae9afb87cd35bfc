"""The tries at each exercise.

The message after each further wrong try helps more. `labkit.progress()` shows the number of tries.
"""

import json
import re
from dataclasses import replace
from html import escape

from labkit import progress_file
from labkit.checks.checking import Check, Plain, Verdict, marked
from labkit.progress_file import tries

LONGEST = 300  # inputs with more characters are not shown
SOLUTION = "Still stuck? In the lesson, the solution is folded away below this check."


class Progress:
    """Which exercises are right, and after how many tries. A notebook shows marks and colours.

    Attributes:
        numbers: the numbers of the exercises, such as "01.2".
        right: those of the exercises that were right at least once.
    """

    def __init__(self, numbers: list[str]) -> None:
        """Read the stored tries, and note which of these exercises were right at least once."""
        progress_file.read()
        self.right = [number for number in numbers if any(tries.get(number, []))]
        self.numbers = numbers

    def __repr__(self) -> str:
        if not self.numbers:
            return (
                "Nothing has been checked yet. "
                'labkit.progress("01") lists the exercises of a lesson.'
            )
        lines = []
        for lesson in sorted({number[:2] for number in self.numbers}):
            own = [number for number in self.numbers if number.startswith(lesson)]
            right = sum(number in self.right for number in own)
            lines.append(f"Lesson {lesson}: {right} of {len(own)} right")
            lines += [f"  {number} {_state(tries.get(number, []))}" for number in own]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        shown = []
        for line in repr(self).splitlines():
            row = re.match(r"  (\S+) (right|not yet|not attempted)(.*)", line)
            if row is None:
                shown.append(f"<p><b>{escape(line)}</b></p>")
            else:
                shown.append(f"<div>{marked(row[2], row[1])}{escape(row[3])}</div>")
        return "".join(shown)


def _state(tried: list[bool]) -> str:
    """Describe the tries at an exercise in words, such as "right, at try 2".

    `tried` says for each try whether it was right.
    """
    if not tried:
        return "not attempted"
    if True not in tried:
        return f"not yet, {len(tried)} {'try' if len(tried) == 1 else 'tries'}"
    return f"right, at try {tried.index(True) + 1}"


def note(check: Check, verdict: Verdict, inputs: Plain) -> Verdict:
    """Record a try, and return the verdict with more help if the last tries failed, too.

    After the second wrong try in a row, the message also shows the inputs. After the third, it
    names the section of the lesson that explains the exercise. After the fourth, it says where the
    solution is.
    """
    if verdict.message == "not attempted":
        return verdict
    progress_file.add(check.number, verdict.passed)
    if verdict.passed:
        return verdict
    failed = _failed_since_right(tries[check.number])
    more = []
    if failed >= 2:
        shown_inputs = json.dumps(inputs, ensure_ascii=False)
        if len(shown_inputs) <= LONGEST:
            more.append(f"Your answer was tried with {shown_inputs}.")
    if failed >= 3 and check.section:
        more.append(f"The lesson explains what you need in its section “{check.section}”.")
    if failed >= 4:
        more.append(SOLUTION)
    return replace(verdict, message="\n".join([verdict.message, *more]))


def _failed_since_right(tried: list[bool]) -> int:
    """Return the number of wrong tries since the last right one."""
    failed = 0
    for passed in reversed(tried):
        if passed:
            break
        failed += 1
    return failed


def tried() -> set[str]:
    """Return the numbers of the lessons with an exercise that was tried, such as "01"."""
    progress_file.read()
    return {number[:2] for number, tried in tries.items() if tried and number[:2].isdigit()}
