"""A plugin of pytest: `pytest --gpus 2 --like T4` runs a suite's CUDA tests on virtual GPUs.

Without these options it changes nothing. With them the GPUs are in place before the first conftest.py is imported, in each worker of
pytest-xdist too. A test or a module that needs what a virtual GPU cannot do is skipped, and the reason says what that is.

The marker `gpu_budget(memory="1GiB", seconds=0.01)` fails a test that takes more memory on a GPU, or more modelled time; a limit given at
the test itself comes before that of its class or module. The fixtures
`no_gpu_leak`, `no_gpu_race` and `no_gpu_synchronization` fail one that leaves tensors behind, whose streams race, or that makes the host
wait for a GPU without asking for it.
"""

import warnings
from argparse import ArgumentTypeError
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import pytest

MARKER = "gpu_budget"
_NO_GPUS = "it asserts something of virtual GPUs: give --gpus 1"
Check = Callable[[], AbstractContextManager[None]]
_CHECKS = pytest.StashKey[list[Check]]()  # of a test, what is asserted of it
_USED = pytest.StashKey[Any]()  # the virtual GPUs that the options asked for


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("virtual GPUs")
    group.addoption("--gpus", type=_count, metavar="N", help="run CUDA tests on N virtual GPUs (1 where --like is given alone)")
    group.addoption("--like", metavar="MODEL", help="the GPU they are modelled on, such as T4 or H200 (default: T4)")


def _count(text: str) -> int:
    from virtualgpu.machines import MAXIMUM

    if not text.isdecimal() or not 1 <= int(text) <= MAXIMUM:
        raise ArgumentTypeError(f"choose a whole number from 1 to {MAXIMUM}, not {text}")
    return int(text)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Modules ask at their import whether there are GPUs, conftest.py among them."""
    options = early_config.known_args_namespace
    if options.gpus is None and options.like is None:
        return
    from virtualgpu.machines import use

    try:
        early_config.stash[_USED] = use(1 if options.gpus is None else options.gpus, options.like)
    except (ValueError, RuntimeError) as error:
        raise pytest.UsageError(str(error)) from None


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", f"{MARKER}(memory=None, seconds=None): what the test may take at most, of each virtual GPU's memory and of modelled time"
    )


def pytest_unconfigure(config: pytest.Config) -> None:
    if _USED in config.stash:
        config.stash[_USED].take_away()


def pytest_report_header(config: pytest.Config) -> str | None:
    return f"virtual GPUs: {config.stash[_USED]!r}" if _USED in config.stash else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without virtual GPUs there is no budget to keep."""
    if _USED not in config.stash:
        for item in items:
            if item.get_closest_marker(MARKER) is not None:
                item.add_marker(pytest.mark.skip(reason=_NO_GPUS))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What a virtual GPU refuses is a skip."""
    report = yield
    _skip_if_refused(item.config, report, call, item.location[0], item.location[1] or 0)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """So is what it refuses while a module is imported."""
    report = yield
    _skip_if_refused(collector.config, report, getattr(report, "call", None), collector.nodeid, 0)
    return report


def _skip_if_refused(
    config: pytest.Config, report: pytest.TestReport | pytest.CollectReport, call: pytest.CallInfo[Any] | None, path: str, line: int
) -> None:
    if report.failed and call is not None and call.excinfo is not None and _USED in config.stash:
        from virtualgpu import instruments

        if (refused := instruments.refusal_behind(call.excinfo.value)) is not None:
            report.outcome, report.longrepr = "skipped", (path, line + 1, f"Skipped: {refused}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Around the test itself: what its fixtures hold is there before and after."""
    checks = [*item.stash.get(_CHECKS, [])]
    if item.get_closest_marker(MARKER) is not None:
        checks.append(_of_markers(item))
    with ExitStack() as stack:
        for check in checks:
            stack.enter_context(check())
        return (yield)


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


def _asserted(request: pytest.FixtureRequest, check: Check) -> None:
    if _USED not in request.config.stash:
        pytest.skip(_NO_GPUS)
    request.node.stash.setdefault(_CHECKS, []).append(check)


@pytest.fixture
def no_gpu_leak(request: pytest.FixtureRequest) -> None:
    """The test fails if tensors that it made on a GPU outlive it."""
    _asserted(request, _no_leak)


@pytest.fixture
def no_gpu_race(request: pytest.FixtureRequest) -> None:
    """The test fails if two streams touch the same memory in it with no order between them."""
    _asserted(request, _no_race)


@pytest.fixture
def no_gpu_synchronization(request: pytest.FixtureRequest) -> None:
    """The test fails at the line that makes the host wait for a GPU by reading a value, or by a copy (`set_sync_debug_mode`)."""
    _asserted(request, _no_synchronization)


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
