"""Course file: one small TOML file in which the instructor describes the course.

A mistake in the file, or in one of the instructor's own notebooks, raises an error of one sentence.
The sentence says where the mistake is and what is allowed.
"""

import contextlib
import re
import secrets
import tomllib
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from datetime import UTC, date, datetime, time
from pathlib import Path
from typing import Any

import nbformat

from labcourse import platforms, reading
from labcourse.sandbox import Limits
from labkit import checks, lesson_copies
from labkit.puzzles import definitions
from virtualgpu.machines import parse_bytes

__all__ = ["Assignment", "Course", "Exercise", "Written", "read"]

CONTENTS = ("exercises", "lesson")
KEYS = {
    "contents",
    "course",
    "extensions",
    "install",
    "labs",
    "late_days",
    "late_penalty",
    "limits",
    "notebooks",
    "seed",
    "tries",
}
LAB_KEYS = {"due", "points", "variant", "written"}
WRITTEN_KEYS = {"id", "question", "points"}
WEEK = 7 * 24 * 3600.0  # seconds
MOST_POINTS = 1_000_000
MOST_TRIES = 100
# The smallest and the largest value of each limit. Sizes are in bytes.
RANGES = {
    "memory": (1 << 20, 1 << 50),
    "scratch": (1 << 20, 1 << 50),
    "output": (1 << 10, 1 << 50),
    "processes": (1, 1_000_000),
    "threads": (1, 1_000_000),
}


@dataclass(frozen=True)
class Exercise:
    """Exercise or puzzle that the grader marks.

    Attributes:
        number: the number of the exercise, such as "02.3", or the name of the puzzle.
        name: the name of the answer's function.
        points: what a right answer earns. A puzzle earns nothing unless the course file says so.
        is_puzzle: whether this is a puzzle.
    """

    number: str
    name: str
    points: float = 1.0
    is_puzzle: bool = False


@dataclass(frozen=True)
class Written:
    """A question that students answer in words and a person marks."""

    id: str
    question: str
    points: float = 1.0


@dataclass(frozen=True)
class Assignment:
    """Assignment ("lab") of a course: the exercises of one lesson, and written questions.

    A lab whose notebook has puzzles is a contest.

    Attributes:
        name: the name of the lesson's notebook without its suffix, such as "02_streams".
        title: the heading of the notebook.
        exercises: the exercises and the puzzles.
        due: when students must have handed in, or None.
        variant: whether variants for exams take the place of exercises that have one.
    """

    name: str
    title: str
    exercises: tuple[Exercise, ...]
    written: tuple[Written, ...] = ()
    due: datetime | None = None
    variant: bool = False

    @property
    def points(self) -> float:
        """Return the points of all exercises and questions."""
        tasks: tuple[Exercise | Written, ...] = (*self.exercises, *self.written)
        return sum(task.points for task in tasks)

    @property
    def puzzles(self) -> tuple[Exercise, ...]:
        """Return the puzzles among the exercises."""
        return tuple(exercise for exercise in self.exercises if exercise.is_puzzle)


