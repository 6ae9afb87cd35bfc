"""The files in a folder or in a zip file, each with what is known about it before it is read.

Nothing is unpacked, and no link is followed. A file's content is read within limits, and a name that
leads out of the folder is refused.
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
MOST = 5_000  # files of one student that are looked at
DEEPEST = 40  # folders inside one another
DENSEST = 200  # bytes that one byte of a zip file may stand for


@dataclass(frozen=True)
class File:
    """A file in the source, before it is read.

    Attributes:
        source, member, archive: where its content is.
        trouble: why it cannot be read.
        known: what an earlier `collect` wrote about it.
        stamp: the time in nbgrader's own file beside it.
        doubted: whether a file beside it imitates nbgrader's.
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

    def data(self) -> bytes:
        """Read the content. Raises UnreadableError."""
        if self.trouble:
            raise UnreadableError(self.trouble)
        if self.archive is None:
            return reading.file_bytes(self.source)
        try:
            data = member_bytes(self.archive, self.archive.getinfo(self.member))
        except Exception as error:  # of many kinds, from a file that somebody made by hand
            raise UnreadableError(f"it cannot be unpacked ({type(error).__name__})") from None
        if len(data) > LARGEST:
            raise UnreadableError(f"it is larger than {LARGEST >> 20} MiB")
        return data


def in_folder(folder: Path) -> Iterator[File]:
    """The files below a folder, in order. Each folder at the top gives at most one file too many."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder and no zip file")
    known = manifest(folder)
    tops = []
    for top in _listed(folder):
        is_export = platforms.GRADESCOPE.fullmatch(top.name) and top.is_dir() and not top.is_symlink()
        tops += _listed(top) if is_export else [top]
    is_nbgraders = any((folder.resolve().parent / name).exists() for name in COURSE_OF_NBGRADER)
    is_nbgraders |= any(platforms.NBGRADER.fullmatch(top.name) and top.is_dir() for top in tops)
    for top in tops:
        if top.name != MANIFEST:
            for count, (path, trouble) in enumerate(_below(top)):
                relative = path.relative_to(folder)
                about = known.get(str(relative), {})
                stamp, doubted = "", False
                if path.suffix == ".ipynb" and not about:
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
    """What lies in a folder, without what editors and systems leave there."""
    names = sorted(os.listdir(folder))
    return [folder / name for name in names if not name.startswith(".") and name != "__MACOSX"]


def _below(top: Path) -> Iterator[tuple[Path, str]]:
    """The files of a folder and of all folders in it, in order, and what is wrong with each."""
    waiting = [(top, 0)]
    while waiting:
        path, depth = waiting.pop()
        try:
            if path.is_symlink() or not path.is_dir():
                if path.name not in NBGRADERS:
                    yield path, ""
            elif depth == DEEPEST:
                yield path, f"more than {DEEPEST} folders lie inside one another"
            else:
                waiting += [(item, depth + 1) for item in reversed(_listed(path))]
        except OSError as error:
            yield path, f"it cannot be opened: {error.strerror}"


def _stamp(path: Path, relative: Path, is_nbgraders: bool) -> tuple[str, bool]:
    """The time in nbgrader's file beside a notebook, and whether a student may have made that file.

    nbgrader collects into `submitted/STUDENT/LAB`, beside its settings and its gradebook.
    In a folder that is not nbgrader's, a student may have made the file.
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
    try:
        return datetime.fromtimestamp(int(path.lstat().st_mtime), UTC).isoformat()
    except (OSError, OverflowError, ValueError):
        return ""


def manifest(folder: Path) -> dict[str, dict[str, str]]:
    """What is known of each file, where an earlier `collect` wrote this folder."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        listed = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["submissions"]
        texts = [{key: str(value) for key, value in item.items()} for item in listed]
        return {item["file"]: item for item in texts}
    return {}


def in_zip(stack: contextlib.ExitStack, path: Path) -> Iterator[File]:
    """The files in a zip file, in order. The file is open as long as `stack`."""
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is no folder and no zip file")
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
    """Read a file in a zip file, whatever the zip file's directory says about its size.

    The result has at most one byte more than is allowed.
    """
    if isinstance(archive, Path):
        with zipfile.ZipFile(archive) as opened:
            return member_bytes(opened, member)
    with archive.open(member) as file:
        return file.read(LARGEST + 1)


def _zip_trouble(member: zipfile.ZipInfo, name: PurePosixPath) -> str:
    if name.is_absolute() or ".." in name.parts or re.match(r"[A-Za-z]:", member.filename):
        return "its name leads out of the folder"
    if stat.S_ISLNK(member.external_attr >> 16):
        return "it is a symbolic link"
    if member.file_size > LARGEST:
        return f"it is larger than {LARGEST >> 20} MiB"
    if member.file_size > (1 << 20) and member.file_size > DENSEST * max(1, member.compress_size):
        return "it is packed so densely that it is no notebook"
    return ""


def _zip_time(parts: tuple[int, int, int, int, int, int]) -> str:
    try:
        return datetime(*parts, tzinfo=UTC).isoformat()
    except ValueError:
        return ""


def shown(name: str, longest: int = 200) -> str:
    """Return a name that can be printed: letters that would move the cursor become escapes."""
    letters = [item if item.isprintable() else repr(item)[1:-1] for item in name[:longest]]
    plain = "".join(letters)
    return plain if len(name) <= longest else f"{plain}…"
