"""What has been tried since this kernel started: for help that grows with each try, and for `labkit.progress()`. It is stored nowhere."""

import json
from collections import defaultdict
from dataclasses import replace

from labkit.checks.checking import Check, Plain, Verdict

LONGEST = 300  # characters of inputs that a message shows
SOLUTION = "Still stuck? In the lesson, the solution is folded away below this check."

_tries: dict[str, list[bool]] = defaultdict(list)  # of each exercise, whether each try passed


class Progress:
    """How far the exercises of some lessons are. A notebook shows it as text."""

    def __init__(self, numbers: list[str]) -> None:
        self.right = [number for number in numbers if any(_tries.get(number, []))]
        self.numbers = numbers

    def __repr__(self) -> str:
        if not self.numbers:
            return 'Nothing has been checked yet. labkit.progress("01") lists the exercises of a lesson.'
        lines = []
        for lesson in sorted({number[:2] for number in self.numbers}):
            own = [number for number in self.numbers if number.startswith(lesson)]
            lines.append(f"Lesson {lesson}: {sum(number in self.right for number in own)} of {len(own)} right")
            lines += [f"  {number} {_state(_tries.get(number, []))}" for number in own]
        return "\n".join(lines)


def _state(tries: list[bool]) -> str:
    if not tries:
        return "not attempted"
    if True not in tries:
        return f"not yet, {len(tries)} {'try' if len(tries) == 1 else 'tries'}"
    return f"right, at try {tries.index(True) + 1}"


def note(check: Check, verdict: Verdict, inputs: Plain) -> Verdict:
    """Count a try. The second one that fails is told its inputs as well, the third where to read, and the fourth where the solution is."""
    if verdict.message == "not attempted":
        return verdict
    tries = _tries[check.number]
    tries.append(verdict.passed)
    if verdict.passed:
        return verdict
    failed = tries[::-1].index(True) if True in tries else len(tries)
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
    return {number[:2] for number, tries in _tries.items() if tries}
