"""The files in a folder or in a zip file, each with what is known about it before it is read.

Nothing is unpacked, and no link is followed. Files are read within limits, and names that lead out
of the folder are refused.
"""

import contextlib
import json
import os
import re
import stat
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath

from labcourse import platforms, reading
from labcourse.reading import LARGEST, UnreadableError

__all__ = ["File", "in_folder", "in_zip", "manifest", "member_bytes", "shown"]

MANIFEST = "collected.json"
STAMP = "timestamp.txt"  # nbgrader writes the time of a submission into it
NBGRADERS = (STAMP, "submission_secret.txt")
COURSE_OF_NBGRADER = ("nbgrader_config.py", "gradebook.db")  # beside nbgrader's `submitted`
NOTEBOOK = re.compile(r"(.+)\.ipynb(\.json|\.txt)?", re.IGNORECASE | re.DOTALL)
MOST = 5_000  # files of one student that are looked at
DEEPEST = 40  # folders inside one another
DENSEST = 200  # bytes that one byte of a zip file may stand for


@dataclass(frozen=True)
class File:
    """A file in the source, with everything that is known about it before it is read.

    Attributes:
        path: the path inside the source.
        source, member, archive: where the content is: a file, or a member of an open zip file.
        file_time: when the file was changed last, in ISO 8601, or "".
        trouble: why the file cannot be read, or "".
        known: what an earlier `collect` wrote about the file.
        stamp: the time in the file that nbgrader wrote beside this one.
        doubted: whether a file beside this one may imitate nbgrader's.
    """

    path: PurePosixPath
    source: Path
    file_time: str = ""
    member: str = ""
    archive: zipfile.ZipFile | None = None
    trouble: str = ""
    known: dict[str, str] = field(default_factory=dict)
    stamp: str = ""
    doubted: bool = False

    @property
    def stem(self) -> str | None:
        """The name of a notebook without its suffix, or None for another file.

        Browsers add a suffix of their own to files that they download.
        """
        found = NOTEBOOK.fullmatch(self.path.name)
        return found and found[1]

    def data(self) -> bytes:
        """Read the content. Raise UnreadableError if the file cannot be read or is too large."""
        if self.trouble:
            raise UnreadableError(self.trouble)
        if self.archive is None:
            return reading.file_bytes(self.source)
        try:
            data = member_bytes(self.archive, self.archive.getinfo(self.member))
        except Exception as error:  # a damaged zip file raises errors of many types
            raise UnreadableError(f"it cannot be unpacked ({type(error).__name__})") from None
        if len(data) > LARGEST:
            raise UnreadableError(f"it is larger than {LARGEST >> 20} MiB")
        return data


def in_folder(folder: Path) -> Iterator[File]:
    """Yield the files below a folder, in order.

    At most `MOST` files are read below each top-level folder. One more file is yielded, so that
    the caller notices.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: expected a folder or a zip file")
    known = manifest(folder)
    tops = []
    for top in _listed(folder):
        is_folder = top.is_dir() and not top.is_symlink()
        if platforms.GRADESCOPE.fullmatch(top.name) and is_folder:
            tops += _listed(top)
        else:
            tops.append(top)
    is_nbgraders = any((folder.resolve().parent / name).exists() for name in COURSE_OF_NBGRADER)
    is_nbgraders |= any(platforms.NBGRADER.fullmatch(top.name) and top.is_dir() for top in tops)
    for top in tops:
        if top.name != MANIFEST:
            for count, (path, trouble) in enumerate(_below(top)):
                relative = path.relative_to(folder)
                about = known.get(str(relative), {})
                stamp, doubted = "", False
                if NOTEBOOK.fullmatch(path.name) and not about:
                    stamp, doubted = _stamp(path, relative, is_nbgraders)
                text = os.fsencode(str(relative)).decode(errors="replace")
                file_time = about.get("file_time") or _changed(path)
                yield File(
                    PurePosixPath(text),
                    path,
                    file_time,
                    trouble=trouble,
                    known=about,
                    stamp=stamp,
                    doubted=doubted,
                )
                if count == MOST:
                    break


def _listed(folder: Path) -> list[Path]:
    """Return the entries of a folder, without the hidden files that editors and systems write."""
    names = sorted(os.listdir(folder))
    return [folder / name for name in names if not name.startswith(".") and name != "__MACOSX"]


def _below(top: Path) -> Iterator[tuple[Path, str]]:
    """Yield the files in and below a folder, in order.

    With each file comes a text that says what is wrong with it, or "".
    """
    waiting = [(top, 0)]
    while waiting:
        path, depth = waiting.pop()
        try:
            if path.is_symlink() or not path.is_dir():
                if path.name not in NBGRADERS:
                    yield path, ""
            elif depth == DEEPEST:
                yield path, f"it is inside more than {DEEPEST} nested folders"
            else:
                waiting += [(item, depth + 1) for item in reversed(_listed(path))]
        except OSError as error:
            yield path, f"it cannot be opened: {error.strerror}"


def _stamp(path: Path, relative: Path, is_nbgraders: bool) -> tuple[str, bool]:
    """Return the time in nbgrader's file beside a notebook, and whether to doubt that file.

    nbgrader collects into `submitted/STUDENT/LAB`, beside its settings and its gradebook. In any
    other folder, a student may have made the file.
    """
    stamp = path.with_name(STAMP)
    if not os.path.lexists(stamp):
        return "", False
    if not is_nbgraders or len(relative.parts) != 3:
        return "", True
    with contextlib.suppress(UnreadableError):
        text = reading.file_bytes(stamp)[:40].decode(errors="replace")
        return platforms.nbgrader_time(text), False
    return "", True


def _changed(path: Path) -> str:
    """Return when a file was changed last, in ISO 8601, or ""."""
    try:
        return datetime.fromtimestamp(int(path.lstat().st_mtime), UTC).isoformat()
    except (OSError, OverflowError, ValueError):
        return ""


def manifest(folder: Path) -> dict[str, dict[str, str]]:
    """Return the list that an earlier `collect` wrote about the files in its folder."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        listed = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["submissions"]
        texts = [{key: str(value) for key, value in item.items()} for item in listed]
        return {item["file"]: item for item in texts}
    return {}


