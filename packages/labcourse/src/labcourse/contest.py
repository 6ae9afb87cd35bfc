"""Contest of a class: the scores of its puzzles, under pseudonyms.

The tables name nobody, and say nothing about why a function could not be scored.
"""

import hashlib
import hmac
from typing import Any

from labcourse.assignment import Assignment, Course, Exercise
from labkit.puzzles import definitions
from labkit.puzzles.outcome import NOT_RUN, OVER_BUDGET, RIGHT, WRONG

BIRDS = (
    *("avocet", "bunting", "curlew", "dunlin", "egret", "finch", "grebe", "heron"),
    *("ibis", "jackdaw", "kestrel", "linnet", "magpie", "nuthatch", "oriole", "plover"),
)
ORDER = (RIGHT, OVER_BUDGET, WRONG, NOT_RUN)


def pseudonym(course: Course, student: str) -> str:
    """Return the pseudonym of a student, such as "heron-7c31f0".

    It is the same in all contests of the course. Without the seed of the course, nobody can compute
    it from the student's id, nor the id from it.
    """
    purpose = f"pseudonym/{student}".encode()
    digest = hmac.digest(course.seed.encode(), purpose, hashlib.sha256)
    return f"{BIRDS[digest[0] % len(BIRDS)]}-{digest[1:4].hex()}"


def tables(course: Course, lab: Assignment, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a table for each puzzle of a lab, in the order of the notebook.

    A table has the puzzle's name and task, its budget, its par and the best score as text, and the
    number of students who did not attempt it. Its rows have a pseudonym, a status and a score as
    text. They are sorted by status and score.

    Args:
        course: the course, whose seed gives the pseudonyms.
        lab: the lab.
        records: the records of the lab's submissions.
    """
    return [_table(course, puzzle, records) for puzzle in lab.puzzles]


def _table(course: Course, puzzle: Exercise, records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the table of one puzzle."""
    known = definitions.find(puzzle.number)
    found = []
    untried = 0
    for record in records:
        result = next(item for item in record["exercises"] if item["number"] == puzzle.number)
        if result["status"] == "not attempted":
            untried += 1
            continue
        status = shown_status(result)
        score = result.get("score")
        order = ORDER.index(status), score or 0.0, pseudonym(course, record["student"])
        found.append((order, status, score))
    text = known.score.text
    rows = []
    for (*_, name), status, score in sorted(found, key=lambda item: item[0]):
        shown = "" if score is None else text(score)
        rows.append({"pseudonym": name, "status": status, "score": shown})
    best = [row["score"] for row in rows if row["status"] == RIGHT][:1]
    return {
        "name": known.name,
        "task": known.task,
        "measure": known.score.name,
        "budget": text(known.budget),
        "par": text(known.par),
        "best": best[0] if best else "",
        "rows": rows,
        "untried": untried,
    }


def shown_status(result: dict[str, Any]) -> str:
    """Return the status of a puzzle's result in the words that classmates see."""
    return result["status"] if result["status"] in ORDER else NOT_RUN
