"""Processes that a script starts with multiprocessing. Each is measured, and leaves an outcome."""

import contextlib
import functools
import json
import multiprocessing
import multiprocessing.process
import multiprocessing.spawn
import os
import select
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil

import virtualgpu
from gputrace.fit.measurement import Measurement
from gputrace.fit.outcome import Outcome, Wish
from virtualgpu.source_lines import is_users

STOP = signal.SIGURG  # ends a measured process. Other processes ignore this signal.
PATIENCE = 10.0  # seconds without a new outcome in which other processes finish their step
LAST = 5.0  # seconds in which a process that was told to stop writes its outcome
WAITS = 60.0  # seconds that a process with enough steps stays alive for its peers
LOOK = 0.05  # seconds between two looks


class Ended(NamedTuple):
    """An ended process: its outcome, whether it had made enough steps, and when it ended."""

    outcome: Outcome
    has_enough: bool
    time: float


class ScriptProcesses:
    """The processes of one attempt, which leave their outcomes in a folder.

    Args:
        main: the id of the process that runs the script itself.
    """

    def __init__(self, wish: Wish, folder: str, main: int) -> None:
        self._wish, self._folder, self._main = wish, Path(folder), main

    def __reduce__(self) -> tuple[Any, ...]:
        """Make pickle store a call of `_inherit`, which installs the measurement when unpickled."""
        return _inherit, (asdict(self._wish), str(self._folder), self._main)

    def put_in_place(self) -> None:
        """Measure each process that this one or its children start with multiprocessing."""
        bootstrap = multiprocessing.process.BaseProcess._bootstrap  # type: ignore[attr-defined]
        prepare = multiprocessing.spawn.get_preparation_data

        @functools.wraps(bootstrap)
        def measured(process: Any, *args: Any, **kwargs: Any) -> Any:
            if os.getpid() != self._main and not _loads_data(process):
                process.run = functools.partial(self._run, process.run)
            return bootstrap(process, *args, **kwargs)

        def prepared(name: str) -> dict[str, Any]:
            # A process that is started anew unpickles this, which installs the measurement.
            return prepare(name) | {"gputrace.fit": self}

        multiprocessing.process.BaseProcess._bootstrap = measured  # type: ignore[attr-defined]
        multiprocessing.spawn.get_preparation_data = prepared

    def _run(self, run: Callable[[], None]) -> None:
        """Measure the work of a child process, which is to call `run`, and write the outcome."""
        gpus = virtualgpu.current()
        if gpus is None:
            return run()
        self._file("begun").touch()
        measurement = Measurement(self._wish, gpus, str(self._folder), one_of_several=True)
        signal.signal(STOP, measurement.stop)
        outcome = measurement.of(lambda: _raising(run))
        self._write(Ended(outcome, measurement.has_enough, time.monotonic()))
        if measurement.has_enough or outcome.asked:
            os.kill(self._main, STOP)
            select.select([], [], [], WAITS)  # until it is killed, so that its peers can go on
            os._exit(0)
        if measurement.raised is not None:
            raise measurement.raised
        return None

    def end(self) -> list[Ended]:
        """End all processes that the script started, and return the outcomes of measured ones."""
        if any(ended.has_enough for ended in self._ended()):
            self._wait(PATIENCE)
        for number in self._missing():
            with contextlib.suppress(OSError):
                os.kill(number, STOP)
        self._wait(LAST)
        # torch's handler would report the end of a data loader's worker as a failure.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
        return self._ended()

    def _wait(self, patience: float) -> None:
        """Wait for missing outcomes, until none has come for `patience` seconds."""
        missing, until = self._missing(), time.monotonic() + patience
        while missing and time.monotonic() < until:
            select.select([], [], [], LOOK)
            before, missing = missing, self._missing()
            if len(missing) < len(before):
                until = time.monotonic() + patience

    def _missing(self) -> list[int]:
        """Return the ids of living processes without an outcome, except those that load data."""
        begun = {int(file.stem) for file in self._folder.glob("*.begun")}
        children = multiprocessing.active_children()
        begun |= {child.pid for child in children if child.pid and not _loads_data(child)}
        ended = {int(file.stem) for file in self._folder.glob("*.ended")}
        return [number for number in sorted(begun - ended) if _lives(number)]

    def _ended(self) -> list[Ended]:
        """Read the outcomes, in the order in which the processes ended."""
        found = []
        for file in sorted(self._folder.glob("*.ended")):
            outcome, has_enough, when = json.loads(file.read_text(encoding="utf-8"))
            found.append(Ended(Outcome(**outcome), has_enough, when))
        return sorted(found, key=lambda ended: ended.time)

    def _write(self, ended: Ended) -> None:
        """Write the outcome of this process to its file, which appears only when it is complete."""
        text = json.dumps([asdict(ended.outcome), ended.has_enough, ended.time])
        self._file("unfinished").write_text(text, encoding="utf-8")
        os.replace(self._file("unfinished"), self._file("ended"))

    def _file(self, kind: str) -> Path:
        """Return the path of this process's file of a kind: "begun", "unfinished" or "ended"."""
        return self._folder / f"{os.getpid()}.{kind}"


