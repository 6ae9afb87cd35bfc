"""Spans of real GPUs, from PyTorch's profiler (Kineto). Only one session can run in a process."""

import json
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.autograd import profiler

from gputrace.sources.activities import Activity, activities_of, work_of
from gputrace.spans import Execution

UNAVAILABLE = (
    "this build of PyTorch has no profiler for CUDA (torch.profiler.supported_activities())"
)
WAS_RUNNING = (
    "PyTorch's profiler was running already, and one can run at a time: "
    "start it after the recording, or record without it"
)
GAVE_WAY = "the program started PyTorch's profiler itself, and one can run at a time"
_LOG_LEVEL = "KINETO_LOG_LEVEL"


class KinetoSource:
    """The profiler's activities during one recording.

    Simultaneous recordings share the one session.

    Attributes:
        missing: why there are no activities, or "".
    """

    def __init__(self) -> None:
        self.activities: list[Activity] = []
        self.missing = ""

    def start(self) -> None:
        """Start to listen. If the profiler cannot run, `missing` says why."""
        _session.join(self)

    def stop(self) -> None:
        """Stop listening, even if `start` was interrupted."""
        _session.leave(self)

    def finish(self, origin: float) -> Execution:
        """Return the spans and waits.

        `origin` is the start of the recording in nanoseconds of the system's clock.
        """
        self.stop()
        if self.missing:
            return Execution.none(self.missing)
        return work_of(self.activities, origin)


class _ProfilerSession:
    """Session of the profiler, which runs while at least one recording listens.

    It has its own thread, because PyTorch ends a session only in the thread that began it, and
    recordings end in any thread and order. The activities of CUDA come from all threads.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._listeners: list[KinetoSource] = []
        self._profile: Any = None
        self._process = 0
        self._thread: Any = None
        self._undo: Any = None

    def join(self, source: KinetoSource) -> None:
        """Let a source listen. If the profiler cannot run, `source.missing` says why."""
        with self._lock:
            running = profiler._is_profiler_enabled or torch._C._autograd._profiler_enabled()
            if torch.profiler.ProfilerActivity.CUDA not in torch.profiler.supported_activities():
                source.missing = UNAVAILABLE
            elif self._profile is None and running:
                source.missing = WAS_RUNNING
            else:
                self._listeners.append(source)
                if self._profile is None:
                    self._begin()

    def leave(self, source: KinetoSource) -> None:
        """Remove a source. All sources get the activities so far."""
        with self._lock:
            # A forked process has inherited the sources, but no session.
            if source not in self._listeners or self._process != os.getpid():
                return
            activities = self._end()
            for listener in self._listeners:
                listener.activities += activities
            if source in self._listeners:  # false if the session has failed
                self._listeners.remove(source)
            if self._listeners:
                self._begin()

    def give_way(self) -> None:
        """End the session, because the program starts a profiler of its own."""
        if self._process != os.getpid():  # a forked process has neither the session nor its thread
            return
        with self._lock:
            if self._profile is not None:
                self._end()
                self._fail(GAVE_WAY)

    def _fail(self, missing: str) -> None:
        """Tell all sources that there are no activities, and why. `missing` is the reason."""
        for listener in self._listeners:
            listener.missing = missing
        self._listeners.clear()

    def _begin(self) -> None:
        """Begin a session that records CUDA's activities and what waits for what.

        It records neither CPU operators nor stacks, because a launch would cost a quarter more. The
        first session of a process loads and starts CUPTI, which may take a second or more. No work
        may be running, because Kineto drops work that began before or ends after the session.
        """
        self._process = os.getpid()
        config = _ExperimentalConfig(enable_cuda_sync_events=True)
        profile = profiler.profile(
            use_cpu=False, use_device="cuda", use_kineto=True, experimental_config=config
        )
        thread = ThreadPoolExecutor(1, "labkit profiler")
        try:
            _synchronize()
            with _quiet():
                # In this thread, because Kineto prints a warning if it is loaded in another thread
                # than PyTorch.
                profile._prepare_trace()
            thread.submit(profile._start_trace).result()
        except Exception as error:  # the recording goes on without a timeline
            thread.shutdown()
            self._fail(f"PyTorch's profiler could not be started: {error}")
        else:
            self._profile, self._thread = profile, thread
            self._undo = _when_another_starts(self.give_way)

    def _end(self) -> list[Activity]:
        """End the session, and return its activities."""
        thread, undo = self._thread, self._undo
        self._profile = self._thread = self._undo = None
        undo()
        try:
            return _read(thread.submit(_ended).result())
        except Exception as error:  # a failed GPU or a full disk must not hide the block's error
            self._fail(f"what PyTorch's profiler heard could not be read: {error}")
            return []
        finally:
            thread.shutdown()


def _ended() -> Any:
    """End the profiler's session, and return its results.

    PyTorch's own function would leave the session running if a GPU has failed. It also makes Python
    objects of the results, which takes seconds in older versions.
    """
    try:
        _synchronize()
    finally:
        results = profiler._disable_profiler()
        profiler._run_on_profiler_stop()
    return results


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Kineto from logging each start and stop, which it does since PyTorch 2.13.

    Kineto reads its log level when it is loaded.
    """
    level = os.environ.get(_LOG_LEVEL)
    if level is None:
        os.environ[_LOG_LEVEL] = "99"
    try:
        yield
    finally:
        if level is None:
            del os.environ[_LOG_LEVEL]


def _synchronize() -> None:
    """Wait for all GPUs that this process uses.

    Waiting for another GPU would make a context there, which takes memory.
    """
    bindings: Any = torch._C
    for device in range(torch.cuda.device_count()):
        if bindings._cuda_hasPrimaryContext(device):
            torch.cuda.synchronize(device)


def _read(results: Any) -> list[Activity]:
    """Return the activities of a session, read from the file that it writes.

    Only the file has the kinds, the correlations and the waits in every version of PyTorch.
    """
    with tempfile.TemporaryDirectory(prefix="labkit-") as folder:
        path = Path(folder) / "kineto.json"
        results.save(str(path))
        text = path.read_text(encoding="utf-8", errors="replace")
        return activities_of(json.loads(text, strict=False))


def _when_another_starts(give_way: Callable[[], None]) -> Callable[[], None]:
    """Call `give_way` before another profiler session is prepared.

    Return a function that ends this.
    """
    profile: Any = profiler.profile
    prepare = profile._prepare_trace

    def prepare_trace(self: Any) -> None:
        give_way()
        prepare(self)

    profile._prepare_trace = prepare_trace

    def undo() -> None:
        if profile._prepare_trace is prepare_trace:  # otherwise somebody has wrapped it again
            profile._prepare_trace = prepare

    return undo


_session = _ProfilerSession()
