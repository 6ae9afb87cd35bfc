"""Marks: points for exercises and for written answers, and deductions for late submissions.

Points for written answers come from a table that a person fills in.
"""

import contextlib
import hashlib
from collections.abc import Iterable
from datetime import UTC, datetime
from datetime import time as dawn
from pathlib import Path
from typing import Any

from labcourse import tables
from labcourse.assignment import Course

WRITTEN = "written.csv"
COLUMNS = (
    "student",
    "lab",
    "question",
    "points",
    "out_of",
    "comment",
    "answer",
    "beside",
    "fingerprint",
)
DAY = 24 * 3600  # seconds

Marks = dict[tuple[str, str, str], dict[str, str]]  # rows by (student, lab, question)
Dates = dict[tuple[str, str], str]  # times in ISO 8601 by (student, lab)
DATES, INSTRUCTOR = "dates.csv", "the instructor"
DATE_COLUMNS = (
    "student",
    "lab",
    "due",
    "received",
    "known_from",
    "corrected",
    "file_time",
    "late_days",
    "deduction",
)
# Spreadsheet programs write days as their country does. "" stands for ISO 8601.
TIME_FORMATS = ("", "%d.%m.%Y %H:%M", "%d.%m.%Y", "%m/%d/%Y %H:%M", "%m/%d/%Y")


def read_written(folder: Path) -> Marks:
    """Read the table of written answers, which a person has filled in.

    Raises:
        ValueError: the points of an answer are not a number from 0 to its maximum.
    """
    path = folder / WRITTEN
    found = {}
    for number, row in enumerate(_rows(path, COLUMNS[:5]), 2):
        if row["points"].strip():
            where = f"{path}, row {number}"
            try:
                given, most = tables.number(row["points"]), tables.number(row["out_of"])
            except ValueError:
                points = f"{row['points']!r} of {row['out_of']!r}"
                raise ValueError(f"{where}: expected points as a number, got {points}") from None
            if not 0 <= given <= most:
                raise ValueError(f"{where}: expected 0 to {most:g} points, got {given:g}")
        found[row["student"], row["lab"], row["question"]] = row
    return found


def read_dates(path: Path) -> Dates:
    """Read the instructor's table that says when submissions arrived.

    The time is in the column `corrected` of the table, or in `received` if there is no such column.

    Raises:
        ValueError: a cell is not a time such as 2026-12-01 or 2026-12-01 18:30+01:00.
    """
    found: Dates = {}
    for number, row in enumerate(_rows(path, ("student", "lab")), 2):
        said = row.get("corrected", row.get("received", "")).strip()
        if said:
            try:
                found[row["student"], row["lab"]] = as_moment(said).isoformat()
            except ValueError:
                expected = "a time such as 2026-12-01 or 2026-12-01 18:30+01:00"
                raise ValueError(
                    f"{path}, row {number}: expected {expected}, got {said!r}"
                ) from None
    return found


def _rows(path: Path, needed: Iterable[str]) -> list[dict[str, str]]:
    """Read the rows of a table, which must have the columns `needed`.

    Return none if the file does not exist.
    """
    if not path.exists():
        return []
    return tables.read(path, needed)


def as_moment(text: str) -> datetime:
    """Read a time as people write it. Raise ValueError for other text.

    A day without a time means its end, and a time without a time zone is in UTC.
    """
    for form in TIME_FORMATS:
        with contextlib.suppress(ValueError):
            if form:
                moment = datetime.strptime(text, form)
            else:
                moment = datetime.fromisoformat(text)
            if len(text) <= 10:
                moment = datetime.combine(moment, dawn(23, 59, 59))
            if moment.tzinfo is None:
                moment = moment.replace(tzinfo=UTC)
            return moment
    raise ValueError(text)


