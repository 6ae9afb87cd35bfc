"""Find the courses, which are packages with a folder for each lesson.

A course is found by the entry point `labkit.lessons`.

The folder `lesson_NN` of a course may have three things. The list `CHECKS` of `checks.py` has the
checks of the exercises. `wrong_answers.txt` has wrong answers that grading must reject.
`recordings` has results of experiments on real GPUs.
"""

import os
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import import_module, metadata
from pathlib import Path

GROUP = "labkit.lessons"
PROJECT = "pyproject.toml"


def packages() -> dict[str, Path]:
    """Return the folder of each course's package by the package's name, in alphabetical order.

    The entry points of installed distributions count. A course that is not installed is found by
    its `pyproject.toml`, if the folder of that file is on `sys.path`.

    Raises ImportError if a package that an entry point names cannot be imported.
    """
    return {name: Path(str(import_module(name).__file__)).parent for name in _names(_path())}


def _path() -> tuple[str, ...]:
    """Return the folders of `sys.path`. An empty entry is the working folder."""
    return tuple(dict.fromkeys(os.path.abspath(folder) for folder in sys.path))


@cache
def _names(path: tuple[str, ...]) -> list[str]:
    """Return the names of the course packages that entry points on this path name."""
    installed = {entry.value for entry in metadata.entry_points(group=GROUP)}
    return sorted(installed.union(*(_entries(project) for project in _projects(path))))


def projects() -> list[Path]:
    """Return the `pyproject.toml` files on `sys.path` that name a course."""
    return list(_projects(_path()))


def _projects(path: tuple[str, ...]) -> Iterator[Path]:
    """Yield the `pyproject.toml` files in these folders that name a course."""
    for folder in path:
        project = Path(folder, PROJECT)
        if project.is_file() and _entries(project):
            yield project


def _entries(project: Path) -> set[str]:
    """Return the names of the packages that the entry points of a `pyproject.toml` name."""
    text = project.read_text(encoding="utf-8")
    if GROUP not in text:  # most projects have no course, and parsing takes time
        return set()
    points = tomllib.loads(text).get("project", {}).get("entry-points", {})
    return set(points.get(GROUP, {}).values())


def lessons() -> dict[str, tuple[str, Path]]:
    """Return the package and the folder of each lesson, by the lesson's number, such as "01".

    The lessons are in the order of their numbers. Raises ValueError if two courses have a lesson
    with the same number.
    """
    found: dict[str, tuple[str, Path]] = {}
    for package, folder in packages().items():
        for lesson in folder.glob("lesson_*"):
            number = re.fullmatch(r"lesson_(\d\d)", lesson.name)
            if number is None:
                continue
            if number[1] in found:
                raise ValueError(
                    f"Both {found[number[1]][0]} and {package}.{lesson.name} are lesson "
                    f"{number[1]}. Give one of them another number."
                )
            found[number[1]] = f"{package}.{lesson.name}", lesson
    return dict(sorted(found.items()))


def files(pattern: str) -> list[Path]:
    """Return the files of all lessons that match a pattern, such as `recordings/*.json`.

    The pattern is relative to the lesson's folder.
    """
    return [path for _, folder in lessons().values() for path in sorted(folder.glob(pattern))]
