"""Grading a class: each submission examined once, by several workers here or on a Dask cluster, and every result written as it comes.

A result's record bears the fingerprint of all that it came from. Whoever starts again grades only what has no record of that fingerprint.
"""

import base64
import contextlib
import hashlib
import json
import os
import platform
import queue
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import labkit
from labcourse import backends, examination, release
from labcourse.assignment import Assignment, Course
from labcourse.backends import Backend
from labcourse.collect import Submission
from labcourse.examination import Examined, examine
from labcourse.sandbox import Sandbox

__all__ = ["Graded", "Store", "grade_all"]

HandedOut = dict[str, frozenset[str]]  # the cells of each lab that students were given
PATIENCE = 15.0  # seconds until a scheduler has answered
IN_FLIGHT = 4  # submissions a worker that wait on a cluster: memory stays flat


@dataclass(frozen=True)
class Graded:
    """One submission's record, its figures (PNG), and what it used."""

    record: dict[str, Any]
    figures: list[bytes]
    resources: dict[str, Any]


class Store:
    """The folder with all results: `records/LAB/STUDENT.json`, `figures/LAB/STUDENT-1.png`, `resources.json`.

    Raises ValueError for a folder that holds something else, which results might replace.
    """

    def __init__(self, folder: Path) -> None:
        if folder.is_dir() and any(folder.iterdir()) and not (folder / "records").is_dir():
            raise ValueError(f"{folder} holds other files: choose a new folder, an empty one, or that of an earlier grading")
        self.folder = folder
        (folder / "records").mkdir(parents=True, exist_ok=True)

    def record_path(self, lab: str, student: str) -> Path:
        """Where the record of a submission lies, or will."""
        return self.folder / "records" / lab / f"{student}.json"

    def record(self, lab: str, student: str) -> dict[str, Any] | None:
        """The record of a submission; None where there is none that can be read."""
        try:
            record: dict[str, Any] = json.loads(self.record_path(lab, student).read_text(encoding="utf-8"))
            return record
        except (OSError, ValueError):
            return None

    def figures(self, lab: str, student: str) -> list[Path]:
        """The pictures that a submission's cells drew, in order."""
        count = len((self.record(lab, student) or {}).get("figures", []))
        return [self._figure(lab, student, number) for number in range(1, count + 1)]

    def _figure(self, lab: str, student: str, number: int) -> Path:
        return self.folder / "figures" / lab / f"{student}-{number}.png"

    def _resources(self, lab: str, student: str) -> Path:
        return self.folder / "resources" / lab / f"{student}.json"

    def remove(self, lab: str, student: str) -> None:
        """All of a submission that is there no more."""
        for path in (*self.figures(lab, student), self._resources(lab, student), self.record_path(lab, student)):
            path.unlink(missing_ok=True)

    def write(self, graded: Graded) -> None:
        """The record last: it says that all the rest is there."""
        lab, student = graded.record["lab"], graded.record["student"]
        for number, image in enumerate(graded.figures, 1):
            write_file(self._figure(lab, student, number), image)
        write_file(self._resources(lab, student), as_json(graded.resources))
        self.write_record(graded.record)

    def write_record(self, record: dict[str, Any]) -> None:
        """Replace the record of a submission, which the record names."""
        write_file(self.record_path(record["lab"], record["student"]), as_json(record))

    def join_resources(self) -> None:
        """One `resources.json` of all that was used: unlike the rest it differs from run to run."""
        files = sorted((self.folder / "resources").glob("*/*.json"))
        used = {f"{path.parent.name}/{path.stem}": json.loads(path.read_text(encoding="utf-8")) for path in files}
        write_file(self.folder / "resources.json", as_json(used))


def as_json(content: Any) -> bytes:
    return (json.dumps(content, indent=1, ensure_ascii=False, sort_keys=True, allow_nan=False) + "\n").encode()


def write_file(path: Path, data: bytes) -> None:
    """The whole file, or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(data)
    os.replace(part, path)


def versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "labkit": labkit.__version__,
        **{name: metadata.version(name) for name in ("torch", "numpy")},
    }


def fingerprint(submission: Submission, lab: Assignment, course: Course) -> str:
    """Of everything that a result depends on, the sandbox's strength apart."""
    parts: list[Any] = [submission.student, submission.digest, lab.exercises, lab.written, course.seed]
    parts += [course.tries, course.limits, versions(), kit_digest()]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@cache
