"""Examine one submission: run its cells in a sandbox, and try and judge each answer.

Each answer is tried on hidden inputs. Among its tries is a control: an answer that is known to be
wrong, on its own inputs. If the control looks right, or wrong in an unexpected way, the notebook
has changed the code that measures answers. Then a person decides about the exercise.
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
from labcourse.sandbox import ENDING, EndedError, Sandbox, SubmissionProcess
from labkit import checks
from labkit.processes.time_limits import TimeLimit
from labkit.puzzles.outcome import NOT_RUN, OVER_BUDGET, RIGHT, WRONG

# The ways in which a submission or an exercise can end without a verdict, in words.
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
VOID = ("tampered", "unreadable")  # no exercise of such a submission counts
UNMARKED = (*VOID, "failed")  # such submissions get no mark. Failed ones are graded again.
FINISHED = ("graded", "errors", "altered")  # the notebook ran to its end, so 0 points are a mark
ENDED = [kind for kind in KINDS if kind not in (*FINISHED, *UNMARKED)]
SEVERITY = [*FINISHED, *ENDED, "failed", *VOID]  # the worst problem last
LARGEST_FIGURE = 4000  # pixels per side
LONGEST_ANSWER = 20_000  # characters of an answer, written or in code
LONGEST_TEXT = 600  # characters of a text that a submission can influence
LONGEST_OBSERVATION = 4000  # characters of an observation in a record
_HARMFUL = re.compile(  # control characters, halves of surrogate pairs, and non-characters
    "[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069"
    "\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]"
)
_NO_MODULE = re.compile(r"No module named '(\w+)")
_NOT_DEFINED = re.compile(r"name '\w+' is not defined")
_OUT_OF_MEMORY = re.compile(r"\bMemoryError\b|can't allocate memory|Cannot allocate memory")


@dataclass
class Examined:
    """Result of an examination.

    Attributes:
        status: "graded", or a key of `KINDS`.
        detail: a sentence that explains the status, or "".
        exercises: one result per exercise, in order, as `outcome` makes it.
        remarks: what the instructor should know.
        cell_errors: the errors of cells, each as [number of the code cell, class, message].
        figures: PNG images in base64, from the cells that the student wrote.
        written: the written answers, by the ids of the questions.
        beside: what the student wrote in other cells, for each answer that is empty.
        sources: the source of each exercise's cell, below the cells with functions that it uses.
        memory: the peak memory of the submission's processes, in bytes.
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
        """The points of all exercises, or None if there is no mark.

        0 points are a mark only if the notebook ran to its end.
        """
        total = sum(result["points"] for result in self.exercises)
        if self.status in UNMARKED or (not total and self.status not in FINISHED):
            return None
        return total

    def note(self, kind: str, detail: str) -> None:
        """Add a remark with a detail to the submission.

        The worst kind of problem so far becomes the submission's status.
        """
        if SEVERITY.index(kind) > SEVERITY.index(self.status):
            self.status, self.detail = kind, detail
        remark = KINDS[kind]
        if detail:
            remark += f": {detail}"
        if remark not in self.remarks:
            self.remarks.append(remark)


