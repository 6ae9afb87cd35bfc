"""Controls: for each exercise an answer that is known to be wrong, and what its check says of it.

The grader tries the control in the process of each submission. If the control looks right there, or wrong in another way, then the notebook
has changed what answers are measured with. Only a measurement of memory, order, time or values can show what is wrong with a control.

The controls of a lesson are in its wrong_answers.txt. A line names the exercise, the fault and, after =>, a regular expression that matches
the check's message. The answer's source is below that line, indented.
"""

import re
import textwrap

from labkit import courses

NAME = "wrong_answers.txt"
Control = tuple[str, str]


def control(number: str) -> Control:
    """The pattern and the source of an exercise's control. Raises ValueError when it has none: its lab cannot be graded safely."""
    for path in courses.files(NAME):
        for exercise, _, pattern, source in wrong_answers(path.read_text(encoding="utf-8")):
            if exercise == number:
                return pattern, source
    raise ValueError(f"exercise {number} has no control in the {NAME} of its lesson: write one before it is graded")


def wrong_answers(text: str) -> list[tuple[str, str, str, str]]:
    """Of each answer in a text such as wrong_answers.txt the exercise, what is wrong, the pattern and the source."""
    found = re.findall(r"^(\d\d\.\d+) (.*?) => (.*)\n((?:(?: .*)?\n)+)", text, flags=re.MULTILINE)
    return [(number, name, pattern, "\n" + textwrap.dedent(source).strip("\n") + "\n") for number, name, pattern, source in found]