def kit_digest() -> str:
    """A digest of the code that marks come from: the checks, their controls and what they measure.

    A version's number does not change when somebody corrects a check in a clone of the kit.
    """
    found = hashlib.sha256()
    for package in backends.packages():
        for path in sorted(package.rglob("*")):
            if path.suffix in (".py", ".txt", ".toml"):
                name = path.relative_to(package.parent).as_posix()
                found.update(f"{name}\n{path.stat().st_size}\n".encode() + path.read_bytes())
    return found.hexdigest()


def grade(submission: Submission, course: Course, handed_out: HandedOut, sandbox: Sandbox) -> Graded:
    """Examine one submission and write down what is found."""
    lab = course.lab(submission.lab)
    began = time.monotonic()
    try:
        examined = examine(submission.read(), submission.student, lab, course, handed_out[lab.name], sandbox)
    except Exception as error:  # one submission never stops the others; the next grading tries it again
        sandbox.close(kill=True)
        examined = Examined(written={})
        examined.note("failed", f"{type(error).__name__}: {examination.text(str(error))}")
        examined.exercises = [examination.outcome(exercise, "failed", "") for exercise in lab.exercises]
    record = {
        "student": submission.student,
        "lab": lab.name,
        "status": examined.status,
        "detail": examined.detail,
        "points": examined.points,
        "out_of": lab.points,
        "exercises": examined.exercises,
        "written": [
            {
                "id": task.id,
                "answer": examined.written.get(task.id, ""),
                "beside": examined.beside.get(task.id, ""),
                "out_of": task.points,
            }
            for task in lab.written
        ],
        "sources": {exercise.number: examined.sources.get(exercise.number, "") for exercise in lab.exercises},
        "cell_errors": examined.cell_errors,
        "remarks": examined.remarks,
        "figures": [hashlib.sha256(image.encode()).hexdigest() for image in examined.figures],
        "seed": hashlib.sha256(course.seed.encode()).hexdigest()[:16],
        "versions": versions(),
        "sandbox": sandbox.backend.name,
        "submission": submission.digest,
        "received": submission.received,
        "known_from": submission.known_from,
        "fingerprint": "" if examined.status in ("failed", "missing") else fingerprint(submission, lab, course),
    }
    used = {"seconds": round(time.monotonic() - began, 3), "memory_bytes": examined.memory}
    return Graded(record, [base64.b64decode(image) for image in examined.figures], used)


def grade_all(
    course: Course,
    submissions: list[Submission],
    store: Store,
    workers: int = 1,
    scheduler: str | None = None,
    sandbox: str | None = None,
    progress: Callable[..., None] = lambda *line: None,
    again: Collection[str] = (),
) -> int:
    """Grade what has no record yet, or one from a weaker sandbox; write each result, and return how many were graded.

    Args:
        workers: how many at the same time on this machine, each in a sandbox of its own.
        scheduler: a Dask scheduler's address; its workers, which need labkit too, do the work then.
        sandbox: the name of a backend, as in `backends.best`.
        progress: gets a line, and the share that is done where there is one.
        again: "LAB/STUDENT" of what is graded anew.

    Raises ValueError for a name in `again` that is no submission, RuntimeError where the sandbox does not work.
    """
    wanted = {f"{item.lab}/{item.student}": item for item in submissions}
    wanted |= {f"{item.lab[:2]}/{item.student}": item for item in submissions}
    if unknown := [name for name in again if name not in wanted]:
        raise ValueError(
            f"--again {unknown[0]}: there is no such submission. Name it as LAB/STUDENT, such as {next(iter(wanted), '00/ada')}"
        )
    anew = {id(wanted[name]) for name in again}

    def is_done(item: Submission) -> bool:
        record = store.record(item.lab, item.student)
        if record is None or id(item) in anew or record["fingerprint"] != fingerprint(item, course.lab(item.lab), course):
            return False
        return backends.STRENGTH.index(record["sandbox"]) >= backends.STRENGTH.index(sandbox or "bubblewrap")

    remaining = [item for item in submissions if not is_done(item)]
    if len(remaining) < len(submissions):
        progress(f"{len(submissions) - len(remaining)} of {len(submissions)} were graded before")
    if not remaining:
        return 0
    given = {lab.name: release.handed_out(course, lab) for lab in course.labs}
    if scheduler:
        results = _on_cluster(course, given, remaining, scheduler, sandbox)
    else:
        private = private_paths(course, submissions, store)
        backend = backends.best(course.limits.scratch, sandbox, private)
        results = _here(course, given, remaining, workers, backend, progress)
    began = time.monotonic()
    with contextlib.closing(results):  # whatever happens, no sandbox is left
        for count, graded in enumerate(results, 1):
            with contextlib.suppress(Exception):  # its page says that it has no record
                store.write(graded)
            left = int((time.monotonic() - began) / count * (len(remaining) - count))
            status = examination.KINDS.get(graded.record["status"], graded.record["status"])
            what = f"{graded.record['lab']} of {graded.record['student']}: {status}"
            progress(f"{count} of {len(remaining)}, {left // 60}:{left % 60:02d} left · {what}", count / len(remaining))
    return len(remaining)


