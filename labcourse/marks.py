"""Marks: the exercises' points, those that a person gave to written answers, and what lateness costs."""

import csv
import hashlib
import io
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

from labcourse.assignment import Course

WRITTEN = "written.csv"
COLUMNS = ("student", "lab", "question", "points", "out_of", "comment", "answer", "fingerprint")
DAY = 24 * 3600

Marks = dict[tuple[str, str, str], dict[str, str]]


def read_written(folder: Path) -> Marks:
    """The table of written answers as a person has filled it in. Raises ValueError for points that are none."""
    path = folder / WRITTEN
    if not path.exists():
        return {}
    found = {}
    with path.open(encoding="utf-8-sig", newline="") as file:
        for number, row in enumerate(csv.DictReader(file), 2):
            row = {key: _unquoted(value or "") for key, value in row.items() if key}
            if row.get("points", "").strip():
                try:
                    given = float(row["points"])
                except ValueError:
                    raise ValueError(f"{path}, line {number}: points are {row['points']!r}, not a number") from None
                if not 0 <= given <= float(row["out_of"]):
                    raise ValueError(f"{path}, line {number}: {given:g} points, of {row['out_of']}")
            found[row["student"], row["lab"], row["question"]] = row
    return found


def add_marks(record: dict[str, Any], course: Course, written: Marks) -> dict[str, Any]:
    """The record with its marks. A mark belongs to the answer that it was given for: another answer is to be marked again."""
    items = []
    for item in record["written"]:
        row = written.get((record["student"], record["lab"], item["id"]), {})
        marked = row.get("points", "").strip() and row.get("fingerprint") == of_answer(item["answer"])
        given = {"points": float(row["points"]) if marked else None, "comment": row.get("comment", "") if marked else ""}
        items.append({"id": item["id"], "answer": item["answer"], "out_of": item["out_of"], **given})
    days = late_days(record, course)
    earned = record["points"]
    if earned is not None:
        earned += sum(item["points"] or 0.0 for item in items)
    share = min(1.0, course.late_penalty * max(0, days - course.late_days))
    deduction = round((earned or 0.0) * share, 4)
    marks = {
        "exercises": record["points"],
        "to_mark": sum(item["points"] is None and bool(item["answer"].strip()) for item in items),
        "late_days": days,
        "deduction": deduction,
        "points": None if earned is None else round(earned - deduction, 4),
    }
    return {**record, "written": items, "marks": marks}


def late_days(record: dict[str, Any], course: Course) -> int:
    """Days begun after the due date; 0 where there is none, or the time of receipt is unknown."""
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
            rows.append(
                {**known, "points": points, "comment": item["comment"], "answer": item["answer"], "fingerprint": of_answer(item["answer"])}
            )
    return table(COLUMNS, rows)


def table(columns: Iterable[str], rows: Iterable[dict[str, Any]]) -> str:
    """CSV. What a spreadsheet would take for a formula is quoted."""
    with io.StringIO() as file:
        writer = csv.DictWriter(file, list(columns), lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: _quoted(value) for key, value in row.items()} for row in rows)
        return file.getvalue()


def _quoted(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value


def _unquoted(value: str) -> str:
    return value[1:] if value[:1] == "'" and value[1:2] in ("=", "+", "-", "@", "\t", "\r") else value
