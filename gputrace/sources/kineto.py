"""Where the spans of real GPUs come from: PyTorch's profiler (Kineto), of which one session can run in a process."""

import json
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gputrace.sources.activities import Activity, activities_of, work_of
from gputrace.spans import Execution

UNAVAILABLE = "this build of PyTorch has no profiler for CUDA (torch.profiler.supported_activities())"
WAS_RUNNING = "PyTorch's profiler was running already, and one can run at a time: start it after the recording, or record without it"
GAVE_WAY = "the program started PyTorch's profiler itself, and one can run at a time"
_LOG_LEVEL = "KINETO_LOG_LEVEL"


class KinetoSource:
    """What the profiler hears of one recording. Recordings at the same time share the one session."""

    def __init__(self) -> None:
        self.heard: list[Activity] = []
        self.missing = ""  # why nothing is heard

    def start(self) -> None:
        _session.join(self)

    def stop(self) -> None:
        """Listen no more, however far `start` came."""
        _session.leave(self)

    def finish(self, origin: float) -> Execution:
        """What was heard, in seconds from `origin`, which is told in nanoseconds of the system's clock."""
        self.stop()
        return Execution.none(self.missing) if self.missing else work_of(self.heard, origin)


class _ProfilerSession:
    """The profiler, while at least one recording listens.

    It runs in a thread of its own: PyTorch ends a session only in the thread that began it, and recordings end in any thread and order.
    What CUDA does is heard from all threads.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._listeners: list[KinetoSource] = []
        self._profile: Any = None
        self._process = 0
        self._thread: Any = None
        self._undo: Any = None

    def join(self, source: KinetoSource) -> None:
        """Let a source listen; where the profiler cannot run, the source is told why, and its recording goes without."""
        import torch
        from torch.autograd import profiler

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
        """Tell all what was heard so far, and go on for the others."""
        with self._lock:
            if source not in self._listeners or self._process != os.getpid():  # a forked child has no session
                return
            told = self._end()
            for listener in self._listeners:
                listener.heard += told
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
                self._tell(GAVE_WAY)

    def _tell(self, missing: str) -> None:
        """No source will hear anything, for this reason."""
        for listener in self._listeners:
            listener.missing = missing
        self._listeners.clear()

    def _begin(self) -> None:
        """Only what CUDA does, and what waits for what: with CPU operators or stacks a launch costs a quarter more.

        The first session of a process loads and starts CUPTI, which can take a second or more. No work may be under way, for Kineto
        drops what began before the session or ends after it.
        """
        from torch._C._profiler import _ExperimentalConfig
        from torch.autograd import profiler

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
            self._tell(f"PyTorch's profiler could not be started: {error}")
        else:
            self._profile, self._thread = profile, thread
            self._undo = _when_another_starts(self.give_way)

    def _end(self) -> list[Activity]:
        thread, undo = self._thread, self._undo
        self._profile = self._thread = self._undo = None
        undo()
        try:
            return _told(thread.submit(_ended).result())
        except Exception as error:  # a GPU that an assert has stopped, a full disk: what the block itself raised matters more
            self._tell(f"what PyTorch's profiler heard could not be read: {error}")
            return []
        finally:
            thread.shutdown()


def _ended() -> Any:
    """End the session; gives what it heard. PyTorch's own way would leave it running where a GPU has failed, and sort what was heard into
    Python objects, which takes older versions seconds."""
    from torch.autograd import profiler

    try:
        _synchronize()
    finally:
        heard = profiler._disable_profiler()
        profiler._run_on_profiler_stop()
    return heard


@contextmanager
def _quiet() -> Iterator[None]:
    """Kineto reads when it is loaded how much it shall say: from PyTorch 2.13 on it writes at every start and stop otherwise."""
    if (said := os.environ.get(_LOG_LEVEL)) is None:
        os.environ[_LOG_LEVEL] = "99"
    try:
        yield
    finally:
        if said is None:
            del os.environ[_LOG_LEVEL]


def _synchronize() -> None:
    """Wait for all GPUs that this process uses; asking another would take its memory for a context."""
    import torch

    for device in range(torch.cuda.device_count()):
        if torch._C._cuda_hasPrimaryContext(device):
            torch.cuda.synchronize(device)


def _told(heard: Any) -> list[Activity]:
    """What a session heard. Only the file that it writes tells the kinds, the correlations and what waits for what in every version."""
    with tempfile.TemporaryDirectory(prefix="labkit-") as folder:
        path = Path(folder) / "kineto.json"
        heard.save(str(path))
        return activities_of(json.loads(path.read_text(encoding="utf-8", errors="replace"), strict=False))


def _when_another_starts(give_way: Callable[[], None]) -> Callable[[], None]:
    """Call `give_way` before another session is prepared; returns what ends that."""
    from torch.autograd import profiler

    prepare = profiler.profile._prepare_trace

    def prepare_trace(profile: Any) -> None:
        give_way()
        prepare(profile)

    profiler.profile._prepare_trace = prepare_trace

    def undo() -> None:
        if profiler.profile._prepare_trace is prepare_trace:  # else somebody put a function of his own around ours
            profiler.profile._prepare_trace = prepare

    return undo


_session = _ProfilerSession()