@dataclass(frozen=True)
class Course:
    """Description of a course, with everything that releasing and grading need.

    Attributes:
        seed: the secret from which the hidden inputs are drawn, in 32 or more hexadecimal digits.
        tries: how often each answer is tried. The inputs differ each time.
        contents: "exercises" for notebooks with the exercises only, or "lesson" for whole lessons.
        late_days: number of whole days after the due date that cost nothing.
        late_penalty: share of the points that each further day costs, from 0 to 1.
        extensions: due dates of single students. The keys are (student, lab).
        notebooks: the folder with the lessons. By default, it has the lessons of the kit.
        install: what `pip install` gets to install the kit, or "". Students read it.
        folder: the folder of the course file, or None if the course was not read from a file.
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
    install: str = ""
    folder: Path | None = None

    def lab(self, name: str) -> Assignment:
        """Return the lab with this name, or with this lesson number ("2" or "02").

        Raises:
            ValueError: no lab or more than one fits. The message lists the labs.
        """
        found = [lab for lab in self.labs if lab.name == name]
        if not found:
            found = [lab for lab in self.labs if name and lab.name[:2] == name.zfill(2)]
        if len(found) == 1:
            return found[0]
        choices = ", ".join(lab.name for lab in found or self.labs)
        if found:
            raise ValueError(f"{name!r} names more than one lab: {choices}. Use a whole name")
        raise ValueError(f"there is no lab {name!r}. Choose one of {choices}")

    def due(self, student: str, lab: Assignment) -> datetime | None:
        """Return when a student must have handed in a lab.

        An extension of the student counts. Return None if the lab has no due date.
        """
        return self.extensions.get((student, lab.name), lab.due)


def read(path: Path) -> Course:
    """Read a course from a TOML file.

    Raises:
        ValueError: the file has a mistake. The message says which, and what is allowed.
        OSError: the file or a notebook cannot be read.
    """
    if not path.exists():
        cure = (
            "Describe the course in a file (docs/teaching.md shows how), or name it with --course"
        )
        raise ValueError(f"there is no file {path}. {cure}")
    try:
        return _course(tomllib.loads(path.read_bytes().decode("utf-8-sig")), path)
    except UnicodeDecodeError:
        raise ValueError(f"{path.name}: expected a text file in UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path.name}: {_not_toml(path, error)}") from None
    except RecursionError:
        raise ValueError(f"{path.name}: its tables are nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from None


def _not_toml(path: Path, error: tomllib.TOMLDecodeError) -> str:
    """Return a message about a syntax error in a TOML file.

    It quotes the line with the error.
    """
    said = str(error)
    place = re.search(r"at line (\d+)", said)
    if place is None:
        return said
    lines = path.read_bytes().decode("utf-8-sig").split("\n")
    line = lines[int(place[1]) - 1].strip()
    shown = f"{said}. The line is: {line[:80]}"
    if said.startswith("Cannot"):  # something is there twice
        return shown
    return f"{shown}. A text needs quotes at both ends, and a date looks like 2027-01-31"


def _course(content: dict[str, Any], path: Path) -> Course:
    """Build the course from the parsed content of its file."""
    _known(content, KEYS, "the course file")
    folder = _text(content.get("notebooks", ""), "notebooks")
    notebooks = (path.parent / folder).resolve() if folder else lesson_copies.shipped()
    if not notebooks.is_dir():
        cure = "Without the line `notebooks`, the course uses the lessons of the kit"
        raise ValueError(f"there is no folder {notebooks}. {cure}")
    labs = [_lab(name, table, notebooks) for name, table in _table(content, "labs").items()]
    if not labs:
        raise ValueError('no labs. Add a table for each, such as [labs."02_streams"]')
    twice = _repeated(lab.name for lab in labs)
    if twice:
        raise ValueError(f"labs: {twice} is described twice. Keep one of the two tables")
    contents = _text(content.get("contents", CONTENTS[0]), "contents")
    if contents not in CONTENTS:
        raise ValueError(f"contents = {_said(contents)}: expected one of {', '.join(CONTENTS)}")
    course = Course(
        name=_text(content.get("course", "PyTorch on GPUs"), "course"),
        seed=_seed(content.get("seed"), path),
        labs=tuple(labs),
        tries=int(_number(content.get("tries", 2), "tries", 1, MOST_TRIES, whole=True)),
        contents=contents,
        late_days=int(_number(content.get("late_days", 0), "late_days", 0, 10_000, whole=True)),
        late_penalty=_number(content.get("late_penalty", 1.0), "late_penalty", 0, 1),
        limits=_limits(_table(content, "limits")),
        notebooks=notebooks,
        install=_text(content.get("install", ""), "install"),
        folder=path.parent.resolve(),
    )
    if not course.name.strip():
        raise ValueError("course: the name is empty")
    for student, extended in _table(content, "extensions").items():
        if not isinstance(extended, dict):
            expected = f'expected a date for each lab, such as {student} = {{ "01" = 2026-12-05 }}'
            raise ValueError(f"extensions.{student} = {_said(extended)}: {expected}")
        for name, moment in extended.items():
            try:
                key = platforms.normal(student), course.lab(name).name
            except ValueError as error:
                raise ValueError(f"extensions.{student}: {error}") from None
            if not key[0]:
                raise ValueError("extensions: the id of a student is empty")
            if key in course.extensions:
                raise ValueError(f"extensions.{student}: {key[1]} has two dates. Keep one")
            course.extensions[key] = _moment(moment, f"extensions.{student}.{name}")
    return course


def _said(value: Any) -> str:
    """Write a value of the course file on one line, for a message."""
    if isinstance(value, bool):
        text = str(value).lower()
    elif isinstance(value, date | time):
        text = str(value)
    else:
        text = repr(value)
    if len(text) <= 60:
        return text
    return f"{text[:60]}…"


def _known(table: dict[str, Any], keys: set[str], where: str) -> None:
    """Raise ValueError if a table of the course file has a key that is not in `keys`.

    `where` says in the message which table it is.
    """
    for key in table:
        if key not in keys:
            allowed = ", ".join(sorted(keys))
            cure = f"Expected one of {allowed}"
            if key in KEYS:
                cure = f"Write `{key}` at the top of the file, above the first line with brackets"
            elif key in LAB_KEYS:
                cure = f'Write `{key}` below the line of a lab, such as [labs."02_streams"]'
            raise ValueError(f"{where}: unknown key {key!r}. {cure}")


def _table(content: dict[str, Any], key: str, where: str = "") -> dict[str, Any]:
    """Return the table under a key of `content`, or an empty one.

    Raise ValueError if it is not a table. `where` says in the message where the key is.
    """
    table = content.get(key, {})
    if not isinstance(table, dict):
        examples = {
            "labs": '[labs."02_streams"] on a line of its own',
            "points": '{ "02.5" = 3 }',
            "extensions": '{ s017 = { "01" = 2026-12-05 } }',
            "limits": "{ seconds = 240 }",
        }
        expected = f"expected a table, such as {examples[key]}"
        raise ValueError(f"{where}{key} = {_said(table)}: {expected}")
    return table


def _text(value: Any, where: str, lines: bool = False) -> str:
    """Return a value if it is text without control characters, or raise ValueError.

    With `lines`, the text may have several lines and tabs. `where` is its place in the course file.
    """
    if not isinstance(value, str):
        raise ValueError(f"{where} = {_said(value)}: expected str, a text in quotes")
    plain = re.sub(r"[\n\t]", "", value) if lines else value
    if not plain.isprintable():
        raise ValueError(f"{where} = {_said(value)}: expected text without control characters")
    return value


def _number(
    value: Any, where: str, least: float, most: float, whole: bool = False, name: str = ""
) -> float:
    """Return a value if it is a number from `least` to `most`, or raise ValueError.

    With `whole`, it must be an integer. `where` is its place in the course file. The message calls
    the value `name`, or by the last part of `where`.
    """
    number_type = int if whole else int | float
    if not isinstance(value, number_type) or isinstance(value, bool):
        expected = "int, a whole number" if whole else "a number"
        raise ValueError(f"{where} = {_said(value)}: expected {expected}")
    if not least <= value <= most:  # also true for NaN
        name = name or where.rpartition(".")[2]
        expected = f"expected {name} from {least:,.12g} to {most:,.12g}"
        raise ValueError(f"{where} = {_said(value)}: {expected}")
    return value if whole else float(value)


def _moment(value: Any, where: str) -> datetime:
    """Return a due date in the course file as a time. `where` is its place in the file.

    Without a time of day it is the day's end, and without a zone UTC.
    """
    if isinstance(value, date) and not isinstance(value, datetime):
        value = datetime.combine(value, time(23, 59, 59))
    if not isinstance(value, datetime) or value.year < 2000:
        expected = "expected a date, such as 2027-01-31 or 2027-01-31T18:00:00+01:00"
        raise ValueError(f"{where} = {_said(value)}: {expected}")
    if value.tzinfo is None:
        return value.replace(tzinfo=UTC)
    return value


def _seed(given: Any, path: Path) -> str:
    """Return the seed of the course, which has at least 128 bits so that nobody can guess it.

    If the course file has no seed, draw one once and keep it in a file beside the course file.
    """
    if given is not None:
        if not isinstance(given, str) or not re.fullmatch(r"[0-9a-fA-F]{32,1000}", given):
            example = f'seed = "{secrets.token_hex(16)}"'
            raise ValueError(
                f"seed = {_said(given)} can be guessed. Expected 32 hexadecimal digits or more in "
                f"quotes, such as this random one: {example}. Without the line, a seed is drawn "
                "and kept"
            )
        return given.lower()
    kept = path.with_suffix(".seed")
    if not kept.exists():
        with contextlib.suppress(OSError):
            kept.touch(0o600)
            kept.write_text(secrets.token_hex(16) + "\n")
    try:
        return _seed(kept.read_bytes().decode().strip(), path)
    except OSError as error:
        reason = f"cannot read or write {kept.name}, the file for the seed ({error.strerror})"
        raise ValueError(f"{reason}. Make it writable, or set `seed` in the course file") from None
    except ValueError:
        raise ValueError(
            f"{kept.name} beside the course file holds no seed. Put its 32 hexadecimal digits "
            "back, or delete the file"
        ) from None


def _limits(table: dict[str, Any]) -> Limits:
    """Read the limits of the sandbox from their table in the course file."""
    _known(table, {item.name for item in fields(Limits)}, "limits")
    given: dict[str, Any] = {}
    for key, value in table.items():
        where = f"limits.{key}"
        if key in ("memory", "scratch", "output"):
            try:
                value = parse_bytes(value)
            except (ValueError, OverflowError):
                expected = "expected a size, such as 16777216 or '16MiB'"
                raise ValueError(f"{where} = {_said(value)}: {expected}") from None
        least, most = RANGES.get(key, (0.001, WEEK))
        given[key] = _number(value, where, least, most, whole=key in RANGES)
    return Limits(**given)


def _lab(name: str, table: Any, notebooks: Path) -> Assignment:
    """Read the table of one lab and the notebook of its lesson."""
    where = f"labs.{name}"
    if not isinstance(table, dict):
        example = f'[labs."{name}"] on a line of its own'
        raise ValueError(f"{where} = {_said(table)}: expected a table, such as {example}")
    _known(table, LAB_KEYS, where)
    path = _lesson(name, notebooks, where)
    notebook = _notebook(path)
    worth = _table(table, "points", f"{where}.")
    for number, value in worth.items():
        if isinstance(value, dict):
            example = f'"{number}.1" = 2'
            raise ValueError(
                f"{where}.points: put the number of the exercise in quotes, such as {example}"
            )
    points = {key: _points(value, f"{where}.points.{key}") for key, value in worth.items()}
    exercises = (*_exercises(notebook, path, points), *_puzzles(notebook, path, points))
    lesson_numbers = {exercise.number for exercise in exercises}
    variant = table.get("variant", False)
    if not isinstance(variant, bool):
        raise ValueError(f"{where}.variant = {_said(variant)}: expected true or false")
    if variant:
        exercises = _replaced(exercises, points, where)
    unknown = set(worth) - {exercise.number for exercise in exercises} - lesson_numbers
    if unknown:
        listed = ", ".join(sorted(unknown))
        kind = "puzzle" if exercises and all(item.is_puzzle for item in exercises) else "exercise"
        known = ", ".join(repr(item.number) for item in exercises) or "none"
        raise ValueError(f"{where}.points: the lesson has no {kind} {listed}. It has {known}")
    questions = table.get("written", [])
    if not isinstance(questions, list):
        expected = f"expected a list of tables. Begin each with [[{where}.written]]"
        raise ValueError(f"{where}.written = {_said(questions)}: {expected}")
    written = tuple(_written(item, f"{where}.written") for item in questions)
    taken = (*(exercise.number for exercise in exercises), *(task.id for task in written))
    # The ids of cells have hyphens in the place of other characters.
    twice = _repeated(taken, lambda name: re.sub(r"[^\w-]", "-", name))
    if twice:
        raise ValueError(f"{where}.written: the id {twice} is taken. Give each question its own id")
    if not taken:
        raise ValueError(
            f"{path.name}: the notebook has no exercise and no puzzle, and the lab has no written "
            "question"
        )
    due = None
    if "due" in table:
        due = _moment(table["due"], f"{where}.due")
    title = _title(notebook, path.stem)
    return Assignment(path.stem, title, exercises, written, due, variant)


def _replaced(
    exercises: tuple[Exercise, ...], points: dict[str, float], where: str
) -> tuple[Exercise, ...]:
    """Replace exercises with their variants, if they have one.

    A variant has the points of its exercise, unless the table has points under its own number.
    """
    variants = checks.variants()
    if not any(exercise.number in variants for exercise in exercises):
        with_variant = ", ".join(sorted({number[:2] for number in variants}))
        raise ValueError(
            f"{where}.variant: no exercise of this lesson has a variant. The lessons "
            f"{with_variant} have some"
        )
    found = []
    for exercise in exercises:
        variant = variants.get(exercise.number)
        if variant is not None:
            number = variant.check.number
            if number in points and exercise.number in points:
                raise ValueError(
                    f"{where}.points: {number} takes the place of {exercise.number}. Keep the "
                    "points of one of them"
                )
            worth = points.get(number, exercise.points)
            exercise = Exercise(number, variant.name, worth)
        found.append(exercise)
    return tuple(found)


def _title(notebook: nbformat.NotebookNode, default: str) -> str:
    """Return the first heading of a notebook, or `default` if it has none."""
    for cell in notebook.cells:
        for line in cell.source.splitlines():
            if line.startswith("# "):
                return str(line[2:])
    return default


def _repeated(names: Iterable[str], changed: Callable[[str], str] = str) -> str:
    """Return the first name that equals an earlier one, or "".

    The names are compared after `changed` was applied to each.
    """
    seen: set[str] = set()
    for name in names:
        if changed(name) in seen:
            return name
        seen.add(changed(name))
    return ""


def _lesson(name: str, notebooks: Path, where: str) -> Path:
    """Return the path of the notebook with this name or this lesson number ("2" or "02").

    `where` is the place of the name in the course file, for messages.

    Raises:
        ValueError: no notebook or more than one fits. The message lists the notebooks.
    """
    paths = sorted(notebooks.glob("*.ipynb"))
    found = [path for path in paths if path.stem == name]
    found = found or [path for path in paths if path.stem.partition("_")[0] == name.zfill(2)]
    if len(found) == 1:
        return found[0]
    choices = ", ".join(path.stem for path in found or paths) or "no notebooks"
    if found:
        raise ValueError(f"{where} names more than one lesson. Choose one of {choices}")
    raise ValueError(f"{where}: there is no such lesson in {notebooks}. The folder has {choices}")


def _notebook(path: Path) -> nbformat.NotebookNode:
    """Read the notebook of a lesson. Raise ValueError if it is not a notebook."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an old notebook lacks what newer ones have
            notebook = nbformat.read(path, as_version=4)
            nbformat.validate(notebook)
    except OSError:
        raise
    except Exception as error:  # a damaged file raises errors of many types
        reason = str(error).strip().partition("\n")[0][:100] or type(error).__name__
        raise ValueError(f"{path.name} cannot be read as a notebook: {reason}") from None
    return notebook


