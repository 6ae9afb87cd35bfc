"""The lessons' notebooks that come with the kit, and a learner's own copies of them.

A copy has no outputs, so that no output answers a question. A copy in which a learner has written
is never overwritten. Each copy begins and ends with links to its neighbours and to the contents.
The contents and the glossary are in the same folder.
"""

import hashlib
import json
import platform
import re
from pathlib import Path
from typing import Any

from labkit import contents, courses, progress_file, whole_files
from labkit.glossary import NAME as GLOSSARY
from labkit.glossary import Glossary

DEFAULT = Path("work")
# Metadata that JupyterLab adds to a notebook when it opens it. Copies have it from the beginning,
# so that JupyterLab does not mark them as changed.
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
LANGUAGE = {
    "codemirror_mode": {"name": "ipython", "version": 3},
    "file_extension": ".py",
    "mimetype": "text/x-python",
    "name": "python",
    "nbconvert_exporter": "python",
    "pygments_lexer": "ipython3",
    "version": platform.python_version(),
}


def shipped() -> Path:
    """Return the folder with the lessons that come with the kit.

    It is in an installed package, or beside the package in a clone of the repository.
    """
    package = Path(__file__).parent
    installed = package / "notebooks"
    if installed.is_dir():
        return installed
    return package.parent / "notebooks"


def glossary() -> Glossary:
    """Return the file with the glossary that the lessons link to."""
    return Glossary(shipped().parent / "docs" / "glossary.md")