def _inherit(wish: dict[str, Any], folder: str, main: int) -> ScriptProcesses:
    """Install the measurement in a process that multiprocessing starts anew.

    The arguments are those of `ScriptProcesses`, with the wish as a dictionary.
    """
    processes = ScriptProcesses(Wish(**wish), folder, main)
    processes.put_in_place()
    return processes


def _loads_data(process: Any) -> bool:
    """Return whether a process is a DataLoader's worker, which uses no GPU."""
    target = getattr(process, "_target", None)
    return str(getattr(target, "__module__", "")).startswith("torch.utils.data")


def _raising(run: Callable[[], None]) -> None:
    """Call `run`, the work of a process, and raise the error that ended it.

    torch.multiprocessing hides an error behind an exit status, which is replaced by the error.
    """
    try:
        run()
    except SystemExit as ended:
        innermost = traceback.extract_tb(ended.__traceback__)[-1]
        if ended.__context__ is not None and not is_users(innermost.filename):
            raise ended.__context__ from None
        raise


def _lives(number: int) -> bool:
    """Return whether the process with this id is running."""
    try:
        return psutil.Process(number).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def together(own: Outcome, others: list[Ended], context_bytes: int) -> Outcome:
    """Join the outcomes of a script's processes into one.

    `own` is the main process's outcome, and `others` are those of the processes that it started.
    `context_bytes` are the bytes of a process's CUDA context.
    """
    if not others:
        return own
    ended = sorted(others, key=lambda each: each.time)
    all_of_them = [own, *(each.outcome for each in ended)]
    by_device = [max(used) for used in zip(*(each.by_device for each in all_of_them), strict=True)]
    fullest = by_device.index(max(by_device))

    def weight(outcome: Outcome) -> tuple[bool, int, int]:
        return outcome.device == fullest, outcome.reserved, outcome.steps

    shown = max(all_of_them, key=weight)
    stepped = shown if shown.steps else max(all_of_them, key=lambda each: each.steps)
    result = replace(
        shown,
        used=by_device[fullest],
        by_device=by_device,
        processes=len(ended),
        others=max(0, by_device[fullest] - shown.reserved - context_bytes),
        steps=stepped.steps,
        step=stepped.step,
        idle=stepped.idle,
        first=stepped.first,
        by_hand=stepped.by_hand,
        loading=stepped.loading,
        workers=stepped.workers,
        fits=all(each.fits for each in all_of_them),
        changed=any(each.changed for each in all_of_them),
        tries_algorithms=any(each.tries_algorithms for each in all_of_them),
        changes=list(dict.fromkeys(name for each in all_of_them for name in each.changes)),
        made_up=list(dict.fromkeys(line for each in all_of_them for line in each.made_up)),
        resident=sum(each.resident for each in all_of_them),
        failed="",
        asked="",
    )
    if not result.fits:
        return result
    # If the first process failed, the others fail because of that. After enough steps, a failure
    # means nothing.
    for each in ended:
        if each.has_enough:
            return result
        if each.outcome.asked or each.outcome.failed:
            return replace(result, asked=each.outcome.asked, failed=each.outcome.failed)
    return replace(result, asked=own.asked, failed=own.failed)
