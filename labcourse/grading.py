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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import labkit
from labcourse import release, wall
from labcourse.assignment import Course, Lab
from labcourse.collect import Submission
from labcourse.examination import examine
from labcourse.sandbox import Sandbox
from labcourse.wall import Wall

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
        return self.folder / "records" / lab / f"{student}.json"

    def record(self, lab: str, student: str) -> dict[str, Any] | None:
        try:
            return json.loads(self.record_path(lab, student).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def figures(self, lab: str, student: str) -> list[Path]:
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
            _write(self._figure(lab, student, number), image)
        _write(self._resources(lab, student), as_json(graded.resources))
        self.write_record(graded.record)

    def write_record(self, record: dict[str, Any]) -> None:
        _write(self.record_path(record["lab"], record["student"]), as_json(record))

    def join_resources(self) -> None:
        """One `resources.json` of all that was used: unlike the rest it differs from run to run."""
        files = sorted((self.folder / "resources").glob("*/*.json"))
        used = {f"{path.parent.name}/{path.stem}": json.loads(path.read_text(encoding="utf-8")) for path in files}
        _write(self.folder / "resources.json", as_json(used))


def as_json(content: Any) -> bytes:
    return (json.dumps(content, indent=1, ensure_ascii=False, sort_keys=True, allow_nan=False) + "\n").encode()


def _write(path: Path, data: bytes) -> None:
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


def fingerprint(submission: Submission, lab: Lab, course: Course) -> str:
    """Of everything that a result depends on, the sandbox's strength apart."""
    parts = [submission.student, submission.digest, lab.exercises, lab.written, course.seed, course.tries, course.limits, versions()]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


class Grader:
    """Examines submissions in one sandbox, one after another. Each worker has one."""

    def __init__(self, course: Course, handed_out: HandedOut, sandbox: Sandbox) -> None:
        self._course, self._handed_out, self._sandbox = course, handed_out, sandbox

    def grade(self, submission: Submission) -> Graded:
        course, lab = self._course, self._course.lab(submission.lab)
        began = time.monotonic()
        examined = examine(submission.read(), submission.student, lab, course, self._handed_out[lab.name], self._sandbox)
        record = {
            "student": submission.student,
            "lab": lab.name,
            "status": examined.status,
            "detail": examined.detail,
            "points": examined.points,
            "out_of": lab.points,
            "exercises": examined.exercises,
            "written": [{"id": task.id, "answer": examined.written.get(task.id, ""), "out_of": task.points} for task in lab.written],
            "cell_errors": examined.cell_errors,
            "remarks": examined.remarks,
            "figures": [hashlib.sha256(image.encode()).hexdigest() for image in examined.figures],
            "seed": course.seed,
            "versions": versions(),
            "sandbox": self._sandbox.wall.name,
            "submission": submission.digest,
            "received": submission.received,
            "fingerprint": fingerprint(submission, lab, course),
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
    progress: Callable[..., None] = lambda *said: None,
) -> int:
    """Grade what has no record yet, write each result, and return how many were graded.

    Args:
        workers: processes on this machine, each behind a wall of its own.
        scheduler: a Dask scheduler's address; its workers, which need labkit too, do the work then.
        sandbox: the wall's name, as in `wall.best`.
        progress: gets a line, and the share that is done where there is one.
    """
    known = ((item, store.record(item.lab, item.student)) for item in submissions)
    open_ends = [item for item, record in known if not record or record["fingerprint"] != fingerprint(item, course.lab(item.lab), course)]
    if len(open_ends) < len(submissions):
        progress(f"{len(submissions) - len(open_ends)} of {len(submissions)} were graded before")
    if not open_ends:
        return 0
    given = {lab.name: release.handed_out(course, lab) for lab in course.labs}
    if scheduler:
        results = _on_cluster(course, given, open_ends, scheduler, sandbox)
    else:
        results = _here(course, given, open_ends, workers, sandbox, progress)
    began = time.monotonic()
    with contextlib.closing(results):  # whatever happens, no sandbox is left
        for count, graded in enumerate(results, 1):
            store.write(graded)
            left = (time.monotonic() - began) / count * (len(open_ends) - count)
            what = f"{graded.record['lab']} of {graded.record['student']}: {graded.record['status']}"
            progress(f"{count} of {len(open_ends)}, {_clock(left)} left · {what}", count / len(open_ends))
    return len(open_ends)


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def _here(
    course: Course,
    given: HandedOut,
    submissions: list[Submission],
    workers: int,
    sandbox: str | None,
    progress: Callable[..., None],
) -> Iterator[Graded]:
    """The results of threads that each talk to a sandbox, as they come."""
    barrier = wall.best(course.limits.scratch, sandbox)
    if barrier.warning:
        progress(f"WARNING: {barrier.warning}")
    waiting: queue.SimpleQueue[Submission] = queue.SimpleQueue()
    for submission in submissions:
        waiting.put(submission)
    done: queue.Queue[Graded | BaseException | None] = queue.Queue(maxsize=2 * workers)
    stopped = threading.Event()
    threads = [threading.Thread(target=_work, args=(course, given, barrier, waiting, done, stopped), daemon=True) for _ in range(workers)]
    for thread in threads:
        thread.start()
    left = len(threads)
    try:
        while left:
            result = done.get()
            if isinstance(result, BaseException):
                raise result
            if result is None:
                left -= 1
            else:
                yield result
    finally:
        stopped.set()
        for thread in threads:
            while thread.is_alive():
                with contextlib.suppress(queue.Empty):
                    done.get(timeout=0.1)


def _work(course: Course, given: HandedOut, barrier: Wall, waiting: Any, done: Any, stopped: threading.Event) -> None:
    try:
        with Sandbox(barrier, course.limits) as box:
            grader = Grader(course, given, box)
            while not stopped.is_set():
                done.put(grader.grade(waiting.get_nowait()))
    except queue.Empty:
        pass
    except BaseException as error:
        done.put(error)
        return
    done.put(None)


def _on_cluster(course: Course, given: HandedOut, submissions: list[Submission], scheduler: str, sandbox: str | None) -> Iterator[Graded]:
    """The results of a Dask cluster's workers. A worker that is lost loses nothing: what it had goes to another."""
    from distributed import Client, as_completed

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
        _on_worker.sandbox, _on_worker.key = Sandbox(wall.best(course.limits.scratch, sandbox), course.limits), key
    return Grader(course, given, _on_worker.sandbox).grade(submission)
