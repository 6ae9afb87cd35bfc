"""Feedback on its way back to students: zip files that Canvas and Moodle take, and messages for a mail program."""

import io
import re
import zipfile
from email.message import EmailMessage
from email.policy import SMTP
from pathlib import Path, PurePosixPath

from labcourse.assignment import Course
from labcourse.collect import CANVAS, MOODLE, Submission
from labcourse.grading import write_file

FOLDER = "return"
LONG_AGO = (1980, 1, 1, 0, 0, 0)  # so that the same pages make the same bytes
MAIL = ("Email address", "Email", "email", "mail")  # columns of the table of students


def write(course: Course, submissions: list[Submission], folder: Path, people: dict[str, dict[str, str]]) -> None:
    """Of each lab what its submissions' names allow: canvas-LAB.zip, moodle-LAB.zip, and mail-LAB/STUDENT.eml where an address is known."""
    for lab in course.labs:
        packed: dict[str, dict[str, bytes]] = {"canvas": {}, "moodle": {}}
        for item in submissions:
            page = folder / "feedback" / item.lab / f"{item.student}.html"
            if item.lab != lab.name or not page.exists():
                continue
            top = PurePosixPath(item.origin).parts[0]
            if named := MOODLE.fullmatch(top):
                packed["moodle"][f"{named['owner']}{'' if named['file'] else '/'}feedback.html"] = page.read_bytes()
            elif CANVAS.fullmatch(top):  # the platform knows whose it is by the numbers in its own name
                packed["canvas"][f"{top.removesuffix('.ipynb')}.html"] = page.read_bytes()
            if address := next((people[item.student][name] for name in MAIL if people.get(item.student, {}).get(name)), ""):
                name = folder / FOLDER / f"mail-{lab.name}" / f"{item.student}.eml"
                write_file(name, _message(course, lab.title, address, page.read_bytes()))
        for platform, pages in packed.items():
            if pages:
                write_file(folder / FOLDER / f"{platform}-{lab.name}.zip", zipped(pages))


def zipped(files: dict[str, bytes], executable: tuple[str, ...] = ()) -> bytes:
    """A zip file's bytes, the same each time."""
    with io.BytesIO() as target:
        with zipfile.ZipFile(target, "w") as archive:
            for name, data in sorted(files.items()):
                member = zipfile.ZipInfo(name, LONG_AGO)
                member.compress_type, member.external_attr = zipfile.ZIP_DEFLATED, (0o755 if name in executable else 0o644) << 16
                archive.writestr(member, data)
        return target.getvalue()


def _message(course: Course, title: str, address: str, page: bytes) -> bytes:
    """A message that a mail program opens as a draft, with the page attached."""
    message = EmailMessage(policy=SMTP)
    message["To"] = re.sub(r"[\r\n]", "", address)
    message["Subject"] = re.sub(r"[\r\n]", " ", f"{course.name}: feedback on {title}")
    message["X-Unsent"] = "1"
    message.set_content(f"Your feedback on {title} is attached; open it in a browser.\n")
    message.add_attachment(page, maintype="text", subtype="html", filename="feedback.html")
    message.set_boundary("feedback-" + "0" * 24)
    return message.as_bytes()