def examine(
    data: bytes,
    student: str,
    lab: Assignment,
    course: Course,
    handed_out: frozenset[str],
    sandbox: Sandbox,
) -> Examined:
    """Examine the content of one notebook file.

    `handed_out` has the sources of the released notebook's cells. The figures of these code cells
    are not kept.
    """
    examined = Examined()
    names = {item.number: item.name for item in lab.exercises if not item.is_puzzle}
    try:
        about = f"reading {lab.name} of {student}"
        notebook = sandbox.reader.call(reading.parse, data, names, handed_out, about=about)
    except reading.UnreadableError as error:
        examined.note("unreadable", str(error))
        return examined
    answers = written.answers(notebook.cells, [task.id for task in lab.written], handed_out)
    for name, answer in answers.items():
        examined.written[name] = text(answer.text, LONGEST_ANSWER)
        examined.beside[name] = text(answer.beside, LONGEST_ANSWER)
    for number, source in notebook.answers.items():
        examined.sources[number] = text(source, LONGEST_ANSWER)
    untouched = set()  # the puzzles whose cell is as it was handed out, or is gone
    for puzzle in lab.puzzles:
        place = notebook.places.get(puzzle.number)
        if place is None or notebook.code[place - 1] in handed_out:
            untouched.add(puzzle.number)
            examined.sources.pop(puzzle.number, None)
    cells = [{"source": source, "figures": source not in handed_out} for source in notebook.code]
    results: dict[str, dict[str, Any]] = {}
    examination = _Examination(cells, student, lab, course, sandbox, examined)
    examination.run(results)
    examination.score([item for item in lab.puzzles if item.number not in untouched], results)
    if examined.status not in VOID:
        for item in lab.puzzles:
            if item.number in untouched:
                results[item.number] = outcome(item, "not attempted", "")
    for exercise in lab.exercises:
        if examined.status in VOID or exercise.number not in results:
            words = KINDS.get(examined.status, "")
            results[exercise.number] = outcome(exercise, examined.status, words)
        place = notebook.places.get(exercise.number)
        result = results[exercise.number]
        if exercise.number not in untouched:
            source = examined.sources.get(exercise.number, "")
            result = _explained(result, exercise, place, source, examined.cell_errors)
        if result["status"] in ("wrong", "not attempted"):
            missing = _missing(result["message"], examined.cell_errors)
            if missing:
                result |= {"status": "missing", "message": KINDS["missing"]}
                examined.note("missing", f"{exercise.number} imports {missing}")
        examined.exercises.append(result)
        untried = results[exercise.number]["status"] == "not attempted"
        there = notebook.tagged | notebook.checked | notebook.puzzles
        if untried and exercise.number not in there:
            detail = f"neither the cell of {exercise.number} nor its check is there"
            examined.note("altered", detail)
    if examined.cell_errors and not any(
        result["status"] == "right" for result in examined.exercises
    ):
        examined.note("errors", f"the first in code cell {examined.cell_errors[0][0]}")
    return examined


def _explained(
    result: dict[str, Any],
    exercise: Exercise,
    place: int | None,
    source: str,
    errors: list[list[Any]],
) -> dict[str, Any]:
    """Return the result of an exercise, with the reason why its cell defined no answer, if any.

    Without this, the result would say that nobody tried the exercise. The reason is an error that
    the cell raised, or another name of the function in `source`. `place` is the number of the cell,
    and `errors` are those of all cells.
    """
    error = next((error for error in errors if error[0] == place), None)
    expected = NOT_RUN if exercise.is_puzzle else "not attempted"
    if result["status"] != expected:
        return result
    if error is None:
        names = re.findall(r"^(?:def|class) (\w+)", source, re.MULTILINE)
        if exercise.is_puzzle or not names or exercise.name in names:
            return result
        other = f"your cell defines {', '.join(names)}"
        said = text(f"Not yet: {other}. The check needs a function with the name {exercise.name}")
        return result | {"status": "wrong", "message": said}
    said = error[2] or error[1]
    status = NOT_RUN if exercise.is_puzzle else "wrong"
    return result | {"status": status, "message": text(f"Not yet: your cell did not run: {said}")}


def _missing(message: str, errors: list[list[Any]]) -> str:
    """Return the name of a module that an answer needs and this computer lacks, or "".

    Args:
        message: the verdict. If a cell failed to import a module, a name is undefined.
        errors: the errors that the cells raised.
    """
    said = [message]
    if _NOT_DEFINED.search(message):
        said += [text for _, name, text in errors if name == "ModuleNotFoundError"]
    for name in _NO_MODULE.findall(" ".join(said)):
        if importlib.util.find_spec(name) is None:
            return str(name)
    return ""