def add_marks(record: dict[str, Any], course: Course, written: Marks) -> dict[str, Any]:
    """Return a record with its marks.

    A mark is kept only for the answer that it was given for. If the answer has changed since, it
    has to be marked again.
    """
    items = []
    for item in record["written"]:
        row = written.get((record["student"], record["lab"], item["id"]), {})
        beside = item.get("beside", "")
        given: dict[str, Any] = {"points": None, "comment": ""}
        has_mark = bool(row.get("points", "").strip())
        if has_mark and row.get("fingerprint") == of_answer(item["answer"] or beside):
            given = {"points": tables.number(row["points"]), "comment": row.get("comment", "")}
        known = {"id": item["id"], "answer": item["answer"], "beside": beside}
        items.append({**known, "out_of": item["out_of"], **given})
    days = late_days(record, course)
    earned = record["points"]
    share = min(1.0, course.late_penalty * max(0, days - course.late_days))
    total, deduction = None, 0.0
    if earned is not None:
        earned += sum(item["points"] or 0.0 for item in items)
        deduction = round(earned * share, 4)
        total = round(earned - deduction, 4)
    to_mark = 0
    for item in items:
        if item["points"] is None and (item["answer"] or item["beside"]).strip():
            to_mark += 1
    marks = {
        "exercises": record["points"],
        "to_mark": to_mark,
        "late_days": days,
        "deduction": deduction,
        "points": total,
    }
    return {**record, "written": items, "marks": marks}


def late_days(record: dict[str, Any], course: Course) -> int:
    """Count the days that have begun between the due date and the arrival of a submission.

    Return 0 if there is no due date, or if nobody says when the submission arrived. The time of a
    file does not say it.
    """
    due = course.due(record["student"], course.lab(record["lab"]))
    if due is None or not record["received"]:
        return 0
    seconds = (datetime.fromisoformat(record["received"]) - due).total_seconds()
    return max(0, -int(-seconds // DAY))


def of_answer(answer: str) -> str:
    """Return the fingerprint of a written answer, which identifies it in the table of marks."""
    return hashlib.sha256(answer.encode()).hexdigest()[:16]


def written_table(records: Iterable[dict[str, Any]]) -> str:
    """Write the table of written answers for a person to fill in, with the marks given so far."""
    rows = []
    for record in records:
        for item in record["written"]:
            points = "" if item["points"] is None else f"{item['points']:g}"
            row = {
                "student": record["student"],
                "lab": record["lab"],
                "question": item["id"],
                "points": points,
                "out_of": f"{item['out_of']:g}",
                "comment": item["comment"],
                "answer": item["answer"],
                "beside": item["beside"],
                "fingerprint": of_answer(item["answer"] or item["beside"]),
            }
            rows.append(row)
    return tables.written(COLUMNS, rows)


def dates_table(records: Iterable[dict[str, Any]], course: Course) -> str:
    """Write the table of arrival times for a person to correct.

    It says when each submission arrived, how this is known, and what lateness costs.
    """
    rows = []
    for record in records:
        due = course.due(record["student"], course.lab(record["lab"]))
        kept = ("student", "lab", "received", "known_from", "file_time")
        row = {name: record.get(name, "") for name in kept}
        row["due"] = due.isoformat() if due else ""
        if record["known_from"] == INSTRUCTOR:
            row["corrected"] = record["received"]
        row["late_days"] = record["marks"]["late_days"]
        row["deduction"] = record["marks"]["deduction"]
        rows.append(row)
    return tables.written(DATE_COLUMNS, rows)


def date_remark(record: dict[str, Any], course: Course) -> str:
    """Return a remark for the instructor about a late submission, or ""."""
    given, due = record["marks"], course.due(record["student"], course.lab(record["lab"]))
    if given["deduction"]:
        plural = "" if given["late_days"] == 1 else "s"
        days = f"{given['late_days']} day{plural} late according to {record['known_from']}"
        points = f"{given['deduction']:g} points are deducted"
        return f"{days}: {points}. If it arrived at another time, write the time into {DATES}"
    if due and record.get("late") and not record["received"]:
        reason = "The platform's file name says LATE, but not when the submission arrived"
        return f"{reason}. Nothing is deducted until its time is in {DATES}"
    return ""
