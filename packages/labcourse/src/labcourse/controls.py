"""Controls: for each exercise, an answer that is known to be wrong, and the check's message to it.

The grader tries the control in the process of each submission. If the control looks right there, or
wrong in an unexpected way, the notebook has changed the code that measures answers. The fault of a
control shows only in a measurement of memory, order, time or values.

The controls of a lesson are in its wrong_answers.txt. A line names the exercise, the fault and,
after =>, a regular expression that matches the check's message. The indented lines below it are the
source of the answer.
"""

import re
import textwrap

from labkit import courses

NAME = "wrong_answers.txt"
Control = tuple[str, str]  # the regular expression and the source


def control(number: str) -> Control:
    """Return the control of an exercise: an answer that is known to be wrong.

    It is the regular expression for the check's message, and the source of the answer.

    Raises:
        ValueError: the exercise has no control, so its lab cannot be graded safely.
    """
    for path in courses.files(NAME):
        for exercise, _, pattern, source in wrong_answers(path.read_text(encoding="utf-8")):
            if exercise == number:
                return pattern, source
    cure = "Write one before the exercise is graded"
    raise ValueError(f"exercise {number} has no control in the {NAME} of its lesson. {cure}")


def wrong_answers(text: str) -> list[tuple[str, str, str, str]]:
    """Parse the text of a wrong_answers.txt.

    Each answer is (exercise, fault, regular expression, source).
    """
    found = re.findall(r"^(\d\d\.\d+) (.*?) => (.*)\n((?:(?: .*)?\n)+)", text, flags=re.MULTILINE)
    answers = []
    for number, fault, pattern, source in found:
        plain = textwrap.dedent(source).strip("\n")
        answers.append((number, fault, pattern, f"\n{plain}\n"))
    return answers
