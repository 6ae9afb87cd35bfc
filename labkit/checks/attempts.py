"""What has been tried: for help that grows with each try, and for `labkit.progress()`.

In a notebook it outlives the kernel, in `.labkit/progress.json` beside the notebook: of each exercise, whether each try passed.
LABKIT_PROGRESS names another file; where that is empty, and outside notebooks, nothing is stored.
"""

import json
import os
import re
import warnings
from collections import defaultdict
from dataclasses import replace
from html import escape
from pathlib import Path

from labkit import cells
from labkit.checks.checking import Check, Plain, Verdict, marked

LONGEST = 300  # characters of inputs that a message shows
SOLUTION = "Still stuck? In the lesson, the solution is folded away below this check."

FILE = Path.cwd() / ".labkit" / "progress.json"  # before a lesson changes its folder

_tries: dict[str, list[bool]] = defaultdict(list)  # since this kernel started, and all that was stored


def _file() -> Path | None:
    named = os.environ.get("LABKIT_PROGRESS")
    return (Path(named) if named else None) if named is not None else FILE if cells.in_notebook() else None


def _read() -> None:
    """Take over what is stored: another notebook may have added to it."""
    file = _file()
    if file is None or not file.exists():
        return
    try:
        stored = {number: list(map(bool, tries)) for number, tries in json.loads(file.read_text(encoding="utf-8")).items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        warnings.warn(f"your progress cannot be read, and begins anew: {file}: {error}", stacklevel=4)
    else:
        _tries.update(stored)


def _write() -> None:
    """Whole or not at all: a kernel may be killed at any time."""
    if (file := _file()) is None:
        return
    try:
        file.parent.mkdir(exist_ok=True)
        draft = file.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(dict(sorted(_tries.items())), indent=1) + "\n", encoding="utf-8")
        draft.replace(file)
    except OSError as error:
        warnings.warn(f"your progress is kept in this kernel only: {error}", stacklevel=4)


class Progress:
    """How far the exercises of some lessons are. A notebook shows it with marks and colours."""

    def __init__(self, numbers: list[str]) -> None:
        _read()
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

    def _repr_html_(self) -> str:
        rows = (re.match(r"  (\S+) (right|not yet|not attempted)(.*)", line) for line in repr(self).splitlines())
        shown = (
            f"<div>{marked(row[2], row[1])}{escape(row[3])}</div>" if row else f"<p><b>{escape(line)}</b></p>"
            for row, line in zip(rows, repr(self).splitlines(), strict=True)
        )
        return "".join(shown)


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
    _read()
    tries = _tries[check.number]
    tries.append(verdict.passed)
    _write()
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
    _read()
    return {number[:2] for number, tries in _tries.items() if tries}
