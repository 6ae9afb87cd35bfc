"""Marks: the exercises' points, those that a person gave to written answers, and what lateness costs."""

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
COLUMNS = ("student", "lab", "question", "points", "out_of", "comment", "answer", "beside", "fingerprint")
DAY = 24 * 3600

Marks = dict[tuple[str, str, str], dict[str, str]]
Dates = dict[tuple[str, str], str]
DATES, INSTRUCTOR = "dates.csv", "the instructor"
DATE_COLUMNS = ("student", "lab", "due", "received", "known_from", "corrected", "file_time", "late_days", "deduction")


def read_written(folder: Path) -> Marks:
    """The table of written answers as a person has filled it in. Raises ValueError for points that are none."""
    path = folder / WRITTEN
    found = {}
    for number, row in enumerate(tables.read(path, COLUMNS[:5]) if path.exists() else [], 2):
        if row["points"].strip():
            try:
                given, most = tables.number(row["points"]), tables.number(row["out_of"])
            except ValueError:
                raise ValueError(f"{path}, row {number}: points are {row['points']!r} of {row['out_of']!r}, not a number") from None
            if not 0 <= given <= most:
                raise ValueError(f"{path}, row {number}: {given:g} points, of {row['out_of']}")
        found[row["student"], row["lab"], row["question"]] = row
    return found


def read_dates(path: Path) -> Dates:
    """When submissions came, by (student, lab), in the instructor's word: the column `corrected`, else `received`, of a table.

    Raises ValueError for what is no time, such as 2026-12-01 or 2026-12-01 18:30+01:00.
    """
    found: Dates = {}
    for number, row in enumerate(tables.read(path, ("student", "lab")) if path.exists() else [], 2):
        said = row.get("corrected", "") if "corrected" in row else row.get("received", "")
        if said.strip():
            try:
                found[row["student"], row["lab"]] = as_moment(said.strip()).isoformat()
            except ValueError:
                raise ValueError(f"{path}, row {number}: {said!r} is no time, such as 2026-12-01 or 2026-12-01 18:30+01:00") from None
    return found


def as_moment(text: str) -> datetime:
    """A time as people write it. A day means its end; without a zone it is UTC. Raises ValueError."""
    for form in ("", "%d.%m.%Y %H:%M", "%d.%m.%Y", "%m/%d/%Y %H:%M", "%m/%d/%Y"):  # spreadsheets write days in their country's way
        with contextlib.suppress(ValueError):
            moment = datetime.fromisoformat(text) if not form else datetime.strptime(text, form)
            moment = moment if len(text) > 10 else datetime.combine(moment, dawn(23, 59, 59))
            return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    raise ValueError(text)


def add_marks(record: dict[str, Any], course: Course, written: Marks) -> dict[str, Any]:
    """The record with its marks. A mark belongs to the answer that it was given for: another answer is to be marked again."""
    items = []
    for item in record["written"]:
        row = written.get((record["student"], record["lab"], item["id"]), {})
        beside = item.get("beside", "")
        marked = row.get("points", "").strip() and row.get("fingerprint") == of_answer(item["answer"] or beside)
        given = {"points": tables.number(row["points"]) if marked else None, "comment": row.get("comment", "") if marked else ""}
        items.append({"id": item["id"], "answer": item["answer"], "beside": beside, "out_of": item["out_of"], **given})
    days = late_days(record, course)
    earned = record["points"]
    if earned is not None:
        earned += sum(item["points"] or 0.0 for item in items)
    share = min(1.0, course.late_penalty * max(0, days - course.late_days))
    deduction = round((earned or 0.0) * share, 4)
    marks = {
        "exercises": record["points"],
        "to_mark": sum(item["points"] is None and bool((item["answer"] or item["beside"]).strip()) for item in items),
        "late_days": days,
        "deduction": deduction,
        "points": None if earned is None else round(earned - deduction, 4),
    }
    return {**record, "written": items, "marks": marks}


def late_days(record: dict[str, Any], course: Course) -> int:
    """Days begun after the due date; 0 where there is none, or nobody has said when it came. The time of a file says nothing of that."""
    due = course.due(record["student"], course.lab(record["lab"]))
    if due is None or not record["received"]:
        return 0
    seconds = (datetime.fromisoformat(record["received"]) - due).total_seconds()
    return max(0, -int(-seconds // DAY))


def of_answer(answer: str) -> str:
    return hashlib.sha256(answer.encode()).hexdigest()[:16]


def written_table(records: Iterable[dict[str, Any]]) -> str:
    """The table for a person to fill in, with the marks that it had."""
    rows = []
    for record in records:
        for item in record["written"]:
            points = "" if item["points"] is None else f"{item['points']:g}"
            known = {"student": record["student"], "lab": record["lab"], "question": item["id"], "out_of": f"{item['out_of']:g}"}
            said = {"answer": item["answer"], "beside": item["beside"], "fingerprint": of_answer(item["answer"] or item["beside"])}
            rows.append({**known, "points": points, "comment": item["comment"], **said})
    return tables.written(COLUMNS, rows)


def dates_table(records: Iterable[dict[str, Any]], course: Course) -> str:
    """The table for a person to correct: when each submission came, how that is known, and what it costs."""
    rows = []
    for record in records:
        due = course.due(record["student"], course.lab(record["lab"]))
        known = {name: record.get(name, "") for name in ("student", "lab", "received", "known_from", "file_time")}
        corrected = record["received"] if record["known_from"] == INSTRUCTOR else ""
        given = record["marks"]
        told = {
            "due": due.isoformat() if due else "",
            "corrected": corrected,
            "late_days": given["late_days"],
            "deduction": given["deduction"],
        }
        rows.append({**known, **told})
    return tables.written(DATE_COLUMNS, rows)


def date_remark(record: dict[str, Any], course: Course) -> str:
    """What a person should know of a submission's lateness, or ""."""
    given, due = record["marks"], course.due(record["student"], course.lab(record["lab"]))
    if given["deduction"]:
        days = f"{given['late_days']} day{'s' * (given['late_days'] != 1)} late by {record['known_from']}"
        return f"{days}: {given['deduction']:g} points taken off. Another time goes into {DATES}"
    if due and record.get("late") and not record["received"]:
        return f"the platform's file name says LATE, but not when it came: nothing is taken off until its time stands in {DATES}"
    return ""
