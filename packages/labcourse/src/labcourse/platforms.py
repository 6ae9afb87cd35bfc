"""Names that learning platforms give to submissions.

Each name says who handed in. Names by nbgrader and Canvas also say something about when.
"""

import contextlib
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

__all__ = ["AmbiguousNameError", "Named", "named"]

CANVAS = re.compile(r"(?P<owner>[^_/]+_(?P<late>LATE_)?(?P<student>[0-9]+)_[0-9]+_)[^/]+")
# Moodle writes the owner's name as a folder, or in front of the file's own name.
MOODLE = re.compile(
    r"(?P<owner>[^/]*?_(?P<student>[0-9]+)_assignsubmission_[a-z]+_?)"
    r"(?P<file>[^/]*)"
)
MOODLE_MARK = re.compile(r"_([0-9]+)_assignsubmission_[a-z]")
GRADESCOPE = re.compile(r"assignment_[0-9]+_export")  # holds a folder for each submission
NBGRADER = re.compile(r"(?P<student>[^+/]+)\+(?P<lab>[^+/]+)\+(?P<time>[0-9]{4}-[^+/]+)\+[^+/]+")


class AmbiguousNameError(ValueError):
    """Error for a name that fits more than one submission. The message says which ones."""


@dataclass(frozen=True)
class Named:
    """Information about a submission in the name that a platform gave it.

    Attributes:
        platform: "Moodle", "Canvas" or "nbgrader"; "" for a folder or file named after a student.
        owner: the part of the name that the platform wrote.
        lab: the lab, as nbgrader names it.
        received: when the submission arrived, in ISO 8601. Only nbgrader says so.
        late: whether Canvas marked the submission as late.
    """

    student: str
    platform: str = ""
    owner: str = ""
    lab: str = ""
    received: str = ""
    late: bool = False


def named(top: str, is_folder: bool) -> Named:
    """Read the name of a file or folder at the top of a download.

    A platform writes its part first, and the student's own file name may follow.
    That file name may imitate a platform.

    Raises:
        AmbiguousNameError: the name can be read in two ways.
    """
    found = list(_readings(top, is_folder))
    if len(found) > 1:
        readings = " or ".join(f"{item.platform}'s student {item.student}" for item in found)
        cure = "A student can choose part of a file name. Rename the file"
        raise AmbiguousNameError(f"its name can be read as {readings}. {cure}")
    if found:
        return found[0]
    if not is_folder:
        top = top.rpartition(".")[0] or top
    return Named(normal(top))


def _readings(top: str, is_folder: bool) -> Iterator[Named]:
    """Yield each possible reading of a name as one that a platform wrote.

    `top` is the name of a file or folder at the top of a download.
    """
    if match := MOODLE.fullmatch(top):
        for student in MOODLE_MARK.findall(top):
            yield Named(student, "Moodle", match["owner"])
    if match := CANVAS.fullmatch(top):
        yield Named(match["student"], "Canvas", match["owner"], late=bool(match["late"]))
    match = NBGRADER.fullmatch(top)
    if match and is_folder:
        student, time = normal(match["student"]), nbgrader_time(match["time"])
        yield Named(student, "nbgrader", top, match["lab"], time)


def normal(name: str) -> str:
    """Return a name in a Unicode normal form, in which equal names have the same characters."""
    return unicodedata.normalize("NFC", name).strip()


def nbgrader_time(text: str) -> str:
    """Read a time as nbgrader writes it, and return it in ISO 8601.

    Return "" for anything else, such as another time zone than UTC.
    """
    for form in ("%Y-%m-%d %H:%M:%S.%f", "%Y-%m-%d %H:%M:%S"):
        with contextlib.suppress(ValueError):
            moment = datetime.strptime(text.strip().removesuffix(" UTC"), form)
            return moment.replace(tzinfo=UTC).isoformat()
    return ""
