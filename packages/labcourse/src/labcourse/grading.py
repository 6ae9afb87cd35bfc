"""Grade a class: examine each submission, and write every result as soon as it is there.

Several workers examine the submissions, on this machine or on a Dask cluster. The record of a
result has a fingerprint of everything that the result depends on. If grading is started again, it
grades only the submissions that have no record with their current fingerprint.
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

HandedOut = dict[str, frozenset[str]]  # the sources of the cells that students got, by lab
PATIENCE = 15.0  # seconds until a scheduler has to answer
IN_FLIGHT = 4  # submissions per worker that wait on a cluster. More would take more memory.


@dataclass(frozen=True)
class Graded:
    """Result of grading a submission: its record, figures (PNG), time and memory."""

    record: dict[str, Any]
    figures: list[bytes]
    resources: dict[str, Any]


class Store:
    """Folder with all results.

    It has `records/LAB/STUDENT.json`, `figures/LAB/STUDENT-1.png` and `resources.json`.

    Raises:
        ValueError: the folder has other files, which results might replace.
    """

    def __init__(self, folder: Path) -> None:
        if folder.is_dir() and any(folder.iterdir()) and not (folder / "records").is_dir():
            choices = "Choose a new folder, an empty one, or the folder of an earlier grading"
            raise ValueError(f"{folder} has other files. {choices}")
        self.folder = folder
        (folder / "records").mkdir(parents=True, exist_ok=True)

    def record_path(self, lab: str, student: str) -> Path:
        """Return the path of a submission's record, which need not exist."""
        return self.folder / "records" / lab / f"{student}.json"

    def record(self, lab: str, student: str) -> dict[str, Any] | None:
        """Read the record of a submission. Return None if there is none that can be read."""
        try:
            record: dict[str, Any] = json.loads(
                self.record_path(lab, student).read_text(encoding="utf-8")
            )
            return record
        except (OSError, ValueError):
            return None

    def figures(self, lab: str, student: str) -> list[Path]:
        """List the images that a submission's cells drew, in order."""
        count = len((self.record(lab, student) or {}).get("figures", []))
        return [self._figure(lab, student, number) for number in range(1, count + 1)]

    def _figure(self, lab: str, student: str, number: int) -> Path:
        """Return the path of the image with this number that a submission's cells drew."""
        return self.folder / "figures" / lab / f"{student}-{number}.png"

    def _resources(self, lab: str, student: str) -> Path:
        """Return the path of the file with the time and memory that grading a submission took."""
        return self.folder / "resources" / lab / f"{student}.json"

    def remove(self, lab: str, student: str) -> None:
        """Remove all results of a submission."""
        record, resources = self.record_path(lab, student), self._resources(lab, student)
        for path in (*self.figures(lab, student), resources, record):
            path.unlink(missing_ok=True)

    def write(self, graded: Graded) -> None:
        """Write the result of a grading.

        The record is written last, so it implies the other files.
        """
        lab, student = graded.record["lab"], graded.record["student"]
        for number, image in enumerate(graded.figures, 1):
            write_file(self._figure(lab, student, number), image)
        write_file(self._resources(lab, student), as_json(graded.resources))
        self.write_record(graded.record)

    def write_record(self, record: dict[str, Any]) -> None:
        """Replace the record of the submission that the record names."""
        write_file(self.record_path(record["lab"], record["student"]), as_json(record))

    def join_resources(self) -> None:
        """Write `resources.json` with the time and memory of all submissions.

        It is a file of its own, because it differs from run to run.
        """
        used = {}
        for path in sorted((self.folder / "resources").glob("*/*.json")):
            name = f"{path.parent.name}/{path.stem}"
            used[name] = json.loads(path.read_text(encoding="utf-8"))
        write_file(self.folder / "resources.json", as_json(used))


def as_json(content: Any) -> bytes:
    """Return the content as JSON with sorted keys, in UTF-8."""
    text = json.dumps(content, indent=1, ensure_ascii=False, sort_keys=True, allow_nan=False)
    return f"{text}\n".encode()


