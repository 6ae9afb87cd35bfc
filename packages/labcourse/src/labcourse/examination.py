"""One submission's examination: its cells run in a sandbox, each answer is tried on hidden inputs, and judged here.

Among the tries of each answer is a control: an answer that is known to be wrong, on inputs of its
own. If the control looks right, or wrong in another way, the notebook has changed what answers are
measured with. Then a person decides about the exercise.
"""

import base64
import binascii
import hashlib
import hmac
import importlib.util
import json
import math
import random
import re
import struct
from dataclasses import dataclass, field
from typing import Any

from labcourse import judging, reading, written
from labcourse.assignment import Assignment, Course, Exercise
from labcourse.controls import control
from labcourse.sandbox import EndedError, Sandbox, SubmissionProcess
from labkit import checks
from labkit.processes.time_limits import TimeLimit

# How a submission or an exercise can end other than graded, in words.
KINDS = {
    "tampered": "tampered with",
    "time": "ran out of time",
    "memory": "ran out of memory",
    "output": "printed too much",
    "processes": "started too many processes",
    "ended": "its process ended early",
    "disturbed": "could not be observed",
    "missing": "needs a module that is not installed where it was graded",
    "altered": "the notebook was altered",
    "errors": "its cells raised errors",
    "unreadable": "cannot be read",
    "failed": "grading it failed",
}
VOID = ("tampered", "unreadable")  # nothing counts
UNMARKED = (*VOID, "failed")  # no mark: nothing counts, or the next grading tries it again
STANDING = ("graded", "errors", "altered")  # the notebook ran to its end: 0 points are a mark
ENDED = [kind for kind in KINDS if kind not in (*STANDING, *UNMARKED)]
SEVERITY = [*STANDING, *ENDED, "failed", *VOID]  # the worst problem last
LARGEST_FIGURE = 4000  # pixels on a side
LONGEST_ANSWER = 20_000  # characters of an answer, written or in code
LONGEST_TEXT = 600  # characters of what a submission may have a say in
LONGEST_OBSERVATION = 4000  # characters of an observation in a record
_HARMFUL = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")  # controls
_NO_MODULE = re.compile(r"No module named '(\w+)")
_NOT_DEFINED = re.compile(r"name '\w+' is not defined")
_OUT_OF_MEMORY = re.compile(r"\bMemoryError\b|can't allocate memory|Cannot allocate memory")