def _exercises(
    notebook: nbformat.NotebookNode, path: Path, worth: dict[str, float]
) -> Iterable[Exercise]:
    """Yield the exercises of a notebook, each with its points in `worth`.

    An exercise is a cell with the tag `exercise`, and the next cell checks the answer. Raise
    ValueError if one of the two cells is missing, or if the check cannot be understood.
    """
    seen: set[str] = set()
    was_task, first_line = False, ""
    for cell in [*notebook.cells, nbformat.v4.new_markdown_cell("")]:
        is_check = cell.cell_type == "code" and reading.checked_number(cell.source) is not None
        if was_task and not is_check:
            reason = (
                f"no cell with labkit.check follows the exercise that begins with {first_line!r}"
            )
            raise ValueError(f"{path.name}: {reason}")
        if is_check and not was_task:
            number = reading.checked_number(cell.source)
            reason = f"the cell above the check of {number} has no tag `exercise`. Add the tag"
            raise ValueError(f"{path.name}: {reason}")
        was_task = "exercise" in cell.metadata.get("tags", [])
        first_line = cell.source.partition("\n")[0][:60]
        number = None
        if cell.cell_type == "code":
            number = reading.checked_number(cell.source)
        if number is None:
            continue
        answer = reading.checked_name(cell.source)
        if answer is None:
            reason = f"the cell that checks {number} is not plain Python with the answer's name"
            call = f'labkit.check("{number}", NAME_OF_THE_FUNCTION)'
            cure = f"Write {call}, without a magic such as %time"
            raise ValueError(f"{path.name}: {reason}. {cure}")
        if number in seen:
            raise ValueError(f"{path.name}: two cells check {number}. Keep one")
        seen.add(number)
        yield Exercise(number, answer, worth.get(number, 1.0))