class _Examination:
    """The runs of one submission in the sandbox.

    Usually there is one run. If a run had to be ended, another run tries the remaining exercises.
    All runs together take no longer than the course allows.
    """

    def __init__(
        self,
        cells: list[dict[str, Any]],
        student: str,
        lab: Assignment,
        course: Course,
        sandbox: Sandbox,
        examined: Examined,
    ) -> None:
        self._cells, self._student, self._lab, self._course = cells, student, lab, course
        self._sandbox, self._limits, self._examined = sandbox, sandbox.limits, examined
        self._limit: TimeLimit | None = None
        self._first = True  # no run has begun yet

    def run(self, results: dict[str, dict[str, Any]]) -> None:
        """Try all exercises, and put their results into `results` by the exercises' numbers."""
        remaining = [exercise for exercise in self._lab.exercises if not exercise.is_puzzle]
        while remaining and self._examined.status not in VOID:
            with self._sandbox.run() as process:
                self._begin()
                try:
                    self._run_cells(process)
                    self._try_exercises(process, remaining, results)
                except EndedError as error:
                    self._note_end(error)
                    remaining.clear()
            self._note_use(process)

    def score(self, puzzles: list[Exercise], results: dict[str, dict[str, Any]]) -> None:
        """Score the functions of puzzles, and put their results into `results` by their names.

        The notebook's cells run in one process, which only names the functions. Each function then
        runs in a new process, so that neither a cell nor another function can change its score.
        """
        if not puzzles or self._examined.status in VOID:
            return
        functions: dict[str, dict[str, Any]] = {}
        with self._sandbox.run() as process:
            self._begin()
            try:
                self._run_cells(process)
                for puzzle in puzzles:
                    question = {"called": puzzle.number}
                    functions[puzzle.number] = process.ask(question, self._limits.trial_seconds)
            except EndedError as error:
                self._note_end(error)
        self._note_use(process)
        for puzzle in puzzles:
            if puzzle.number in functions and self._examined.status not in VOID:
                result = self._scored(puzzle, functions[puzzle.number])
                results[puzzle.number] = result
                if result["status"] in KINDS:
                    self._examined.note(result["status"], f"{puzzle.number}: {result['message']}")

    def _scored(self, puzzle: Exercise, told: dict[str, Any]) -> dict[str, Any]:
        """Score one function in a new process, and return its result.

        `told` is what the process of the cells reported about the function.
        """
        if not told:  # an error of its cell is explained later
            return outcome(puzzle, NOT_RUN, "Not yet: your cell does not call labkit.puzzle")
        if type(told.get("raised")) is str:
            return outcome(puzzle, NOT_RUN, text(f"Not yet: {told['raised']}"))
        seconds = self._seconds(self._limits.trial_seconds)
        if not seconds:
            return outcome(puzzle, "time", f"the submission used up its {self._limits.seconds:g} s")
        sent = {"function": told.get("function"), "file": told.get("file")}
        lines = told.get("lines")
        if [type(part) for part in sent.values()] != [str, str] or type(lines) is not list:
            return outcome(puzzle, "disturbed", "your function cannot be read")
        question = {
            "puzzle": puzzle.number,
            **sent,
            "lines": [str(line) for line in lines],
            "random": self._number(puzzle.number),
            "seconds": seconds,
        }
        with self._sandbox.run() as process:
            try:
                process.ask({"cells": [], "random": 0, "seconds": 1.0}, ENDING)
                reply = process.ask(question, seconds)
            except EndedError as error:
                return outcome(puzzle, error.kind, KINDS[error.kind])
        self._note_use(process)
        if reply.get("late") is True:
            return outcome(puzzle, "time", f"your function took longer than {seconds:.3g} s")
        judgement: Any = reply.get("judgement")
        if not is_judgement(judgement):
            return outcome(puzzle, "disturbed", "what your function did cannot be judged")
        result = outcome(puzzle, judgement["status"], text(judgement["message"]))
        if judgement["status"] in (RIGHT, OVER_BUDGET):
            result["score"] = judgement["score"]
        if judgement["status"] == RIGHT:
            result["points"] = puzzle.points
        return result

    def _begin(self) -> None:
        """Start to count the submission's time. Call this when the sandbox has started."""
        if self._limit is None:
            self._limit = self._sandbox.time_limit(self._limits.seconds)

    def _note_end(self, error: EndedError) -> None:
        """Add a remark that says why the process of the cells had to be ended."""
        detail = str(error)
        if detail == error.kind:
            detail = "while its cells ran"
        self._examined.note(error.kind, text(detail))

    def _note_use(self, process: SubmissionProcess) -> None:
        """Note the memory of a process that has ended, and what it changed in the fork server."""
        self._examined.memory = max(self._examined.memory, process.memory)
        if process.changed:
            changed = text(", ".join(process.changed), 200)
            detail = f"it changed the process that runs all submissions: {changed}"
            self._examined.note("tampered", detail)

    def _seconds(self, most: float) -> float:
        """Return how many seconds the submission may still use, at most `most`."""
        if self._limit is None:
            return max(0.0, most)
        return max(0.0, min(most, self._limit.remaining()))

    def _run_cells(self, process: SubmissionProcess) -> None:
        """Run all cells. In the first run, keep their errors and figures."""
        first, self._first = self._first, False
        message = {
            "cells": self._cells,
            "random": self._number("cells"),
            "seconds": self._seconds(self._limits.cell_seconds),
        }
        report = process.ask(message, self._seconds(self._limits.seconds))
        errors, figures = report.get("errors"), report.get("figures")
        if type(errors) is not list or type(figures) is not list:
            raise EndedError("tampered", "its report on the cells has a wrong form")
        if not first:
            return
        self._examined.figures = [image for image in figures[:20] if is_png(image)]
        for error in errors[: len(self._cells)]:
            if not (type(error) is list and [type(part) for part in error] == [int, str, str]):
                raise EndedError("tampered", "its report on the cells has a wrong form")
            number, name, said = error
            said = re.sub(r"\(<ipython-input[^>]*>, ", "(", said)
            self._examined.cell_errors.append([number, text(name, 100), text(said)])
            if name == "OutOfTime":
                seconds = f"{self._limits.cell_seconds:g} s"
                self._examined.note("time", f"code cell {number} took longer than {seconds}")
            elif _OUT_OF_MEMORY.search(f"{name} {said}"):
                self._examined.note("memory", f"in code cell {number}")

    def _try_exercises(
        self,
        process: SubmissionProcess,
        remaining: list[Exercise],
        results: dict[str, dict[str, Any]],
    ) -> None:
        """Try the remaining exercises in order, until the process has ended."""
        while remaining:
            exercise = remaining.pop(0)
            if not self._seconds(1.0):
                detail = f"the submission used up its {self._limits.seconds:g} s"
                results[exercise.number] = outcome(exercise, "time", detail)
                self._examined.note("time", f"{exercise.number}: {detail}")
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
                return  # the process has ended, or can no longer be trusted

    def _tried(self, process: SubmissionProcess, exercise: Exercise) -> dict[str, Any]:
        """Try one exercise. It is right if every try is right and the control is wrong."""
        pattern, known_wrong = control(exercise.number)
        order = [""] * self._course.tries + [known_wrong]
        random.Random(self._number(exercise.number)).shuffle(order)
        seen, verdicts = [], []
        check = checks.find(exercise.number)
        for number, source in enumerate(order, 1):
            name = f"{exercise.number}/{number}"
            try:
                inputs = check.draw(random.Random(self._number(name)))
            except Exception as error:
                return self._failed(exercise, error)
            seconds = self._seconds(self._limits.trial_seconds)
            question = {
                "exercise": exercise.number,
                "name": exercise.name,
                "inputs": inputs,
                "wrong_answer": source,
                "random": self._number(f"{name}/random"),
                "seconds": max(0.001, seconds),
            }
            reply = process.ask(question, seconds)
            if reply.get("late") is True:
                return outcome(exercise, "time", f"your answer took longer than {seconds:.3g} s")
            observation = reply.get("observation")
            if not is_observation(observation):
                return outcome(exercise, "disturbed", "what your answer did cannot be judged")
            about = f"judging {exercise.number} of {self._student}"
            try:
                verdict = self._sandbox.reader.call(
                    judging.verdict,
                    exercise.number,
                    observation,
                    inputs,
                    about=about,
                )
            except Exception as error:  # an error of the check, which belongs to the kit
                return self._failed(exercise, error)
            if not source:
                seen.append(shortened(observation))
                verdicts.append(verdict)
            elif verdict.passed or not re.search(pattern, verdict.message):
                instead = text(verdict.message, 200)
                detail = f"an answer that is known to be wrong was judged as: {instead}"
                return outcome(exercise, "disturbed", detail)
        verdict = next((verdict for verdict in verdicts if not verdict.passed), verdicts[0])
        points = 0.0
        if verdict.passed:
            status, points = "right", exercise.points
        elif verdict.message == "not attempted":
            status = "not attempted"
        else:
            status = "wrong"
        return outcome(exercise, status, text(verdict.message)) | {
            "points": points,
            "observed": seen,
        }

    def _failed(self, exercise: Exercise, error: Exception) -> dict[str, Any]:
        """Return the result of an exercise whose check raised an error.

        Such an error is not the fault of the answer.
        """
        said = text(f"{type(error).__name__}: {error}", 300)
        self._examined.note("failed", f"the check of {exercise.number} raised {said}")
        return outcome(exercise, "failed", "the grader has an error here, and not the answer")

    def _number(self, what: str) -> int:
        """Return a 128-bit number for the purpose `what`, which is the same in each grading.

        Nobody can compute one of these numbers from others without knowing the seed.
        """
        purpose = f"{self._student}/{self._lab.name}/{what}".encode()
        digest = hmac.digest(str(self._course.seed).encode(), purpose, hashlib.sha256)
        return int.from_bytes(digest[:16], "big")


