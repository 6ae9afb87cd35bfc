"""The contents of the course: all lessons with what a learner has done, as a table and as the notebook that JupyterLab opens first.

Everything in it is read from the lessons' own text and from what the learner's folder keeps.
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

Begin with [0 Start here]({first}), or choose a lesson. What you have done so far stands below. It is kept in `{kept}`, in this folder, and
is never sent anywhere. The table is as of the last start: run its cell (click into it and press Shift + Enter) to bring it up to date.

[Lesson 0]({first}) ends with a panel that shows the memory of the GPUs in use, real or virtual, while your cells run.
Put it into a cell of any lesson. The [glossary]({glossary}) explains the words."""
CODE = "import labkit\n\nlabkit.lessons()"
HEADINGS = ("lesson", "exercises right", "second look", "predictions made")


@dataclass(frozen=True)
class Lesson:
    """What a lesson's notebook says of it: its file, title, exercises, and the labs that take a prediction."""

    file: str
    title: str
    exercises: tuple[str, ...]
    labs: tuple[str, ...]


def read(path: Path) -> Lesson:
    """The lesson in a notebook. Raises ValueError where the file is none."""
    try:
        sources = ["".join(cell["source"]) for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]]
        title = next((source.splitlines()[0] for source in sources if source), path.stem).removeprefix("# ")
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is no notebook: {error!r}") from error
    text = "\n".join(sources)
    made = r"\b(?:labs\.(?=\w+(?:Lab|Panel)\()|labs import (?=\w+Lab\b)|labkit\.Lab\(\s*)(\w+)"
    labs = dict.fromkeys(re.findall(made, text))
    return Lesson(path.name, title, tuple(re.findall(r'^labkit\.check\("(.+?)"', text, re.MULTILINE)), tuple(labs))


class Lessons:
    """All lessons, and how far each is. A notebook shows a table with links."""

    def __init__(self, lessons: list[Lesson], tries: dict[str, list[bool]]) -> None:
        self.lessons = lessons
        self.rows = [self._row(lesson, tries) for lesson in lessons]

    @staticmethod
    def _row(lesson: Lesson, tries: dict[str, list[bool]]) -> tuple[str, str, str, str]:
        """Its cells: a second look needs what was tried and never right."""
        right = sum(any(tries.get(number, [])) for number in lesson.exercises)
        again = [number for number in lesson.exercises if tries.get(number) and not any(tries[number])]
        made = sum(len(tries.get(lab, [])) for lab in lesson.labs)
        return lesson.title, f"{right} of {len(lesson.exercises)}", ", ".join(again), str(made) if lesson.labs else "no lab asks"

    def __repr__(self) -> str:
        return "\n".join(aligned([HEADINGS, *self.rows]))

    def _repr_html_(self) -> str:
        head = "".join(f'<th scope="col" style="text-align: left">{name}</th>' for name in HEADINGS)
        body = "".join(
            f'<tr><td style="text-align: left"><a href="{escape(lesson.file)}">{escape(row[0])}</a></td>'
            + "".join(f'<td style="text-align: left">{escape(cell)}</td>' for cell in row[1:])
            + "</tr>"
            for lesson, row in zip(self.lessons, self.rows, strict=True)
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def index(table: Lessons) -> dict[str, Any]:
    """The notebook with the table, which a reader sees before anything runs."""
    output = {"text/html": table._repr_html_(), "text/plain": repr(table)}
    text = TEXT.format(first=table.lessons[0].file, kept=progress_file.NAME, glossary=glossary.NAME)
    shown = {"output_type": "execute_result", "execution_count": None, "metadata": {}, "data": output}
    return {
        "cells": [
            {"cell_type": "markdown", "id": "title", "metadata": {}, "source": text},
            {"cell_type": "code", "id": "lessons", "metadata": {}, "execution_count": None, "source": CODE, "outputs": [shown]},
        ],
        "metadata": {},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def way(lessons: list[Lesson], place: int) -> str:
    """Links from a lesson to the one before, to the contents, and to the one after."""
    links = [f"[all lessons]({INDEX})"]
    if place > 0:
        links.insert(0, f"[← {lessons[place - 1].title}]({lessons[place - 1].file})")
    if place + 1 < len(lessons):
        links.append(f"[{lessons[place + 1].title} →]({lessons[place + 1].file})")
    return " · ".join(links)
