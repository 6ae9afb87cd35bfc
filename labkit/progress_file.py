"""The learner's tries at exercises and labs, and the file that stores them.

An exercise has a true or false for each try. A lab has a true for each prediction that was tested.
In a notebook the tries are stored in `.labkit/progress.json` beside the notebook, and are sent
nowhere. The environment variable LABKIT_PROGRESS names another file. If it is empty, or outside
notebooks, nothing is stored.
"""

import json
import os
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

from labkit import cells, whole_files
from virtualgpu import front_end

NAME = Path(".labkit") / "progress.json"

# All tries, those in the file and those since this kernel started, by exercise or lab.
tries: dict[str, list[bool]] = defaultdict(list)
# Tries that a file does not have yet.
_unsaved: dict[Path, list[tuple[str, bool]]] = defaultdict(list)


class NotProgressError(ValueError):
    """Error for a file whose content is not a record of tries."""


def path(folder: Path | None = None) -> Path | None:
    """Return the file that stores tries, or None if nothing is stored.

    It is the file of the notebooks in `folder`, by default in this notebook's folder.
    """
    named = os.environ.get("LABKIT_PROGRESS")
    if named == "":
        return None
    if named is not None:
        return Path(named)
    if folder is None and front_end.ipython_shell() is None:
        return None
    return (folder or cells.FOLDER) / NAME


def stored(file: Path) -> dict[str, list[bool]]:
    """Return the tries in a file, by exercise or lab. There are none if there is no file.

    Raises NotProgressError if the content is not a record of tries, and ValueError if the file
    cannot be opened.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise NotProgressError(f"{file}: {error}") from error
    if not isinstance(content, dict) or not all(map(_are_tries, content.values())):
        raise NotProgressError(
            f"{file}: expected a list of true and false for each exercise and lab"
        )
    return content


def _are_tries(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(passed, bool) for passed in value)


def read() -> None:
    """Update `tries` from the file, because another notebook may have added tries.

    If the file cannot be read, warn.
    """
    file = path()
    if file is None:
        return
    try:
        _take_over(file)
    except NotProgressError as error:
        _warn(
            "your progress cannot be read. Your next check or prediction keeps the file under "
            f"another name and begins a new one: {error}"
        )
    except ValueError as error:
        _warn(
            f"your progress cannot be read, and labkit uses only the tries of this kernel: {error}"
        )


def _take_over(file: Path) -> None:
    """Update `tries` from the file, and append the tries that the file does not have yet.

    Raises as `stored`.
    """
    for what, passed in stored(file).items():
        unsaved = [new for other, new in _unsaved[file] if other == what]
        tries[what] = passed + unsaved


def add(what: str, passed: bool) -> None:
    """Add a try at an exercise or a lab, and store it.

    `what` is the exercise or the lab, and `passed` says whether the try was right. If the try
    cannot be stored, warn.
    """
    tries[what].append(passed)
    file = path()
    if file is None:
        return
    _unsaved[file].append((what, passed))
    try:
        file.parent.mkdir(exist_ok=True)
        with whole_files.locked(file):
            _save(file)
    except (OSError, ValueError) as error:
        _warn(f"your progress is kept in this kernel only: {error}")


def _save(file: Path) -> None:
    """Write all tries to the file.

    A file that is not a record of tries is kept under another name, with a warning.

    Raises OSError or ValueError if the file cannot be read or written.
    """
    try:
        _take_over(file)
    except NotProgressError as error:
        kept = whole_files.keep_copy(file, f"{file.stem}.unreadable-{{}}.json")
        _warn(
            "your progress cannot be read, and begins anew. "
            f"The old file is kept as {kept}: {error}"
        )
    whole_files.write(file, json.dumps(dict(sorted(tries.items())), indent=1) + "\n")
    _unsaved[file].clear()


def _warn(sentence: str) -> None:
    """Show a warning with this sentence at the line of the notebook that called labkit."""
    warnings.warn(sentence, stacklevel=5)
