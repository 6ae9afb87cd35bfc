"""What a learner has tried: of each exercise whether each try passed, of each lab a true for each prediction that was put to the test.

In a notebook it outlives the kernel, in `.labkit/progress.json` beside the notebook, and goes nowhere else. LABKIT_PROGRESS names another
file; where that is empty, and outside notebooks, nothing is stored.
"""

import json
import os
import warnings
from collections import defaultdict
from pathlib import Path

from labkit import cells

NAME = Path(".labkit") / "progress.json"

tries: dict[str, list[bool]] = defaultdict(list)  # since this kernel started, and all that was stored


def path(folder: Path | None = None) -> Path | None:
    """The file of the notebooks in a folder, or of this one; None where nothing is stored."""
    if (named := os.environ.get("LABKIT_PROGRESS")) is not None:
        return Path(named) if named else None
    if folder is None and not cells.in_notebook():
        return None
    return (folder or cells.FOLDER) / NAME


def stored(file: Path) -> dict[str, list[bool]]:
    """What a file says; nothing where there is none. Raises ValueError where it cannot be read."""
    try:
        return {what: list(map(bool, tried)) for what, tried in json.loads(file.read_text(encoding="utf-8")).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{file}: {error}") from error


def read() -> None:
    """Take over what is stored: another notebook may have added to it."""
    if (file := path()) is None:
        return
    try:
        tries.update(stored(file))
    except ValueError as error:
        warnings.warn(f"your progress cannot be read, and begins anew: {error}", stacklevel=4)


def add(what: str, passed: bool) -> None:
    """One more try of an exercise or a lab. The file is written whole or not at all: a kernel may be killed at any time."""
    read()
    tries[what].append(passed)
    if (file := path()) is None:
        return
    try:
        file.parent.mkdir(exist_ok=True)
        draft = file.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(dict(sorted(tries.items())), indent=1) + "\n", encoding="utf-8")
        draft.replace(file)
    except OSError as error:
        warnings.warn(f"your progress is kept in this kernel only: {error}", stacklevel=4)