def in_zip(stack: contextlib.ExitStack, path: Path) -> Iterator[File]:
    """Yield the files in a zip file, in order. The zip file is closed with `stack`."""
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path}: expected a folder or a zip file")
    try:
        archive = stack.enter_context(zipfile.ZipFile(path))
    except (zipfile.BadZipFile, ValueError, OSError) as error:
        raise ValueError(f"{path} cannot be read as a zip file: {error}") from None
    for member in sorted(archive.infolist(), key=lambda member: member.filename):
        name = PurePosixPath(member.filename.replace("\\", "/"))
        hidden = any(part.startswith(".") and part != ".." for part in name.parts)
        is_folder = member.filename.endswith("/")
        if not is_folder and not hidden and "__MACOSX" not in name.parts:
            parts = [part for part in name.parts if part not in ("..", "/")]
            safe = PurePosixPath(*parts or "?")
            trouble = _zip_trouble(member, name)
            yield File(safe, path, _zip_time(member.date_time), member.filename, archive, trouble)


def member_bytes(archive: Path | zipfile.ZipFile, member: str | zipfile.ZipInfo) -> bytes:
    """Read a member of a zip file, up to one byte more than is allowed.

    The size in the zip file's directory is not trusted.
    """
    if isinstance(archive, Path):
        with zipfile.ZipFile(archive) as opened:
            return member_bytes(opened, member)
    with archive.open(member) as file:
        return file.read(LARGEST + 1)


def _zip_trouble(member: zipfile.ZipInfo, name: PurePosixPath) -> str:
    """Return a text that says why a member of a zip file cannot be read, or return ""."""
    if name.is_absolute() or ".." in name.parts or re.match(r"[A-Za-z]:", member.filename):
        return "its name leads out of the folder"
    if stat.S_ISLNK(member.external_attr >> 16):
        return "it is a symbolic link"
    if member.file_size > LARGEST:
        return f"it is larger than {LARGEST >> 20} MiB"
    if member.file_size > (1 << 20) and member.file_size > DENSEST * max(1, member.compress_size):
        return "it is compressed too densely to be a notebook"
    return ""


def _zip_time(parts: tuple[int, int, int, int, int, int]) -> str:
    """Return the time of a member of a zip file in ISO 8601, or ""."""
    try:
        return datetime(*parts, tzinfo=UTC).isoformat()
    except ValueError:
        return ""


def shown(name: str, longest: int = 200) -> str:
    """Return a name that can be printed safely.

    Characters that would move the cursor become escapes, and a long name is cut.
    """
    letters = [item if item.isprintable() else repr(item)[1:-1] for item in name[:longest]]
    plain = "".join(letters)
    if len(name) > longest:
        return f"{plain}…"
    return plain
