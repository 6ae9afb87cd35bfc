"""A course as its instructor describes it: one small TOML file."""

import contextlib
import re
import secrets
import tomllib
from dataclasses import dataclass, field, fields
from datetime import UTC, date, datetime, time
from pathlib import Path
from typing import Any

import nbformat

from labcourse import reading
from labcourse.sandbox import Limits
from labkit import lesson_copies, machine

__all__ = ["Assignment", "Course", "Exercise", "Written", "read"]

CONTENTS = ("exercises", "lesson")
KEYS = {"course", "seed", "tries", "contents", "late_days", "late_penalty", "labs", "extensions", "limits", "notebooks"}
LAB_KEYS = {"due", "points", "written"}
WRITTEN_KEYS = {"id", "question", "points"}


@dataclass(frozen=True)
class Exercise:
    """An exercise that is marked: its number, the name of the answer, and what it is worth."""

    number: str
    name: str
    points: float = 1.0


@dataclass(frozen=True)
class Written:
    """A question that a person marks."""

    id: str
    question: str
    points: float = 1.0


@dataclass(frozen=True)
class Assignment:
    """A lesson's exercises as an assignment. `name` is that of its notebook's file, such as "02_streams"."""

    name: str
    title: str
    exercises: tuple[Exercise, ...]
    written: tuple[Written, ...] = ()
    due: datetime | None = None

    @property
    def points(self) -> float:
        """What all of it is worth."""
        tasks: tuple[Exercise | Written, ...] = (*self.exercises, *self.written)
        return sum(task.points for task in tasks)


@dataclass(frozen=True)
class Course:
    """All that releasing and grading need to know.

    Attributes:
        seed: where the hidden inputs come from: 32 hexadecimal digits, or more.
        tries: how often an exercise is tried, with other inputs each time.
        contents: "exercises", or "lesson" for notebooks with the whole lesson.
        late_days: whole days after the due date that cost nothing.
        late_penalty: the share of the points that each further day costs.
        extensions: other due dates, by (student, lab).
        notebooks: the folder with the lessons; those that come with the kit, unless the file names a folder of its own.
        folder: the folder of the course file, or None for a course that no file describes.
    """

    name: str
    seed: str
    labs: tuple[Assignment, ...]
    tries: int = 2
    contents: str = "exercises"
    late_days: int = 0
    late_penalty: float = 1.0
    extensions: dict[tuple[str, str], datetime] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    notebooks: Path = field(default_factory=lesson_copies.shipped)
    folder: Path | None = None

    def lab(self, name: str) -> Assignment:
        """The lab of that name, or of the lesson of that number. Raises ValueError, naming the choices."""
        for lab in self.labs:
            if name in (lab.name, lab.name[:2], lab.name[:2].lstrip("0")):
                return lab
        raise ValueError(f"there is no lab {name!r}; there are {', '.join(lab.name for lab in self.labs)}")

    def due(self, student: str, lab: Assignment) -> datetime | None:
        """When a student must have handed in a lab; None where no date is set."""
        return self.extensions.get((student, lab.name), lab.due)


def read(path: Path) -> Course:
    """The course in a TOML file.

    Raises:
        ValueError: something in it is wrong; the message says what, and what is allowed.
        OSError: it or a notebook cannot be read.
    """
    if not path.exists():
        raise ValueError(f"there is no file {path}: describe the course in one (docs/teaching.md shows how), or name it with --course")
    with path.open("rb") as file:
        try:
            content = tomllib.load(file)
        except ValueError as error:
            raise ValueError(f"{path.name}: {error}") from None
    _known(content, KEYS, path.name)
    own = _of_type(content, "notebooks", str, "")
    notebooks = (path.parent / own).resolve() if own else lesson_copies.shipped()
    if not notebooks.is_dir():
        raise ValueError(f"{path.name}: there is no folder {notebooks}. Without the line `notebooks`, the kit's own lessons are taken")
    labs = tuple(_lab(name, table, notebooks) for name, table in _table(content, "labs").items())
    if not labs:
        raise ValueError(f'{path.name}: no labs. Add a table for each, such as [labs."02_streams"]')
    course = Course(
        name=_of_type(content, "course", str, "PyTorch on GPUs"),
        seed=_seed(content.get("seed"), path),
        labs=labs,
        tries=_of_type(content, "tries", int, 2),
        contents=_of_type(content, "contents", str, "exercises"),
        late_days=_of_type(content, "late_days", int, 0),
        late_penalty=float(_of_type(content, "late_penalty", int | float, 1.0)),
        limits=_limits(_table(content, "limits")),
        notebooks=notebooks,
        folder=path.parent.resolve(),
    )
    if course.contents not in CONTENTS or course.tries < 1 or not 0 <= course.late_penalty <= 1 or course.late_days < 0:
        raise ValueError(
            f"{path.name}: contents is one of {', '.join(CONTENTS)}; tries 1 or more; late_days 0 or more; late_penalty from 0 to 1"
        )
    for student, extended in _table(content, "extensions").items():
        for name, moment in extended.items():
            course.extensions[student, course.lab(name).name] = _moment(moment, f"extensions.{student}.{name}")
    return course


