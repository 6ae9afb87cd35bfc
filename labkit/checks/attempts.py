"""What has been tried: for help that grows with each try, and for `labkit.progress()`."""

import json
import re
from dataclasses import replace
from html import escape

from labkit import progress_file
from labkit.checks.checking import Check, Plain, Verdict, marked
from labkit.progress_file import tries

LONGEST = 300  # characters of inputs that a message shows
SOLUTION = "Still stuck? In the lesson, the solution is folded away below this check."


class Progress:
    """How far the exercises of some lessons are. A notebook shows it with marks and colours."""

    def __init__(self, numbers: list[str]) -> None:
        progress_file.read()
        self.right = [number for number in numbers if any(tries.get(number, []))]
        self.numbers = numbers

    def __repr__(self) -> str:
        if not self.numbers:
            return 'Nothing has been checked yet. labkit.progress("01") lists the exercises of a lesson.'
        lines = []
        for lesson in sorted({number[:2] for number in self.numbers}):
            own = [number for number in self.numbers if number.startswith(lesson)]
            lines.append(f"Lesson {lesson}: {sum(number in self.right for number in own)} of {len(own)} right")
            lines += [f"  {number} {_state(tries.get(number, []))}" for number in own]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = (re.match(r"  (\S+) (right|not yet|not attempted)(.*)", line) for line in repr(self).splitlines())
        shown = (
            f"<div>{marked(row[2], row[1])}{escape(row[3])}</div>" if row else f"<p><b>{escape(line)}</b></p>"
            for row, line in zip(rows, repr(self).splitlines(), strict=True)
        )
        return "".join(shown)


def _state(tried: list[bool]) -> str:
    if not tried:
        return "not attempted"
    if True not in tried:
        return f"not yet, {len(tried)} {'try' if len(tried) == 1 else 'tries'}"
    return f"right, at try {tried.index(True) + 1}"


def note(check: Check, verdict: Verdict, inputs: Plain) -> Verdict:
    """Count a try. The second one that fails is told its inputs as well, the third where to read, and the fourth where the solution is."""
    if verdict.message == "not attempted":
        return verdict
    progress_file.add(check.number, verdict.passed)
    if verdict.passed:
        return verdict
    own = tries[check.number]
    failed = own[::-1].index(True) if True in own else len(own)
    more = []
    if failed >= 2 and len(told := json.dumps(inputs, ensure_ascii=False)) <= LONGEST:
        more.append(f"It was tried with {told}.")
    if failed >= 3 and check.section:
        more.append(f"The lesson explains what you need in its section “{check.section}”.")
    if failed >= 4:
        more.append(SOLUTION)
    return replace(verdict, message="\n".join([verdict.message, *more]))


def tried() -> set[str]:
    """The lessons of which an exercise was tried."""
    progress_file.read()
    return {number[:2] for number, tried in tries.items() if tried and number[:2].isdigit()}
