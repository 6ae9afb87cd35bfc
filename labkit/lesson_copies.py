"""The lessons' notebooks as they come with the kit, and a learner's own copies of them, in which the work is done.

A copy has no outputs, so that nothing below a question answers it, and it is never written over: what a learner wrote stays. It begins and
ends with links to its neighbours and to the contents, which lie beside it. The glossary lies there too.
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
# What JupyterLab would write into a notebook that it opens, which would then be marked as changed.
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
    """The folder with the lessons as they come with the kit: in an installed package, or beside it in a clone of the repository."""
    package = Path(__file__).parent
    return next(folder for folder in (package / "notebooks", package.parent / "notebooks") if folder.is_dir())


def glossary() -> Glossary:
    """The glossary that the lessons link to."""
    return Glossary(shipped().parent / "docs" / "glossary.md")


def copy(folder: Path = DEFAULT) -> list[str]:
    """Copy the lessons that `folder` does not have yet, and write its contents and the glossary.

    Return a line for each copy that a learner should know of.

    A copy in which no cell was changed follows the kit when the lesson changes; any other stays, and a line says so.

    Raises OSError where the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lines, known, words = [], _lessons(), glossary()
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
                    f"{own} was begun with another version of the lesson, and stays: --reset {source.name[:2]} brings the new one."
                )
    if _is_ours(folder / GLOSSARY):
        _write(_as_copy(words.notebook()), folder / GLOSSARY)
    lines += _write_contents(folder, known)
    return lines


def _write_contents(folder: Path, known: list[contents.Lesson]) -> list[str]:
    """The table of lessons as of now, unless a learner has written into it; returns a line if their progress cannot be read."""
    own = folder / contents.INDEX
    if not _is_ours(own):
        return []
    file = progress_file.path(folder)
    try:
        tries, lines = {} if file is None else progress_file.stored(file), []
    except ValueError as error:
        tries, lines = {}, [f"Your progress cannot be read, and {own} shows none: {error}"]
    _write(_as_copy(contents.index(contents.Lessons(known, tries))), own)
    return lines


def lessons() -> contents.Lessons:
    """All lessons, with the exercises that are right, those that need a second look, and how many predictions were made.

    It is read from `.labkit/progress.json` beside the notebook, and sent nowhere.
    """
    progress_file.read()
    return contents.Lessons(_lessons(), progress_file.tries)


def reset(number: str, folder: Path = DEFAULT) -> tuple[Path, Path | None]:
    """Bring one lesson back as it was at first, such as "03".

    Return the path of the lesson, and that of the copy which keeps what was written in it. No copy is kept if no cell
    was changed.

    Raises ValueError, naming the lessons, when there is no such lesson, and OSError where the folder cannot be written.
    """
    files = lesson_files()
    source = next((path for path in files if number in (path.name[:2], path.stem)), None)
    if source is None:
        raise ValueError(f"there is no lesson {number!r}; there are {', '.join(path.name[:2] for path in files)}")
    folder.mkdir(parents=True, exist_ok=True)
    lesson = _without_outputs(source, contents.way(_lessons(), files.index(source)), glossary())
    own, kept = folder / source.name, None
    if not _is_ours(own):
        kept = whole_files.keep_copy(own, f"{source.stem}.before-{{}}.ipynb")
    _write(lesson, own)
    return own, kept


def lesson_files() -> list[Path]:
    """The lessons of the kit and of other courses that are found, in reading order.

    Another course has its notebooks in the folder `notebooks` beside its package.
    """
    own = shipped()
    folders = {own, *(package.parent / "notebooks" for package in courses.packages().values())}
    files = [file for folder in folders - {own} for file in folder.glob("[0-9][0-9]_*.ipynb")]
    return sorted([*own.glob("*.ipynb"), *files], key=lambda file: file.name)


def _lessons() -> list[contents.Lesson]:
    return [contents.read(path) for path in lesson_files()]


def _without_outputs(path: Path, way: str, words: Glossary) -> dict[str, Any]:
    """The lesson as a learner gets it: with links to its neighbours and to the glossary beside it, and without outputs.

    A digest of its cells tells later whether any was changed.
    """
    notebook = json.loads(path.read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"], cell["execution_count"] = [], None
        else:
            cell["source"] = _relinked(cell["source"], words)
    first = next(cell for cell in notebook["cells"] if cell["cell_type"] == "markdown")
    title, _, rest = "".join(first["source"]).partition("\n")
    first["source"] = f"{title}\n\n{way}\n{rest}"
    notebook["cells"].append({"cell_type": "markdown", "id": "way", "metadata": {}, "source": way})
    return _as_copy(notebook)


def _relinked(source: str | list[str], words: Glossary) -> str | list[str]:
    """The text of a cell, whole or in lines as it came, with links to the glossary that lies beside the copies."""
    if isinstance(source, str):
        return words.relink(source)
    return [words.relink(line) for line in source]


def _as_copy(notebook: dict[str, Any]) -> dict[str, Any]:
    notebook["metadata"] |= {"labkit": {"version": _digest(notebook)}, "kernelspec": KERNEL, "language_info": LANGUAGE}
    return notebook


def _is_ours(path: Path) -> bool:
    """Is there no such file, or one into which a learner has written nothing?"""
    return not path.exists() or _unchanged(path)


def _unchanged(path: Path) -> bool:
    """Are the cells of a copy those that it was made with?"""
    begun = _version(path)
    try:
        return begun is not None and begun == _digest(json.loads(path.read_text(encoding="utf-8")))
    except (KeyError, TypeError, AttributeError):  # somebody else's notebook
        return False


def _digest(notebook: dict[str, Any]) -> str:
    sources = [re.sub(r"\s+$", "", "".join(cell["source"])) for cell in notebook["cells"]]
    return hashlib.sha256(json.dumps(sources).encode()).hexdigest()[:16]


def _version(path: Path) -> str | None:
    """That of the lesson which the copy was made of; None where the file does not say."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))["metadata"]["labkit"]["version"]
    except (ValueError, KeyError, TypeError):
        return None


def _write(notebook: dict[str, Any], path: Path) -> None:
    whole_files.write(path, json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
