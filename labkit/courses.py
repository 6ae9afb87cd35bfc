"""Courses: packages with a folder for each lesson, which labkit finds by the entry point `labkit.lessons`.

A course's folder `lesson_NN` may hold `checks.py`, whose list `CHECKS` has the checks of its exercises; `wrong_answers.txt`, the controls
that grading uses; and `recordings`, results of experiments on real GPUs.
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

    The entry points are those of installed distributions, and of projects whose own folder is on `sys.path`: a course
    that is not installed is found there by its `pyproject.toml`.

    Raises ImportError where a package that an entry point names cannot be imported.
    """
    return {name: Path(str(import_module(name).__file__)).parent for name in _names(_path())}


def _path() -> tuple[str, ...]:
    """The folders of `sys.path`. An empty entry is the working folder."""
    return tuple(dict.fromkeys(os.path.abspath(folder) for folder in sys.path))


@cache
def _names(path: tuple[str, ...]) -> list[str]:
    """The names of the packages that can be found on this path."""
    installed = {entry.value for entry in metadata.entry_points(group=GROUP)}
    return sorted(installed.union(*(_entries(project) for project in _projects(path))))


def projects() -> list[Path]:
    """The `pyproject.toml` files on `sys.path` that name a course."""
    return list(_projects(_path()))


def _projects(path: tuple[str, ...]) -> Iterator[Path]:
    for folder in path:
        project = Path(folder, PROJECT)
        if project.is_file() and _entries(project):
            yield project


def _entries(project: Path) -> set[str]:
    """The packages that a project's entry points name. Most projects on a path are no courses, and are not parsed."""
    text = project.read_text(encoding="utf-8")
    if GROUP not in text:
        return set()
    points = tomllib.loads(text).get("project", {}).get("entry-points", {})
    return set(points.get(GROUP, {}).values())


def lessons() -> dict[str, tuple[str, Path]]:
    """Return the package and the folder of each lesson by its number, such as "01", in order.

    Raises ValueError where two courses have a lesson of the same number.
    """
    found: dict[str, tuple[str, Path]] = {}
    for package, folder in packages().items():
        for lesson in folder.glob("lesson_*"):
            number = re.fullmatch(r"lesson_(\d\d)", lesson.name)
            if number is None:
                continue
            if number[1] in found:
                raise ValueError(
                    f"both {found[number[1]][0]} and {package}.{lesson.name} are lesson {number[1]}: give one of them another number"
                )
            found[number[1]] = f"{package}.{lesson.name}", lesson
    return dict(sorted(found.items()))


def files(pattern: str) -> list[Path]:
    """The files of all lessons whose path within the lesson's folder matches a pattern such as `recordings/*.json`."""
    return [path for _, folder in lessons().values() for path in sorted(folder.glob(pattern))]
