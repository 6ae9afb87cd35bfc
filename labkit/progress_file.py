"""What a learner has tried: of each exercise whether each try passed, of each lab a true for each prediction that was put to the test.

In a notebook it outlives the kernel, in `.labkit/progress.json` beside the notebook, and goes nowhere else. LABKIT_PROGRESS names another
file; where that is empty, and outside notebooks, nothing is stored.
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

tries: dict[str, list[bool]] = defaultdict(list)  # since this kernel started, and all that was stored
_unsaved: dict[Path, list[tuple[str, bool]]] = defaultdict(list)  # tries that the file does not have yet


class NotProgressError(ValueError):
    """The file's content is not a record of tries."""


def path(folder: Path | None = None) -> Path | None:
    """The file of the notebooks in a folder, or of this one; None where nothing is stored."""
    named = os.environ.get("LABKIT_PROGRESS")
    if named is not None:
        return Path(named) if named else None
    if folder is None and front_end.ipython_shell() is None:
        return None
    return (folder or cells.FOLDER) / NAME


def stored(file: Path) -> dict[str, list[bool]]:
    """Read the tries in a file; none if there is no file.

    Raises NotProgressError if the content is something else, and ValueError if the file cannot be opened.
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
        raise NotProgressError(f"{file}: expected a list of true and false for each exercise and lab")
    return content


def _are_tries(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(passed, bool) for passed in value)


def read() -> None:
    """Take over what is stored: another notebook may have added to it."""
    if (file := path()) is None:
        return
    try:
        _take_over(file)
    except NotProgressError as error:
        _warn(f"your progress cannot be read; your next check or prediction keeps the file and begins a new one: {error}")
    except ValueError as error:
        _warn(f"your progress cannot be read, and only this kernel's counts: {error}")


def _take_over(file: Path) -> None:
    """Let the tries be those of the file, and after them those that the file does not have yet.

    Raises what `stored` raises.
    """
    for what, passed in stored(file).items():
        tries[what] = [*passed, *(new for other, new in _unsaved[file] if other == what)]


def add(what: str, passed: bool) -> None:
    """Add a try of an exercise or a lab, and store it."""
    tries[what].append(passed)
    if (file := path()) is None:
        return
    _unsaved[file].append((what, passed))
    try:
        file.parent.mkdir(exist_ok=True)
        with whole_files.locked(file):
            _save(file)
    except (OSError, ValueError) as error:
        _warn(f"your progress is kept in this kernel only: {error}")


def _save(file: Path) -> None:
    """Add to the file what it does not have yet. A file that is not a record of tries is kept under another name.

    Raises OSError or ValueError if the file cannot be read or written.
    """
    try:
        _take_over(file)
    except NotProgressError as error:
        kept = whole_files.keep_copy(file, f"{file.stem}.unreadable-{{}}.json")
        _warn(f"your progress cannot be read, and begins anew; the file is kept as {kept}: {error}")
    whole_files.write(file, json.dumps(dict(sorted(tries.items())), indent=1) + "\n")
    _unsaved[file].clear()


def _warn(sentence: str) -> None:
    warnings.warn(sentence, stacklevel=5)
