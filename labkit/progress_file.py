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
ANEW = "To begin a new file, give this one another name"

tries: dict[str, list[bool]] = defaultdict(list)  # since this kernel started, and all that was stored
_unsaved: dict[Path, list[tuple[str, bool]]] = defaultdict(list)  # tries that the file does not have yet


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

    Raises ValueError if the file cannot be opened, or if its content is something else.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: {error}. {ANEW}") from error
    if not isinstance(content, dict) or not all(map(_are_tries, content.values())):
        expected = "expected a list of true and false for each exercise and lab"
        raise ValueError(f"{file}: {expected}. {ANEW}")
    return content


def _are_tries(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(passed, bool) for passed in value)


def read() -> None:
    """Take over what is stored: another notebook may have added to it."""
    file = path()
    if file is None:
        return
    try:
        _take_over(file)
    except ValueError as error:
        _warn(f"your progress cannot be read, and only this kernel's counts: {error}")


def _take_over(file: Path) -> None:
    """Let the tries be those of the file, and after them those that the file does not have yet.

    Raises what `stored` raises.
    """
    for what, passed in stored(file).items():
        tries[what] = [*passed, *(new for other, new in _unsaved[file] if other == what)]


def add(what: str, passed: bool) -> None:
    """Add a try of an exercise or a lab, and store it. A file that cannot be read stays as it is."""
    tries[what].append(passed)
    file = path()
    if file is None:
        return
    _unsaved[file].append((what, passed))
    try:
        file.parent.mkdir(exist_ok=True)
        with whole_files.locked(file):
            _take_over(file)
            whole_files.write(file, json.dumps(dict(sorted(tries.items())), indent=1) + "\n")
            _unsaved[file].clear()
    except (OSError, ValueError) as error:
        _warn(f"your progress is kept in this kernel only: {error}")


def _warn(sentence: str) -> None:
    warnings.warn(sentence, stacklevel=4)
