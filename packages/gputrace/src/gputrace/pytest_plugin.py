"""The part of the pytest plugin that needs virtual GPUs.

`pytest_virtual_gpus` declares the options, the marker and the fixtures. It registers this plugin if
`--virtual-gpus` or `--virtual-like` is given.
"""

import warnings
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import pytest

from pytest_virtual_gpus import MARKER
from virtualgpu.machines import use

Check = Callable[[], AbstractContextManager[None]]
_CHECKS = pytest.StashKey[list[Check]]()  # the checks of a test


class VirtualGPUPlugin:
    """Plugin that installs virtual GPUs until pytest ends, and checks tests on them.

    Raises:
        UsageError: there is no profile of the model `like`.
    """

    def __init__(self, gpus: int, like: str | None) -> None:
        try:
            self._gpus = use(gpus, like)
        except (ValueError, RuntimeError) as error:
            raise pytest.UsageError(str(error)) from None

    def pytest_unconfigure(self) -> None:
        """Remove the virtual GPUs."""
        self._gpus.take_away()

    def pytest_report_header(self) -> str:
        """Name the virtual GPUs at the top of pytest's output."""
        return f"virtual GPUs: {self._gpus!r}"

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Report a test as skipped if a virtual GPU refused an operation in it."""
        report = yield
        _skip_if_refused(report, call, item.location[0], item.location[1] or 0)
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """Report a module as skipped if a virtual GPU refused something during its import."""
        report = yield
        _skip_if_refused(report, getattr(report, "call", None), collector.nodeid, 0)
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Run the requested checks around the test function, but not around its fixtures."""
        checks = [*item.stash.get(_CHECKS, [])]
        if item.get_closest_marker(MARKER) is not None:
            checks.append(_of_markers(item))
        with ExitStack() as stack:
            for check in checks:
                stack.enter_context(check())
            return (yield)

    def add_check(self, item: pytest.Item, what: str) -> None:
        """Add a check to a test.

        `what` is the check's name: "no leak", "no race" or "no synchronization".
        """
        item.stash.setdefault(_CHECKS, []).append(_NAMED[what])


def _skip_if_refused(
    report: pytest.TestReport | pytest.CollectReport,
    call: pytest.CallInfo[Any] | None,
    path: str,
    line: int,
) -> None:
    """Turn a failed report into a skip if a virtual GPU refused something.

    `path` and `line` are where the test or module is.
    """
    if report.failed and call is not None and call.excinfo is not None:
        from virtualgpu import instruments

        refused = instruments.refusal_behind(call.excinfo.value)
        if refused is not None:
            report.outcome, report.longrepr = "skipped", (path, line + 1, f"Skipped: {refused}")


def _of_markers(item: pytest.Item) -> Check:
    """Return the check that the `gpu_budget` markers of a test ask for.

    Markers closer to the test override others.
    """
    limits: dict[str, Any] = {}
    for marker in item.iter_markers(MARKER):
        if marker.args or not marker.kwargs or marker.kwargs.keys() - {"memory", "seconds"}:
            message = f"{MARKER}: expected memory=, seconds= or both"
            pytest.fail(message, pytrace=False)
        limits = {**marker.kwargs, **limits}
    return lambda: _budget(_bytes(limits.get("memory")), _seconds(limits.get("seconds")))


def _bytes(memory: Any) -> int | None:
    """Convert the memory limit of a marker to bytes."""
    from virtualgpu.machines import parse_bytes

    if memory is None:
        return None
    try:
        return parse_bytes(memory)
    except ValueError as error:
        pytest.fail(f"{MARKER}: {error}", pytrace=False)


def _seconds(seconds: Any) -> float | None:
    """Return the time limit of a marker in seconds. Raise an error if it is not a valid time."""
    if seconds is not None and (not isinstance(seconds, int | float) or not seconds > 0):
        message = f"{MARKER}: expected a positive number of seconds, got {seconds!r}"
        pytest.fail(message, pytrace=False)
    return seconds


@contextmanager
def _budget(memory: int | None, seconds: float | None) -> Generator[None, None, None]:
    """Fail a test that takes more memory on a GPU (bytes) or more modelled time (seconds)."""
    import torch

    from gputrace.units import byte_text, time_text
    from virtualgpu.machines import host_time

    devices = range(torch.cuda.device_count())
    before = [torch.cuda.memory_allocated(device) for device in devices]
    _synchronize()
    for device in devices:
        torch.cuda.reset_peak_memory_stats(device)
    begin = host_time()
    yield
    _synchronize()
    took = host_time() - begin
    if seconds is not None and took > seconds:
        message = f"it took {time_text(took)} of modelled time, more than {time_text(seconds)}"
        pytest.fail(message, pytrace=False)
    for device in devices:
        peak = torch.cuda.max_memory_allocated(device) - before[device]
        if memory is not None and peak > memory:
            message = f"it took {byte_text(peak)} on cuda:{device}, more than {byte_text(memory)}"
            pytest.fail(message, pytrace=False)


def _synchronize() -> None:
    """Wait for all GPUs."""
    import torch

    for device in range(torch.cuda.device_count()):
        torch.cuda.synchronize(device)


@contextmanager
def _no_leak() -> Generator[None, None, None]:
    """Fail a test that leaves tensors on a GPU."""
    from gputrace.recording import record
    from gputrace.units import byte_text

    with record(timeline=False) as trace:
        yield
    leaks = trace.leaks()
    if leaks:
        lines = [f"it leaves {byte_text(leaks.bytes)} behind:", *(leak.text for leak in leaks)]
        pytest.fail("\n".join(lines), pytrace=False)


@contextmanager
def _no_race() -> Generator[None, None, None]:
    """Fail a test in which two streams race."""
    from virtualgpu import instruments

    _synchronize()  # so that the test cannot race with the work of an earlier test
    with instruments.machine().races.watched() as found:
        yield
    if found:
        pytest.fail("\n".join(map(str, found)), pytrace=False)


@contextmanager
def _no_synchronization() -> Generator[None, None, None]:
    """Fail a test that makes the host wait for a GPU implicitly."""
    import torch

    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns that this mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


_NAMED: dict[str, Check] = {
    "no leak": _no_leak,
    "no race": _no_race,
    "no synchronization": _no_synchronization,
}