def copy(folder: Path = DEFAULT) -> list[str]:
    """Copy the lessons that the folder does not have yet, and write the contents and the glossary.

    When the kit has a new version of a lesson, a copy in which no cell was changed is replaced.
    Other copies stay.

    Returns sentences to print about the copies that stayed, and about progress that cannot be read.

    Raises OSError if the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    known = _lessons()
    words = glossary()
    for place, source in enumerate(lesson_files()):
        lesson = _without_outputs(source, contents.way(known, place), words)
        own = folder / source.name
        if not own.exists():
            _write(lesson, own)
        elif _version(own) != lesson["metadata"]["labkit"]["version"]:
            if _unchanged(own):
                _write(lesson, own)
            else:
                lines.append(
                    f"{own} was made from another version of the lesson, and stays because you "
                    f"changed it. --reset {source.name[:2]} replaces it with the new version."
                )
    if _is_ours(folder / GLOSSARY):
        _write(_as_copy(words.notebook()), folder / GLOSSARY)
    lines += _write_contents(folder, known)
    return lines


def _write_contents(folder: Path, known: list[contents.Lesson]) -> list[str]:
    """Write the contents, unless a learner has changed them.

    Return a list with a sentence if the progress cannot be read, and an empty list otherwise.
    """
    own = folder / contents.INDEX
    if not _is_ours(own):
        return []
    file = progress_file.path(folder)
    tries: dict[str, list[bool]] = {}
    lines = []
    if file is not None:
        try:
            tries = progress_file.stored(file)
        except ValueError as error:
            lines.append(f"Your progress cannot be read, and {own} shows none: {error}")
    _write(_as_copy(contents.index(contents.Lessons(known, tries))), own)
    return lines


def lessons() -> contents.Lessons:
    """Return a table of all lessons and of what you have done in each.

    It shows how many exercises are right, which ones need a second look, and how many predictions
    you made. Your progress is read from `.labkit/progress.json` beside the notebook, and is sent
    nowhere.
    """
    progress_file.read()
    return contents.Lessons(_lessons(), progress_file.tries)


def reset(number: str, folder: Path = DEFAULT) -> tuple[Path, Path | None]:
    """Restore one lesson, by its number such as "03" or "3", or by the name of its notebook.

    Return the path of the lesson, and the path of the copy that keeps the learner's changes. The
    second path is None if no cell was changed.

    Raises ValueError if there is no such lesson, with the names of the lessons, and OSError if the
    folder cannot be written.
    """
    files = lesson_files()
    names = {path.stem.partition("_")[0]: path for path in files}  # "03", "puzzles"
    found = [path for path in files if path.stem == number]
    found += [path for name, path in names.items() if name == number.zfill(2)]
    if not found:
        choices = ", ".join(names)
        raise ValueError(f"There is no lesson {number!r}. Choose one of these: {choices}.")
    source = found[0]
    folder.mkdir(parents=True, exist_ok=True)
    lesson = _without_outputs(source, contents.way(_lessons(), files.index(source)), glossary())
    own = folder / source.name
    kept = None
    if not _is_ours(own):
        kept = whole_files.keep_copy(own, f"{source.stem}.before-{{}}.ipynb")
    _write(lesson, own)
    return own, kept


def lesson_files() -> list[Path]:
    """Return the notebooks of all lessons, those of the kit and of other courses, in reading order.

    Another course has its notebooks in the folder `notebooks` beside its package.
    """
    own = shipped()
    folders = {own, *(package.parent / "notebooks" for package in courses.packages().values())}
    files = [file for folder in folders - {own} for file in folder.glob("[0-9][0-9]_*.ipynb")]
    return sorted([*own.glob("*.ipynb"), *files], key=lambda file: file.name)


def _lessons() -> list[contents.Lesson]:
    """Return all lessons, in reading order."""
    return [contents.read(path) for path in lesson_files()]


def _without_outputs(path: Path, way: str, words: Glossary) -> dict[str, Any]:
    """Return the lesson without outputs, and with links to its neighbours and to the glossary.

    `way` has the links to the neighbours. A digest in the metadata shows later whether a cell was
    changed.
    """
    notebook = json.loads(path.read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"] = []
            cell["execution_count"] = None
        else:
            cell["source"] = _relinked(cell["source"], words)
    first = next(cell for cell in notebook["cells"] if cell["cell_type"] == "markdown")
    title, _, rest = "".join(first["source"]).partition("\n")
    first["source"] = f"{title}\n\n{way}\n{rest}"
    notebook["cells"].append({"cell_type": "markdown", "id": "way", "metadata": {}, "source": way})
    return _as_copy(notebook)


def _relinked(source: str | list[str], words: Glossary) -> str | list[str]:
    """Return the text of a cell with links to the glossary beside the copies.

    A notebook has a text as a whole or as a list of lines. The result has the same form.
    """
    if isinstance(source, str):
        return words.relink(source)
    return [words.relink(line) for line in source]


def _as_copy(notebook: dict[str, Any]) -> dict[str, Any]:
    """Add the metadata that marks a learner's copy to a notebook, and return the notebook."""
    notebook["metadata"] |= {
        "labkit": {"version": _digest(notebook)},
        "kernelspec": KERNEL,
        "language_info": LANGUAGE,
    }
    return notebook


def _is_ours(path: Path) -> bool:
    """Return whether a file does not exist, or is a copy that the learner has not changed."""
    return not path.exists() or _unchanged(path)


def _unchanged(path: Path) -> bool:
    """Return whether a file is a copy whose cells are as they were when it was made."""
    begun = _version(path)
    try:
        return begun is not None and begun == _digest(json.loads(path.read_text(encoding="utf-8")))
    except (KeyError, TypeError, AttributeError):  # it is not a notebook that the kit wrote
        return False


def _digest(notebook: dict[str, Any]) -> str:
    """Return a digest of the text of all cells. White space at the end of a cell does not count."""
    sources = [re.sub(r"\s+$", "", "".join(cell["source"])) for cell in notebook["cells"]]
    return hashlib.sha256(json.dumps(sources).encode()).hexdigest()[:16]


def _version(path: Path) -> str | None:
    """Return the digest that is stored in a copy since it was made, or None if there is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))["metadata"]["labkit"]["version"]
    except (ValueError, KeyError, TypeError):
        return None


def _write(notebook: dict[str, Any], path: Path) -> None:
    whole_files.write(path, json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
