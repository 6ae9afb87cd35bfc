"""Tests on virtual GPUs: what pytest's plugin does once `--virtual-gpus` or `--virtual-like` is given.

`pytest_virtual_gpus` declares the options, the marker and the fixtures, and registers this plugin.
"""

import warnings
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import pytest

from pytest_virtual_gpus import MARKER
from virtualgpu.machines import use

Check = Callable[[], AbstractContextManager[None]]
_CHECKS = pytest.StashKey[list[Check]]()  # what is asserted about a test


class VirtualGPUPlugin:
    """Puts virtual GPUs in place until pytest ends, and checks tests on them.

    Raises UsageError for a model that has no profile.
    """

    def __init__(self, gpus: int, like: str | None) -> None:
        try:
            self._gpus = use(gpus, like)
        except (ValueError, RuntimeError) as error:
            raise pytest.UsageError(str(error)) from None

    def pytest_unconfigure(self) -> None:
        self._gpus.take_away()

    def pytest_report_header(self) -> str:
        return f"virtual GPUs: {self._gpus!r}"

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Skip a test if a virtual GPU refused something in it."""
        report = yield
        _skip_if_refused(report, call, item.location[0], item.location[1] or 0)
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """Skip a module if a virtual GPU refused something while the module was imported."""
        report = yield
        _skip_if_refused(report, getattr(report, "call", None), collector.nodeid, 0)
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Check the test itself: what its fixtures hold exists before and after it."""
        checks = [*item.stash.get(_CHECKS, [])]
        if item.get_closest_marker(MARKER) is not None:
            checks.append(_of_markers(item))
        with ExitStack() as stack:
            for check in checks:
                stack.enter_context(check())
            return (yield)

    def add_check(self, item: pytest.Item, what: str) -> None:
        """Check this test for "no leak", "no race" or "no synchronization"."""
        item.stash.setdefault(_CHECKS, []).append(_NAMED[what])


def _skip_if_refused(
    report: pytest.TestReport | pytest.CollectReport,
    call: pytest.CallInfo[Any] | None,
    path: str,
    line: int,
) -> None:
    if report.failed and call is not None and call.excinfo is not None:
        from virtualgpu import instruments

        if (refused := instruments.refusal_behind(call.excinfo.value)) is not None:
            report.outcome, report.longrepr = "skipped", (path, line + 1, f"Skipped: {refused}")


def _of_markers(item: pytest.Item) -> Check:
    """The test's budget: what a marker closer to it says comes first."""
    limits: dict[str, Any] = {}
    for marker in item.iter_markers(MARKER):
        if marker.args or not marker.kwargs or marker.kwargs.keys() - {"memory", "seconds"}:
            pytest.fail(f"{MARKER}: give memory=, seconds= or both", pytrace=False)
        limits = {**marker.kwargs, **limits}
    return lambda: _budget(_bytes(limits.get("memory")), _seconds(limits.get("seconds")))


def _bytes(memory: Any) -> int | None:
    from virtualgpu.machines import parse_bytes

    try:
        return None if memory is None else parse_bytes(memory)
    except ValueError as error:
        pytest.fail(f"{MARKER}: {error}", pytrace=False)


def _seconds(seconds: Any) -> float | None:
    if seconds is not None and (not isinstance(seconds, int | float) or not seconds > 0):
        pytest.fail(f"{MARKER}: seconds={seconds!r}: give a positive number", pytrace=False)
    return seconds


@contextmanager
def _budget(memory: int | None, seconds: float | None) -> Generator[None, None, None]:
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
        pytest.fail(f"it takes {time_text(took)} of modelled time, more than {time_text(seconds)}", pytrace=False)
    for device in devices:
        peak = torch.cuda.max_memory_allocated(device) - before[device]
        if memory is not None and peak > memory:
            pytest.fail(f"it takes {byte_text(peak)} of cuda:{device}, more than {byte_text(memory)}", pytrace=False)


def _synchronize() -> None:
    import torch

    for device in range(torch.cuda.device_count()):
        torch.cuda.synchronize(device)


@contextmanager
def _no_leak() -> Generator[None, None, None]:
    from gputrace.recording import record
    from gputrace.units import byte_text

    with record(timeline=False) as trace:
        yield
    if leaks := trace.leaks():
        pytest.fail(f"it leaves {byte_text(leaks.bytes)} behind:\n" + "\n".join(leak.text for leak in leaks), pytrace=False)


@contextmanager
def _no_race() -> Generator[None, None, None]:
    from virtualgpu import instruments

    _synchronize()  # with what an earlier test has left under way this one does not race
    with instruments.machine().races.watched() as found:
        yield
    if found:
        pytest.fail("\n".join(map(str, found)), pytrace=False)


@contextmanager
def _no_synchronization() -> Generator[None, None, None]:
    import torch

    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that PyTorch's mode is a prototype
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