def write_file(path: Path, data: bytes) -> None:
    """Write a file. If the write is interrupted, the old file is kept."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(data)
    os.replace(part, path)


def versions() -> dict[str, str]:
    """Return the versions of Python, of the kit and of its libraries."""
    return {
        "python": platform.python_version(),
        "labkit": labkit.__version__,
        **{name: metadata.version(name) for name in ("torch", "numpy")},
    }


def fingerprint(submission: Submission, lab: Assignment, course: Course) -> str:
    """Return a digest of everything that a submission's result depends on.

    The kind of sandbox is not part of it.
    """
    parts: list[Any] = [
        submission.student,
        submission.digest,
        lab.exercises,
        lab.written,
        course.seed,
    ]
    parts += [course.tries, course.limits, versions(), kit_digest()]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@cache
def kit_digest() -> str:
    """Return a digest of the code that marks depend on: the checks, the controls and the kit.

    The version number is not enough, because it does not change when somebody edits a clone.
    """
    found = hashlib.sha256()
    for package in backends.packages():
        for path in sorted(package.rglob("*")):
            if path.suffix in (".py", ".txt", ".toml"):
                name = path.relative_to(package.parent).as_posix()
                found.update(f"{name}\n{path.stat().st_size}\n".encode() + path.read_bytes())
    return found.hexdigest()


def grade(
    submission: Submission, course: Course, handed_out: HandedOut, sandbox: Sandbox
) -> Graded:
    """Examine one submission and return its record.

    An error of the grader becomes the status "failed" of the record.
    """
    lab = course.lab(submission.lab)
    began = time.monotonic()
    try:
        data = submission.read()
        examined = examine(data, submission.student, lab, course, handed_out[lab.name], sandbox)
    except Exception as error:  # the other submissions go on, and the next grading tries again
        sandbox.close(kill=True)
        examined = Examined(written={})
        examined.note("failed", f"{type(error).__name__}: {examination.text(str(error))}")
        examined.exercises = [
            examination.outcome(exercise, "failed", "") for exercise in lab.exercises
        ]
    mark = ""  # grade it again next time
    if examined.status not in ("failed", "missing"):
        mark = fingerprint(submission, lab, course)
    sources = examined.sources
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
        "sources": {item.number: sources.get(item.number, "") for item in lab.exercises},
        "cell_errors": examined.cell_errors,
        "remarks": examined.remarks,
        "figures": [hashlib.sha256(image.encode()).hexdigest() for image in examined.figures],
        "seed": hashlib.sha256(course.seed.encode()).hexdigest()[:16],
        "versions": versions(),
        "sandbox": sandbox.backend.name,
        "submission": submission.digest,
        "received": submission.received,
        "known_from": submission.known_from,
        "fingerprint": mark,
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
    """Grade the submissions that have no current result, and return how many there were.

    A submission is also graded again if its result comes from a weaker sandbox. Each result is
    written to `store` at once.

    Args:
        workers: how many submissions are graded on this machine at the same time. Each worker has
            its own sandbox.
        scheduler: the address of a Dask scheduler. Its workers, which need labkit, do the work.
        sandbox: the name of a backend, as in `backends.best`.
        progress: gets a line of text, and sometimes the finished share.
        again: the names "LAB/STUDENT" of submissions that are graded again in any case.

    Raises:
        ValueError: a name in `again` is not a submission.
        RuntimeError: the sandbox does not work.
    """
    wanted = {f"{item.lab}/{item.student}": item for item in submissions}
    wanted |= {f"{item.lab[:2]}/{item.student}": item for item in submissions}
    unknown = [name for name in again if name not in wanted]
    if unknown:
        example = next(iter(wanted), "00/ada")
        raise ValueError(
            f"--again {unknown[0]}: there is no such submission. Expected LAB/STUDENT, such as "
            f"{example}"
        )
    anew = {id(wanted[name]) for name in again}

    def is_done(item: Submission) -> bool:
        """Return whether a submission has a current result from a sandbox at least as strong."""
        record = store.record(item.lab, item.student)
        if record is None or id(item) in anew:
            return False
        if record["fingerprint"] != fingerprint(item, course.lab(item.lab), course):
            return False
        strength = backends.STRENGTH.index
        return strength(record["sandbox"]) >= strength(sandbox or "bubblewrap")

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
    with contextlib.closing(results):  # ends all sandboxes, also after an error
        for count, graded in enumerate(results, 1):
            with contextlib.suppress(Exception):  # `results.write` reports a record that is missing
                store.write(graded)
            record = graded.record
            left = int((time.monotonic() - began) / count * (len(remaining) - count))
            status = examination.KINDS.get(record["status"], record["status"])
            counts = f"{count} of {len(remaining)}, {left // 60}:{left % 60:02d} left"
            line = f"{counts} · {record['lab']} of {record['student']}: {status}"
            progress(line, count / len(remaining))
    return len(remaining)


def private_paths(
    course: Course,
    submissions: Iterable[Submission] = (),
    store: Store | None = None,
) -> list[Path]:
    """List the files and folders that no submission may see."""
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
    """Yield results from threads on this machine, in the order in which they are complete.

    Each of the `workers` threads uses a sandbox of its own. `given` are the handed-out cells.
    """
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
        progress("starting the sandbox, which imports PyTorch")
        boxes[0].start()  # if it fails, grading stops, because no submission is the cause
        pool = stack.enter_context(ThreadPoolExecutor(workers))
        stack.callback(pool.shutdown, cancel_futures=True)
        try:
            for future in as_completed([pool.submit(graded, item) for item in submissions]):
                yield future.result()
        except BaseException:  # also KeyboardInterrupt, because the threads wait for sandboxes
            for box in boxes:
                box.stop()
            raise


def _on_cluster(
    course: Course,
    given: HandedOut,
    submissions: list[Submission],
    scheduler: str,
    sandbox: str | None,
) -> Generator[Graded, None, None]:
    """Yield results from the workers of a Dask cluster.

    If a worker is lost, another worker gets its submissions. `given` are the handed-out cells, and
    `sandbox` is the name of a backend.
    """
    try:
        from distributed import Client, as_completed
    except ImportError:
        reason = "--scheduler needs Dask, which is not installed"
        raise RuntimeError(f"{reason}. Install it with `pip install distributed`") from None

    remaining = iter(submissions)
    with Client(scheduler, set_as_default=False, timeout=PATIENCE) as client:
        slots = sum(client.nthreads().values()) or 1

        def submit() -> Any:
            item = next(remaining, None)
            if item is None:
                return None
            loaded = item.loaded()
            return client.submit(grade_on_worker, course, given, loaded, sandbox, pure=False)

        first = [submit() for _ in range(IN_FLIGHT * slots)]
        waiting = [future for future in first if future is not None]
        running = as_completed(waiting, loop=client.loop)
        for future in running:
            yield future.result()
            future.release()
            following = submit()
            if following is not None:
                running.add(following)


_on_worker = threading.local()


def grade_on_worker(
    course: Course, given: HandedOut, submission: Submission, sandbox: str | None
) -> Graded:
    """Grade one submission on a Dask worker, and return the result.

    Each thread of a worker keeps its sandbox for the next submission. `given` are the handed-out
    cells, and `sandbox` is the name of a backend.
    """
    key = (course.limits, sandbox)
    if getattr(_on_worker, "key", None) != key:
        if hasattr(_on_worker, "sandbox"):
            _on_worker.sandbox.close()
        backend = backends.best(course.limits.scratch, sandbox, private_paths(course))
        _on_worker.sandbox, _on_worker.key = Sandbox(backend, course.limits), key
    return grade(submission, course, given, _on_worker.sandbox)
