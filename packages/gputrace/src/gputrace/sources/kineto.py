"""The spans of real GPUs, from PyTorch's profiler (Kineto), of which one session can run in a process."""

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

UNAVAILABLE = "this build of PyTorch has no profiler for CUDA (torch.profiler.supported_activities())"
WAS_RUNNING = "PyTorch's profiler was running already, and one can run at a time: start it after the recording, or record without it"
GAVE_WAY = "the program started PyTorch's profiler itself, and one can run at a time"
_LOG_LEVEL = "KINETO_LOG_LEVEL"


class KinetoSource:
    """The profiler's activities during one recording. Recordings at the same time share the one session."""

    def __init__(self) -> None:
        self.activities: list[Activity] = []
        self.missing = ""  # why there are none

    def start(self) -> None:
        _session.join(self)

    def stop(self) -> None:
        """Stop listening, however far `start` came."""
        _session.leave(self)

    def finish(self, origin: float) -> Execution:
        """The spans and waits, in seconds from `origin`, in nanoseconds of the system's clock."""
        self.stop()
        return Execution.none(self.missing) if self.missing else work_of(self.activities, origin)


class _ProfilerSession:
    """The profiler, while at least one recording listens.

    It runs in a thread of its own: PyTorch ends a session only in the thread that began it, and recordings end in any thread and order.
    CUDA's activities come from all threads.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._listeners: list[KinetoSource] = []
        self._profile: Any = None
        self._process = 0
        self._thread: Any = None
        self._undo: Any = None

    def join(self, source: KinetoSource) -> None:
        """Let a source listen; where the profiler cannot run, `source.missing` says why."""
        with self._lock:
            if torch.profiler.ProfilerActivity.CUDA not in torch.profiler.supported_activities():
                source.missing = UNAVAILABLE
            elif self._profile is None and (profiler._is_profiler_enabled or torch._C._autograd._profiler_enabled()):
                source.missing = WAS_RUNNING
            else:
                self._listeners.append(source)
                if self._profile is None:
                    self._begin()

    def leave(self, source: KinetoSource) -> None:
        """Give all sources the activities so far, and go on for the others."""
        with self._lock:
            if source not in self._listeners or self._process != os.getpid():  # a forked child has no session
                return
            activities = self._end()
            for listener in self._listeners:
                listener.activities += activities
            if source in self._listeners:  # else the session has failed
                self._listeners.remove(source)
            if self._listeners:
                self._begin()

    def give_way(self) -> None:
        """The program starts a profiler of its own."""
        if self._process != os.getpid():  # a forked child has neither the session nor its thread
            return
        with self._lock:
            if self._profile is not None:
                self._end()
                self._fail(GAVE_WAY)

    def _fail(self, missing: str) -> None:
        """No source gets any activities, for this reason."""
        for listener in self._listeners:
            listener.missing = missing
        self._listeners.clear()

    def _begin(self) -> None:
        """Record what CUDA does and what waits for what: with CPU operators or stacks a launch costs a quarter more.

        The first session of a process loads and starts CUPTI, which can take a second or more. No work may be under way, for Kineto
        drops what began before the session or ends after it.
        """
        self._process = os.getpid()
        config = _ExperimentalConfig(enable_cuda_sync_events=True)
        profile = profiler.profile(use_cpu=False, use_device="cuda", use_kineto=True, experimental_config=config)
        thread = ThreadPoolExecutor(1, "labkit profiler")
        try:
            _synchronize()
            with _quiet():
                profile._prepare_trace()  # in this thread: Kineto complains when it is loaded in another than the one that loaded PyTorch
            thread.submit(profile._start_trace).result()
        except Exception as error:  # whatever it is, the memory can be recorded without
            thread.shutdown()
            self._fail(f"PyTorch's profiler could not be started: {error}")
        else:
            self._profile, self._thread = profile, thread
            self._undo = _when_another_starts(self.give_way)

    def _end(self) -> list[Activity]:
        thread, undo = self._thread, self._undo
        self._profile = self._thread = self._undo = None
        undo()
        try:
            return _read(thread.submit(_ended).result())
        except Exception as error:  # a GPU that an assert has stopped, a full disk: what the block itself raised matters more
            self._fail(f"what PyTorch's profiler heard could not be read: {error}")
            return []
        finally:
            thread.shutdown()


def _ended() -> Any:
    """End the session; returns its results. PyTorch's own way would leave it running where a GPU has failed, and make Python objects of
    the results, which takes older versions seconds."""
    try:
        _synchronize()
    finally:
        results = profiler._disable_profiler()
        profiler._run_on_profiler_stop()
    return results


@contextmanager
def _quiet() -> Iterator[None]:
    """Set Kineto's log level, which it reads when it is loaded: from PyTorch 2.13 on it logs every start and stop otherwise."""
    if (level := os.environ.get(_LOG_LEVEL)) is None:
        os.environ[_LOG_LEVEL] = "99"
    try:
        yield
    finally:
        if level is None:
            del os.environ[_LOG_LEVEL]


def _synchronize() -> None:
    """Wait for all GPUs that this process uses; on another, that would make a context, which takes memory."""
    bindings: Any = torch._C
    for device in range(torch.cuda.device_count()):
        if bindings._cuda_hasPrimaryContext(device):
            torch.cuda.synchronize(device)


def _read(results: Any) -> list[Activity]:
    """The activities of a session. Only its file has the kinds, the correlations and what waits for what in every version."""
    with tempfile.TemporaryDirectory(prefix="labkit-") as folder:
        path = Path(folder) / "kineto.json"
        results.save(str(path))
        return activities_of(json.loads(path.read_text(encoding="utf-8", errors="replace"), strict=False))


def _when_another_starts(give_way: Callable[[], None]) -> Callable[[], None]:
    """Call `give_way` before another session is prepared; returns what ends that."""
    profile: Any = profiler.profile
    prepare = profile._prepare_trace

    def prepare_trace(self: Any) -> None:
        give_way()
        prepare(self)

    profile._prepare_trace = prepare_trace

    def undo() -> None:
        if profile._prepare_trace is prepare_trace:  # else somebody has wrapped ours
            profile._prepare_trace = prepare

    return undo


_session = _ProfilerSession()
