"""The contents of the course: a table of all lessons and of what a learner has done in each.

JupyterLab opens a notebook with this table first. The table is made from the text of the lessons
and from the progress that is stored in the learner's folder.
"""

import json
import re
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from gputrace.tables import aligned
from labkit import glossary, progress_file

INDEX = "index.ipynb"
TEXT = """# The lessons

Begin with [0 Start here]({first}), or choose a lesson. The table below shows what you have done so
far. Your progress is stored in `{kept}` in this folder, and is never sent anywhere. The table was
made at the last start. To update it, click into its cell and press Shift + Enter.

[Lesson 0]({first}) ends with a panel that shows the memory of the GPUs in use, real or virtual,
while your cells run. You can put the panel into a cell of any lesson. The [glossary]({glossary})
explains the words."""
CODE = "import labkit\n\nlabkit.lessons()"
HEADINGS = ("lesson", "exercises right", "second look", "predictions made")


@dataclass(frozen=True)
class Lesson:
    """A lesson, as described by the text of its notebook.

    Attributes:
        file: the name of the notebook.
        title: the title, such as "1 Pinned memory".
        exercises: the numbers of the exercises, such as "01.2".
        labs: the names of the labs that ask for a prediction.
    """

    file: str
    title: str
    exercises: tuple[str, ...]
    labs: tuple[str, ...]


def read(path: Path) -> Lesson:
    """Return the lesson in a notebook. Raises ValueError if the file is not a notebook."""
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        sources = ["".join(cell["source"]) for cell in cells]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a notebook: {error!r}") from error
    text = "\n".join(sources)
    first_line = text.lstrip("\n").partition("\n")[0]
    title = (first_line or path.stem).removeprefix("# ")
    made = r"\b(?:labs\.(?=\w+(?:Lab|Panel)\()|labs import (?=\w+Lab\b)|labkit\.Lab\(\s*)(\w+)"
    labs = dict.fromkeys(re.findall(made, text))
    exercises = re.findall(r'^labkit\.check\("(.+?)"', text, re.MULTILINE)
    return Lesson(path.name, title, tuple(exercises), tuple(labs))


class Lessons:
    """A table of all lessons and of the learner's progress. A notebook shows it with links.

    Attributes:
        lessons: the lessons, in reading order.
        rows: the texts of the table's cells for each lesson.
    """

    def __init__(self, lessons: list[Lesson], tries: dict[str, list[bool]]) -> None:
        """Make the table. `tries` has a true or false for each try at an exercise or lab."""
        self.lessons = lessons
        self.rows = [self._row(lesson, tries) for lesson in lessons]

    @staticmethod
    def _row(lesson: Lesson, tries: dict[str, list[bool]]) -> tuple[str, str, str, str]:
        """Return the texts of a lesson's row.

        Exercises that were tried and were never right need a second look.
        """
        right = 0
        again = []
        for number in lesson.exercises:
            tried = tries.get(number, [])
            if any(tried):
                right += 1
            elif tried:
                again.append(number)
        predictions = "no lab asks"
        if lesson.labs:
            predictions = str(sum(len(tries.get(lab, [])) for lab in lesson.labs))
        return lesson.title, f"{right} of {len(lesson.exercises)}", ", ".join(again), predictions

    def __repr__(self) -> str:
        return "\n".join(aligned([HEADINGS, *self.rows]))

    def _repr_html_(self) -> str:
        left = 'style="text-align: left"'
        head = "".join(f'<th scope="col" {left}>{name}</th>' for name in HEADINGS)
        body = ""
        for lesson, (title, *others) in zip(self.lessons, self.rows, strict=True):
            body += f'<tr><td {left}><a href="{escape(lesson.file)}">{escape(title)}</a></td>'
            body += "".join(f"<td {left}>{escape(cell)}</td>" for cell in others)
            body += "</tr>"
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def index(table: Lessons) -> dict[str, Any]:
    """Return the notebook with the table. The table is visible before any cell runs."""
    output = {"text/html": table._repr_html_(), "text/plain": repr(table)}
    text = TEXT.format(first=table.lessons[0].file, kept=progress_file.NAME, glossary=glossary.NAME)
    shown = {
        "output_type": "execute_result",
        "execution_count": None,
        "metadata": {},
        "data": output,
    }
    title = {"cell_type": "markdown", "id": "title", "metadata": {}, "source": text}
    lessons: dict[str, Any] = {
        "cell_type": "code",
        "id": "lessons",
        "metadata": {},
        "execution_count": None,
        "source": CODE,
        "outputs": [shown],
    }
    return {"cells": [title, lessons], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}


def way(lessons: list[Lesson], place: int) -> str:
    """Return links from a lesson to the previous one, to the contents, and to the next one.

    `place` is the index of the lesson in the list.
    """
    links = [f"[all lessons]({INDEX})"]
    if place > 0:
        links.insert(0, f"[← {lessons[place - 1].title}]({lessons[place - 1].file})")
    if place + 1 < len(lessons):
        links.append(f"[{lessons[place + 1].title} →]({lessons[place + 1].file})")
    return " · ".join(links)
