"""The contents of the course: a table of all lessons and of what a learner has done in each.

JupyterLab opens a notebook with this table first. The table is made from the text of the lessons
and from the progress that is stored in the learner's folder.
"""

import ast
import json
import re
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from gputrace.tables import aligned
from labkit import courses, glossary, progress_file, reading_time

INDEX = "index.ipynb"
TEXT = """# The lessons

Begin with [0 Start here]({first}), or choose a lesson. The minutes are for a reader who makes the
predictions and does the exercises. A long lesson has several sittings, with breaks between them.

The table shows what you had done at the last start. To update it, click into its cell and press
Shift + Enter. Your progress is stored in `{kept}` in this folder, and is never sent anywhere.

[Lesson 0]({first}) ends with a panel that shows the memory of the GPUs in use, real or virtual,
while your cells run. You can put the panel into a cell of any lesson. The [glossary]({glossary})
explains the words."""
CODE = "import labkit\n\nlabkit.lessons()"
HEADINGS = (
    "lesson",
    "what you learn",
    "minutes",
    "exercises right",
    "tried, not right yet",
    "predictions made",
)
CONTINUE = "← continue here"


@dataclass(frozen=True)
class Lesson:
    """A lesson, as described by the text of its notebook.

    Attributes:
        file: the name of the notebook.
        title: the title, such as "1 Pinned memory".
        learnt: one line on what a learner learns, "" if the course does not say it.
        minutes: how long each sitting takes, estimated to five minutes.
        exercises: the numbers of the exercises, such as "01.2".
        labs: the names of the labs that ask for a prediction.
    """

    file: str
    title: str
    learnt: str
    minutes: tuple[int, ...]
    exercises: tuple[str, ...]
    labs: tuple[str, ...]


def read(path: Path) -> Lesson:
    """Return the lesson in a notebook. Raises ValueError if the file is not a notebook."""
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        text = "\n".join(map(reading_time.text, cells))
        minutes = [_rounded(reading_time.minutes(part)) for part in reading_time.sittings(cells)]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a notebook: {error!r}") from error
    first_line = text.lstrip("\n").partition("\n")[0]
    title = (first_line or path.stem).removeprefix("# ")
    made = r"\b(?:labs\.(?=\w+(?:Lab|Panel)\()|labs import (?=\w+Lab\b)|labkit\.Lab\(\s*)(\w+)"
    labs = dict.fromkeys(re.findall(made, text))
    exercises = re.findall(r'^labkit\.check\("(.+?)"', text, re.MULTILINE)
    learnt = _learnt(path.stem)
    return Lesson(path.name, title, learnt, tuple(minutes), tuple(exercises), tuple(labs))


def _rounded(minutes: float) -> int:
    """Round a time to a multiple of five minutes, which is at least five."""
    return max(5, 5 * round(minutes / 5))


def _learnt(name: str) -> str:
    """Return what a notebook teaches: the docstring of its package, without its first line.

    The package of `03_data_parallel` is the course's `lesson_03`. Other notebooks have a package of
    their own name. Return "" if there is no such package, or if its docstring has one line.
    """
    folders = {number: folder for number, (_, folder) in courses.lessons().items()}
    if not folders:
        return ""
    folder = folders.get(name[:2]) or next(iter(folders.values())).parent / name
    file = folder / "__init__.py"
    if not file.exists():
        return ""
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return " ".join(docstring.partition("\n")[2].split())


class Lessons:
    """A table of all lessons and of the learner's progress. A notebook shows it with links.

    Attributes:
        lessons: the lessons, in reading order.
        next: the lesson to continue with, None if there is none.
        rows: the texts of the table's cells for each lesson.
    """

    def __init__(self, lessons: list[Lesson], tries: dict[str, list[bool]]) -> None:
        """Make the table. `tries` has a true or false for each try at an exercise or lab."""
        self.lessons = lessons
        self.next = _next(lessons, tries)
        self.rows = [self._row(lesson, tries) for lesson in lessons]

    def _row(self, lesson: Lesson, tries: dict[str, list[bool]]) -> tuple[str, ...]:
        """Return the texts of a lesson's row in the table.

        `tries` has a true or false for each try at an exercise or lab.
        """
        right = _right(lesson, tries)
        not_yet = [name for name in lesson.exercises if name not in right and tries.get(name)]
        predictions = "none to make"
        if lesson.labs:
            predictions = str(sum(len(tries.get(lab, [])) for lab in lesson.labs))
        exercises = "none"
        if lesson.exercises:
            exercises = f"{len(right)} of {len(lesson.exercises)}"
        return (
            lesson.title + f" {CONTINUE}" * (lesson is self.next),
            lesson.learnt,
            " + ".join(map(str, lesson.minutes)),
            exercises,
            ", ".join(not_yet),
            predictions,
        )

    def __repr__(self) -> str:
        return "\n".join(aligned([HEADINGS, *self.rows]))

    def _repr_html_(self) -> str:
        left = 'style="text-align: left"'
        head = "".join(f'<th scope="col" {left}>{name}</th>' for name in HEADINGS)
        body = ""
        for lesson, (_, *others) in zip(self.lessons, self.rows, strict=True):
            title = f'<a href="{escape(lesson.file)}">{escape(lesson.title)}</a>'
            if lesson is self.next:
                title += f" <strong>{CONTINUE}</strong>"
            texts = [title, *map(escape, others)]
            body += f"<tr>{''.join(f'<td {left}>{text}</td>' for text in texts)}</tr>"
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _right(lesson: Lesson, tries: dict[str, list[bool]]) -> list[str]:
    """Return the exercises of a lesson that were right at least once.

    `tries` has a true or false for each try at an exercise.
    """
    return [name for name in lesson.exercises if any(tries.get(name, []))]


def _next(lessons: list[Lesson], tries: dict[str, list[bool]]) -> Lesson | None:
    """Return the lesson to continue with: the last one begun, or the one after it if it is done.

    Return None if nothing was begun, or if the last lesson is done.
    """
    begun = [
        place
        for place, lesson in enumerate(lessons)
        if any(tries.get(name) for name in lesson.exercises + lesson.labs)
    ]
    if not begun:
        return None
    place = begun[-1]
    if len(_right(lessons[place], tries)) == len(lessons[place].exercises):
        place += 1
    return lessons[place] if place < len(lessons) else None


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

    `place` is the index of the lesson in the list `lessons`.
    """
    links = [f"[all lessons]({INDEX})"]
    if place > 0:
        links.insert(0, f"[← {lessons[place - 1].title}]({lessons[place - 1].file})")
    if place + 1 < len(lessons):
        links.append(f"[{lessons[place + 1].title} →]({lessons[place + 1].file})")
    return " · ".join(links)