def private_paths(
    course: Course,
    submissions: Iterable[Submission] = (),
    store: Store | None = None,
) -> list[Path]:
    """The files and folders that no submission may see."""
    paths = [course.notebooks]
    if course.folder is not None:
        paths.append(course.folder)
    if store is not None:
        paths.append(store.folder)
    sources = dict.fromkeys(item.source for item in submissions)
    return [*paths, *(source for source in sources if source is not None)]


def _here(
    course: Course,
    given: HandedOut,
    submissions: list[Submission],
    workers: int,
    backend: Backend,
    progress: Callable[..., None],
) -> Generator[Graded, None, None]:
    """The results of threads that each talk to a sandbox, as they come."""
    if backend.warning:
        progress(f"WARNING: {backend.warning}")
    free: queue.SimpleQueue[Sandbox] = queue.SimpleQueue()

    def graded(submission: Submission) -> Graded:
        chosen = free.get()
        try:
            return grade(submission, course, given, chosen)
        finally:
            free.put(chosen)

    with contextlib.ExitStack() as stack:
        count = min(workers, len(submissions))
        boxes = [Sandbox(backend, course.limits, progress) for _ in range(count)]
        for box in boxes:
            free.put(stack.enter_context(box))
        boxes[0].start()  # a sandbox that does not start is no submission's fault
        pool = stack.enter_context(ThreadPoolExecutor(workers))
        stack.callback(pool.shutdown, cancel_futures=True)
        try:
            for future in as_completed([pool.submit(graded, item) for item in submissions]):
                yield future.result()
        except BaseException:  # also Ctrl-C: the threads wait for their sandboxes
            for box in boxes:
                box.stop()
            raise


def _on_cluster(
    course: Course, given: HandedOut, submissions: list[Submission], scheduler: str, sandbox: str | None
) -> Generator[Graded, None, None]:
    """The results of a Dask cluster's workers. A worker that is lost loses nothing: what it had goes to another."""
    try:
        from distributed import Client, as_completed
    except ImportError:
        raise RuntimeError("--scheduler needs Dask, which is not installed here: `pip install distributed`") from None

    remaining = iter(submissions)
    with Client(scheduler, set_as_default=False, timeout=PATIENCE) as client:
        slots = sum(client.nthreads().values()) or 1

        def submit() -> Any:
            item = next(remaining, None)
            return None if item is None else client.submit(grade_on_worker, course, given, item.loaded(), sandbox, pure=False)

        running = as_completed([future for _ in range(IN_FLIGHT * slots) if (future := submit()) is not None], loop=client.loop)
        for future in running:
            yield future.result()
            future.release()
            if (following := submit()) is not None:
                running.add(following)


_on_worker = threading.local()


def grade_on_worker(course: Course, given: HandedOut, submission: Submission, sandbox: str | None) -> Graded:
    """What a Dask worker does: each of its threads keeps a sandbox for the next submission."""
    key = (course.limits, sandbox)
    if getattr(_on_worker, "key", None) != key:
        if hasattr(_on_worker, "sandbox"):
            _on_worker.sandbox.close()
        backend = backends.best(course.limits.scratch, sandbox, private_paths(course))
        _on_worker.sandbox, _on_worker.key = Sandbox(backend, course.limits), key
    return grade(submission, course, given, _on_worker.sandbox)