def outcome(exercise: Exercise, status: str, message: str) -> dict[str, Any]:
    """Return the result of an exercise with 0 points.

    `status` is "right", "wrong", "not attempted" or a key of `KINDS`. A puzzle may also be
    "over budget" or "could not be run".
    """
    return {
        "number": exercise.number,
        "status": status,
        "points": 0.0,
        "out_of": exercise.points,
        "message": message,
        "observed": [],
    }


def is_judgement(value: Any) -> bool:
    """Return whether a value has the form of a puzzle's judgement, as plain data."""
    if type(value) is not dict or list(value) != ["status", "message", "score"]:
        return False
    status, message, score = value.values()
    if type(message) is not str or status not in (RIGHT, OVER_BUDGET, WRONG, NOT_RUN):
        return False
    if score is None:
        return status == NOT_RUN
    return type(score) in (int, float) and math.isfinite(score) and score >= 0


def is_observation(value: Any) -> bool:
    """Return whether a value has the form that a check's `observe` returns."""
    known = {"observed": object, "left": str, "raised": str, "attempted": bool}
    if type(value) is not dict:
        return False
    if tuple(value) not in (("observed", "left"), ("raised",), ("attempted",)):
        return False
    return all(isinstance(part, known[key]) for key, part in value.items())


def shortened(observation: Any) -> Any:
    """Return an observation in a form that suits the record.

    Long observations are cut, because they hold whole tensors. Numbers that JSON lacks become text.
    Addresses are removed, because they differ from run to run.
    """
    full = json.dumps(_finite(observation), ensure_ascii=False)
    if len(full) > LONGEST_OBSERVATION:
        return f"{len(full)} characters: {full[:200]} …"
    return json.loads(_without_addresses(full))