@dataclass
class Examined:
    """The result of an examination.

    Attributes:
        status: "graded" or a key of `KINDS`; `detail` says more.
        exercises: one result an exercise, in order.
        remarks: what a person should know.
        sources: what stands in the cell of each exercise.
        figures: PNG images, in base64, of the cells that the student wrote.
        written: the written answers, by their ids.
        beside: what a student who left an answer empty wrote in other cells.
        memory: bytes at most.
    """

    status: str = "graded"
    detail: str = ""
    exercises: list[dict[str, Any]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    cell_errors: list[list[Any]] = field(default_factory=list)
    figures: list[str] = field(default_factory=list)
    written: dict[str, str] = field(default_factory=dict)
    beside: dict[str, str] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    memory: int = 0

    @property
    def points(self) -> float | None:
        """The points of all exercises, or None where there is no mark.

        Zero points are a mark only where the notebook ran to its end.
        """
        total = sum(result["points"] for result in self.exercises)
        if self.status in UNMARKED or (not total and self.status not in STANDING):
            return None
        return total

    def note(self, kind: str, detail: str) -> None:
        """Add a remark. The worst kind of problem becomes the submission's status."""
        if SEVERITY.index(kind) > SEVERITY.index(self.status):
            self.status, self.detail = kind, detail
        remark = f"{KINDS[kind]}: {detail}" if detail else KINDS[kind]
        if remark not in self.remarks:
            self.remarks.append(remark)


def examine(data: bytes, student: str, lab: Assignment, course: Course, handed_out: frozenset[str], sandbox: Sandbox) -> Examined:
    """Examine one notebook file's content. `handed_out`: the code cells of the released notebook, whose figures nobody needs."""
    examined = Examined()
    try:
        name = f"reading {lab.name} of {student}"
        notebook = sandbox.reader.call(reading.parse, data, about=name)
    except reading.UnreadableError as error:
        examined.note("unreadable", str(error))
        return examined
    answers = written.answers(notebook.cells, [task.id for task in lab.written], handed_out)
    examined.written = {name: text(answer.text, LONGEST_ANSWER) for name, answer in answers.items()}
    examined.beside = {name: text(answer.beside, LONGEST_ANSWER) for name, answer in answers.items()}
    examined.sources = {number: text(notebook.code[place - 1], LONGEST_ANSWER) for number, place in notebook.places.items()}
    cells = [{"source": source, "figures": source not in handed_out} for source in notebook.code]
    results: dict[str, dict[str, Any]] = {}
    examination = _Examination(cells, student, lab, course, sandbox, examined)
    examination.run(results)
    for exercise in lab.exercises:
        if examined.status in VOID or exercise.number not in results:
            results[exercise.number] = outcome(exercise, examined.status, KINDS.get(examined.status, ""))
        result = _explained(results[exercise.number], notebook.places.get(exercise.number), examined.cell_errors)
        if result["status"] in ("wrong", "not attempted"):
            missing = _missing(result["message"], examined.cell_errors)
            if missing:
                result |= {"status": "missing", "message": KINDS["missing"]}
                examined.note("missing", f"{exercise.number} imports {missing}")
        examined.exercises.append(result)
        untried = results[exercise.number]["status"] == "not attempted"
        if untried and exercise.number not in notebook.tagged | notebook.checked:
            said = f"neither the cell of {exercise.number} nor its check is there"
            examined.note("altered", said)
    if examined.cell_errors and not any(result["points"] for result in examined.exercises):
        examined.note("errors", f"the first in code cell {examined.cell_errors[0][0]}")
    return examined


def _explained(result: dict[str, Any], place: int | None, errors: list[list[Any]]) -> dict[str, Any]:
    """The result of an exercise whose cell did not run: that it says so, not that nobody tried."""
    error = next((error for error in errors if error[0] == place), None)
    if result["status"] != "not attempted" or error is None:
        return result
    said = re.sub(r"\(<ipython-input[^>]*>, ", "(", error[2]) or error[1]
    return result | {"status": "wrong", "message": text(f"Not yet: your cell did not run: {said}")}


def _missing(message: str, errors: list[list[Any]]) -> str:
    """Return the module that an answer lacked and that this computer lacks, too, or "".

    Args:
        message: the verdict. A cell that failed to import a module leaves a name undefined.
        errors: what the cells raised.
    """
    said = [message]
    if _NOT_DEFINED.search(message):
        said += [text for _, name, text in errors if name == "ModuleNotFoundError"]
    for name in _NO_MODULE.findall(" ".join(said)):
        if importlib.util.find_spec(name) is None:
            return str(name)
    return ""


class _Examination:
    """The runs of one submission: one as a rule; another for the exercises that are left when one had to be ended.

    All together they take no longer than the course allows.
    """

    def __init__(
        self, cells: list[dict[str, Any]], student: str, lab: Assignment, course: Course, sandbox: Sandbox, examined: Examined
    ) -> None:
        self._cells, self._student, self._lab, self._course = cells, student, lab, course
        self._sandbox, self._limits, self._examined = sandbox, sandbox.limits, examined
        self._limit: TimeLimit | None = None

    def run(self, results: dict[str, dict[str, Any]]) -> None:
        remaining = list(self._lab.exercises)
        first = True
        while remaining and self._examined.status not in VOID:
            with self._sandbox.run() as process:
                if self._limit is None:  # now that the sandbox has started
                    self._limit = self._sandbox.time_limit(self._limits.seconds)
                try:
                    self._run_cells(process, first)
                    self._try_exercises(process, remaining, results)
                except EndedError as error:
                    self._examined.note(error.kind, text(str(error) if str(error) != error.kind else "while its cells ran"))
                    remaining.clear()
            self._examined.memory = max(self._examined.memory, process.memory)
            if process.changed:
                self._examined.note(
                    "tampered", f"of the process that runs all submissions it changed {text(', '.join(process.changed), 200)}"
                )
            first = False

    def _seconds(self, most: float) -> float:
        """What is left of the submission's time, and no more than that."""
        left = math.inf if self._limit is None else self._limit.remaining()
        return max(0.0, min(most, left))

    def _run_cells(self, process: SubmissionProcess, first: bool) -> None:
        message = {"cells": self._cells, "random": self._number("cells"), "seconds": self._seconds(self._limits.cell_seconds)}
        report = process.ask(message, self._seconds(self._limits.seconds))
        errors, figures = report.get("errors"), report.get("figures")
        if type(errors) is not list or type(figures) is not list:
            raise EndedError("tampered", "its report on the cells is none")
        if not first:
            return
        self._examined.figures = [image for image in figures[:20] if is_png(image)]
        for error in errors[: len(self._cells)]:
            if not (type(error) is list and [type(part) for part in error] == [int, str, str]):
                raise EndedError("tampered", "its report on the cells is none")
            number, name, message = error
            self._examined.cell_errors.append([number, text(name, 100), text(message)])
            if name == "OutOfTime":
                self._examined.note("time", f"code cell {number} took longer than {self._limits.cell_seconds:g} s")
            elif _OUT_OF_MEMORY.search(f"{name} {message}"):
                self._examined.note("memory", f"in code cell {number}")

    def _try_exercises(self, process: SubmissionProcess, remaining: list[Exercise], results: dict[str, dict[str, Any]]) -> None:
        """As many as the process lives for."""
        while remaining:
            exercise = remaining.pop(0)
            if not self._seconds(1.0):
                results[exercise.number] = outcome(exercise, "time", f"the submission's {self._limits.seconds:g} s were over")
                self._examined.note("time", f"{exercise.number}: {results[exercise.number]['message']}")
                continue
            try:
                result = self._tried(process, exercise)
            except EndedError as error:
                if error.kind in VOID:
                    raise
                result = outcome(exercise, error.kind, KINDS[error.kind])
            results[exercise.number] = result
            if result["status"] == "failed":
                continue
            if result["status"] in KINDS:
                self._examined.note(result["status"], f"{exercise.number}: {result['message']}")
                return  # the process is gone, or of no use any more

    def _tried(self, process: SubmissionProcess, exercise: Exercise) -> dict[str, Any]:
        """Try one exercise. It is right if every try is right and the control is wrong."""
        pattern, known_wrong = control(exercise.number)
        order = [""] * self._course.tries + [known_wrong]
        random.Random(self._number(exercise.number)).shuffle(order)
        seen, verdicts = [], []
        check = checks.find(exercise.number)
        for number, source in enumerate(order, 1):
            try:
                inputs = check.draw(random.Random(self._number(f"{exercise.number}/{number}")))
            except Exception as error:
                return self._failed(exercise, error)
            question = {"exercise": exercise.number, "name": exercise.name, "inputs": inputs, "wrong_answer": source}
            seconds = self._seconds(self._limits.trial_seconds)
            question |= {"random": self._number(f"{exercise.number}/{number}/random"), "seconds": max(0.001, seconds)}
            reply = process.ask(question, seconds)
            if reply.get("late") is True:
                return outcome(exercise, "time", f"your answer took longer than {seconds:.3g} s")
            observation = reply.get("observation")
            if not is_observation(observation):
                return outcome(exercise, "disturbed", "what it did cannot be judged")
            about = f"judging {exercise.number} of {self._student}"
            try:
                verdict = self._sandbox.reader.call(
                    judging.verdict,
                    exercise.number,
                    observation,
                    inputs,
                    about=about,
                )
            except Exception as error:  # of the check, which this grader brings along
                return self._failed(exercise, error)
            if not source:
                seen.append(shortened(observation))
                verdicts.append(verdict)
            elif verdict.passed or not re.search(pattern, verdict.message):
                seen_instead = text(verdict.message, 200)
                said = f"an answer that is known to be wrong was judged as: {seen_instead}"
                return outcome(exercise, "disturbed", said)
        verdict = next((verdict for verdict in verdicts if not verdict.passed), verdicts[0])
        status = "right" if verdict.passed else "not attempted" if verdict.message == "not attempted" else "wrong"
        points = exercise.points if verdict.passed else 0.0
        return outcome(exercise, status, text(verdict.message)) | {"points": points, "observed": seen}

    def _failed(self, exercise: Exercise, error: Exception) -> dict[str, Any]:
        """Report an error of the check, which says nothing about the answer."""
        said = text(f"{type(error).__name__}: {error}", 300)
        self._examined.note("failed", f"the check of {exercise.number} raised {said}")
        return outcome(exercise, "failed", "this is an error of the grader, not of the answer")

    def _number(self, what: str) -> int:
        """A number of 128 bits, the same in each regrading; who knows some of them, but not the seed, knows nothing of the others."""
        told = f"{self._student}/{self._lab.name}/{what}".encode()
        return int.from_bytes(hmac.digest(str(self._course.seed).encode(), told, hashlib.sha256)[:16], "big")


def outcome(exercise: Exercise, status: str, message: str) -> dict[str, Any]:
    return {"number": exercise.number, "status": status, "points": 0.0, "out_of": exercise.points, "message": message, "observed": []}


def is_observation(value: Any) -> bool:
    """Whether a check's `observe` can have returned this."""
    known = {"observed": object, "left": str, "raised": str, "attempted": bool}
    if type(value) is not dict:
        return False
    if tuple(value) not in (("observed", "left"), ("raised",), ("attempted",)):
        return False
    return all(isinstance(part, known[key]) for key, part in value.items())


def shortened(observation: Any) -> Any:
    """For the record: not the values of whole tensors; no numbers that JSON lacks, no addresses, which differ from run to run."""
    full = json.dumps(_finite(observation), ensure_ascii=False)
    return json.loads(_without_addresses(full)) if len(full) <= LONGEST_OBSERVATION else f"{len(full)} characters: {full[:200]} …"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(element) for key, element in value.items()}
    if isinstance(value, list):
        return [_finite(element) for element in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def text(said: str, longest: int = LONGEST_TEXT) -> str:
    """What a submission had a say in, as one harmless piece of text."""
    plain = "".join(letter if letter in "\n\t" or not _HARMFUL.match(letter) else "\ufffd" for letter in said[: 2 * longest])
    plain = _without_addresses(plain)
    return plain if len(plain) <= longest else plain[: longest - 1] + "…"


def _without_addresses(said: str) -> str:
    return re.sub(r"0x[0-9a-f]{6,}", "0x…", said)


def is_png(image: Any) -> bool:
    """Whether this is a PNG image of a sensible size, in base64."""
    if type(image) is not str or len(image) > 600_000:
        return False
    try:
        data = base64.b64decode(image, validate=True)
    except (binascii.Error, ValueError):
        return False
    if not data.startswith(b"\x89PNG\r\n\x1a\n") or len(data) < 24 or data[12:16] != b"IHDR":
        return False
    return all(0 < side <= LARGEST_FIGURE for side in struct.unpack(">II", data[16:24]))