def _puzzles(
    notebook: nbformat.NotebookNode, path: Path, worth: dict[str, float]
) -> Iterable[Exercise]:
    """Yield the puzzles of a notebook, which are the cells that call `labkit.puzzle`.

    `worth` has their points. Raise ValueError if there is no such puzzle, or if two cells have the
    same one.
    """
    seen: set[str] = set()
    for cell in notebook.cells:
        name = reading.puzzle_name(cell.source) if cell.cell_type == "code" else None
        if name is None:
            continue
        if name in seen:
            raise ValueError(f"{path.name}: two cells have the puzzle {name!r}. Keep one")
        seen.add(name)
        try:
            known = definitions.find(name)
        except ValueError as error:
            raise ValueError(f"{path.name}: {error}") from None
        yield Exercise(name, known.function.__name__, worth.get(name, 0.0), is_puzzle=True)


def _points(value: Any, where: str) -> float:
    """Return the points of an exercise or a question, after checking that they are a number.

    `where` is their place in the course file.
    """
    return _number(value, where, 0, MOST_POINTS, name="points")


def _written(item: Any, where: str) -> Written:
    """Read the table of one written question."""
    if not isinstance(item, dict):
        expected = f"expected a list of tables. Begin each with [[{where}]]"
        raise ValueError(f"{where} has the item {_said(item)}: {expected}")
    _known(item, WRITTEN_KEYS, where)
    name = _text(item.get("id", ""), f"{where}.id")
    question = _text(item.get("question", ""), f"{where}.question", lines=True)
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,40}", name) or not question.strip():
        expected = "an id of up to 40 letters, digits, dots and hyphens, and a question"
        raise ValueError(f"{where}: each question needs {expected}")
    points = _points(item.get("points", 1.0), f"{where}.points")
    return Written(name, question, points)
