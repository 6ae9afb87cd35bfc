"""Pages for students, one for each submission, packed for Canvas, Moodle or a mail program.

Students see verdicts, marks and comments. Remarks for the instructor are not on these pages.
"""

import base64
import io
import re
import zipfile
from email.message import EmailMessage
from email.policy import SMTP
from pathlib import Path
from typing import Any

import jinja2
import markupsafe

from labcourse import contest, platforms
from labcourse.assignment import Course
from labcourse.collect import Submission
from labcourse.examination import KINDS
from labcourse.grading import Store, write_file
from labkit import checks

__all__ = [
    "exercise_view",
    "rich",
    "sentence",
    "student_view",
    "write_page",
    "write_returns",
    "zipped",
]

RETURN = "return"  # the folder with what goes back to students
LONG_AGO = (1980, 1, 1, 0, 0, 0)  # so that the same pages make the same bytes
MAIL = ("Email address", "Email", "email", "mail")  # columns of the table of students
VERDICTS = ("right", "wrong", "over budget", "could not be run", "not attempted")
# How an answer can end that its student should know about. The instructor decides about all other
# endings.
ENDINGS = {
    "time": "Your notebook ran out of time",
    "memory": "Your notebook ran out of memory",
    "output": "Your notebook printed too much",
    "processes": "Your notebook started too many processes",
    "ended": "The process of your notebook ended early",
    "unreadable": "Your notebook cannot be read",
}

People = dict[str, dict[str, str]]  # the rows of the instructor's table of students, by their ids


def student_view(record: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of a record that its student may see."""
    ending = ENDINGS.get(record["status"], "")
    if ending and record["detail"]:
        ending += f": {record['detail']}"
    seen = ("student", "lab", "out_of", "received", "marks", "written", "sources", "cell_errors")
    exercises = [exercise_view(item) for item in record["exercises"]]
    return {key: record[key] for key in seen} | {"ending": ending, "exercises": exercises}


def exercise_view(item: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of an exercise's result that its student may see.

    `points` is None if there is no verdict yet.
    """
    status, message = item["status"], item["message"]
    view = {key: item[key] for key in ("number", "points", "out_of")}
    if status in VERDICTS:
        return view | {"status": status, "message": message}
    if status in ENDINGS and status != "unreadable":
        said = ""
        if message != KINDS[status]:
            said = message[:1].upper() + message[1:]
        return view | {"status": KINDS[status], "message": said}
    return view | {"status": "not marked yet", "message": "", "points": None}


def rich(text: str) -> markupsafe.Markup:
    """Convert code, strong text and emphasis from Markdown to HTML. All else remains text."""
    escaped = str(markupsafe.escape(text))
    parts = re.split(r"\s*```\w*\n(.*?)```\s*|`([^`]+)`", escaped, flags=re.DOTALL)
    for place, part in enumerate(parts):
        if part is None:
            parts[place] = ""
        elif place % 3 == 1:
            parts[place] = f'<pre class="code" tabindex="0">{part}</pre>'
        elif place % 3 == 2:
            parts[place] = f"<code>{part}</code>"
        else:
            strong = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", part)
            parts[place] = re.sub(r"\*(\w[^*]*)\*", r"<em>\1</em>", strong)
    return markupsafe.Markup("".join(parts))


def sentence(text: str) -> str:
    """Return a text that begins with a capital and ends with a full stop or another end."""
    text = text.strip()
    text = text[:1].upper() + text[1:]
    if not text or text[-1] in ".!?:…":
        return text
    return f"{text}."


def page_path(store: Store, lab: str, student: str) -> Path:
    """Return the path of a student's page."""
    return store.folder / "feedback" / lab / f"{student}.html"


def remove(store: Store, lab: str, student: str) -> None:
    """Remove a student's page."""
    page_path(store, lab, student).unlink(missing_ok=True)


def write_page(
    course: Course,
    record: dict[str, Any],
    store: Store,
    pages: jinja2.Environment,
    asked: dict[str, str],
) -> None:
    """Write a student's page. `asked` has the task of each exercise, by its number."""
    lab, student = course.lab(record["lab"]), record["student"]
    images = [path.read_bytes() for path in store.figures(lab.name, student)]
    figures = [base64.b64encode(image).decode() for image in images]
    sections = {}
    for item in lab.exercises:
        sections[item.number] = "" if item.is_puzzle else checks.find(item.number).section
    page = pages.get_template("feedback.html").render(
        course=course,
        lab=lab,
        record=student_view(record),
        figures=figures,
        questions={task.id: task.question for task in lab.written},
        asked=asked,
        sections=sections,
        pseudonym=contest.pseudonym(course, student) if lab.puzzles else "",
        due=course.due(student, lab),
    )
    write_file(page_path(store, lab.name, student), page.encode())


def write_returns(
    course: Course, submissions: list[Submission], store: Store, people: People
) -> None:
    """Pack the pages of each lab in canvas-LAB.zip, moodle-LAB.zip and mail-LAB/STUDENT.eml.

    The name of a submission says which platform it came from. A mail needs an address in `people`.
    """
    for lab in course.labs:
        packed: dict[str, dict[str, bytes]] = {"canvas": {}, "moodle": {}}
        for item in submissions:
            page = page_path(store, item.lab, item.student)
            if item.lab != lab.name or not page.exists():
                continue
            top, _, below = item.origin.partition("/")
            named = platforms.named(top, is_folder=bool(below))
            if named.platform == "Moodle":
                separator = "/" if named.owner == top else ""
                packed["moodle"][f"{named.owner}{separator}feedback.html"] = page.read_bytes()
            elif named.platform == "Canvas":  # it finds the student by the numbers in the name
                packed["canvas"][f"{top.removesuffix('.ipynb')}.html"] = page.read_bytes()
            known = people.get(item.student, {})
            address = next((known[column] for column in MAIL if known.get(column)), "")
            if address:
                name = store.folder / RETURN / f"mail-{lab.name}" / f"{item.student}.eml"
                write_file(name, _message(course, lab.title, address, page.read_bytes()))
        for platform, files in packed.items():
            if files:
                write_file(store.folder / RETURN / f"{platform}-{lab.name}.zip", zipped(files))


def zipped(files: dict[str, bytes], executable: tuple[str, ...] = ()) -> bytes:
    """Return the bytes of a zip file. The same files give the same bytes."""
    with io.BytesIO() as target:
        with zipfile.ZipFile(target, "w") as archive:
            for name, data in sorted(files.items()):
                member = zipfile.ZipInfo(name, LONG_AGO)
                mode = 0o755 if name in executable else 0o644
                member.compress_type, member.external_attr = zipfile.ZIP_DEFLATED, mode << 16
                archive.writestr(member, data)
        return target.getvalue()


def _message(course: Course, title: str, address: str, page: bytes) -> bytes:
    """Return a mail with a page attached, which a mail program opens as a draft."""
    message = EmailMessage(policy=SMTP)
    message["To"] = re.sub(r"[\r\n]", "", address)
    message["Subject"] = re.sub(r"[\r\n]", " ", f"{course.name}: feedback on {title}")
    message["X-Unsent"] = "1"
    message.set_content(f"Your feedback on {title} is attached. Open it in a browser.\n")
    message.add_attachment(page, maintype="text", subtype="html", filename="feedback.html")
    message.set_boundary("feedback-" + "0" * 24)
    return message.as_bytes()