def _known(table: dict[str, Any], keys: set[str], where: str) -> None:
    for key in table:
        if key not in keys:
            raise ValueError(f"{where}: {key!r} means nothing here; there are {', '.join(sorted(keys))}")


def _table(content: dict[str, Any], key: str) -> dict[str, Any]:
    table = content.get(key, {})
    if not isinstance(table, dict):
        raise ValueError(f"{key}: a table is due")
    return table


def _of_type(table: dict[str, Any], key: str, kind: Any, default: Any) -> Any:
    value = table.get(key, default)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{key} = {value!r}: this must be {getattr(kind, '__name__', 'a number')}")
    return value


def _moment(value: Any, where: str) -> datetime:
    """A due date; a day means its end, and no time zone means UTC."""
    if isinstance(value, date) and not isinstance(value, datetime):
        value = datetime.combine(value, time(23, 59, 59))
    if not isinstance(value, datetime):
        raise ValueError(f"{where} = {value!r}: write a date, such as 2027-01-31 or 2027-01-31T18:00:00+01:00")
    return value if value.tzinfo else value.replace(tzinfo=UTC)


def _seed(given: Any, path: Path) -> str:
    """128 bits: a shorter number is found by trying. Without one, it is drawn once and kept beside the course file."""
    if given is not None:
        if not isinstance(given, str) or not re.fullmatch(r"[0-9a-fA-F]{32,}", given):
            due = f'32 hexadecimal digits or more in quotes are due; this one was drawn now: seed = "{secrets.token_hex(16)}"'
            raise ValueError(f"{path.name}: seed = {given!r} can be found by trying. {due}. Without the line, one is drawn and kept")
        return given.lower()
    kept = path.with_suffix(".seed")
    if not kept.exists():
        with contextlib.suppress(OSError):
            kept.touch(0o600)
            kept.write_text(secrets.token_hex(16) + "\n")
    return _seed(kept.read_text().strip(), kept)


def _limits(table: dict[str, Any]) -> Limits:
    names = {item.name: item.type for item in fields(Limits)}
    _known(table, set(names), "limits")
    given: dict[str, Any] = {}
    for key, value in table.items():
        given[key] = machine.parse_bytes(value) if key in ("memory", "scratch", "output") else value
        if not isinstance(given[key], int | float) or given[key] <= 0:
            raise ValueError(f"limits.{key} = {value!r}: a positive number is due")
    return Limits(**given)


def _lab(name: str, table: dict[str, Any], notebooks: Path) -> Assignment:
    _known(table, LAB_KEYS, f"labs.{name}")
    files = sorted(notebooks.glob(f"{name}.ipynb" if "_" in name else f"{name}_*.ipynb"))
    if len(files) != 1:
        raise ValueError(f"labs.{name}: there is no such lesson in {notebooks}")
    notebook = nbformat.read(files[0], as_version=4)
    worth = _table(table, "points")
    exercises = []
    for cell in notebook.cells:
        number = reading.checked_number(cell.source) if cell.cell_type == "code" else None
        if number and (answer := reading.checked_name(cell.source)):
            exercises.append(Exercise(number, answer, float(worth.get(number, 1.0))))
    unknown = set(worth) - {exercise.number for exercise in exercises}
    if unknown:
        raise ValueError(f"labs.{name}.points: the lesson has no exercise {', '.join(sorted(unknown))}")
    title = next((line[2:] for cell in notebook.cells for line in cell.source.splitlines() if line.startswith("# ")), files[0].stem)
    due = _moment(table["due"], f"labs.{name}.due") if "due" in table else None
    return Assignment(files[0].stem, title, tuple(exercises), tuple(_written(item, name) for item in table.get("written", [])), due)


def _written(item: dict[str, Any], lab: str) -> Written:
    _known(item, WRITTEN_KEYS, f"labs.{lab}.written")
    if not re.fullmatch(r"[\w.-]+", str(item.get("id", ""))) or not item.get("question"):
        raise ValueError(f"labs.{lab}.written: each needs an id of letters, digits, dots and hyphens, and a question")
    return Written(item["id"], item["question"], float(item.get("points", 1.0)))