def _finite(value: Any) -> Any:
    """Replace infinite numbers and NaN with text."""
    if isinstance(value, dict):
        return {key: _finite(element) for key, element in value.items()}
    if isinstance(value, list):
        return [_finite(element) for element in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def text(said: str, longest: int = LONGEST_TEXT) -> str:
    """Make a text safe to show, and cut it to at most `longest` characters.

    A submission may have influenced the text. Harmful characters are removed, and also addresses in
    memory, because they differ from run to run.
    """

    def harmless(letter: str) -> str:
        if letter in "\n\t" or not _HARMFUL.match(letter):
            return letter
        return "\ufffd"

    plain = _without_addresses("".join(map(harmless, said[: 2 * longest])))
    if len(plain) > longest:
        return plain[: longest - 1] + "…"
    return plain


def _without_addresses(said: str) -> str:
    """Remove addresses in memory, such as 0x7f…, from a text."""
    return re.sub(r"0x[0-9a-f]{6,}", "0x…", said)


def is_png(image: Any) -> bool:
    """Return whether a value is a PNG image of moderate size, in base64."""
    if type(image) is not str or len(image) > 600_000:
        return False
    try:
        data = base64.b64decode(image, validate=True)
    except (binascii.Error, ValueError):
        return False
    if not data.startswith(b"\x89PNG\r\n\x1a\n") or len(data) < 24 or data[12:16] != b"IHDR":
        return False
    return all(0 < side <= LARGEST_FIGURE for side in struct.unpack(">II", data[16:24]))
