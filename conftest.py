"""What the tests of the kit and of its packages share.

One thread each, two sizes of test, Hypothesis's settings, and the tests that need real GPUs.
"""

import gc
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import settings

# Workers share the cores, and torch's threads spin while they wait. With two threads each, two
# workers on two cores took twice as long.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Variables that may change in a test: pytest's own, one that PyTorch sets when its compiler is
# first imported, and those by which children find the machine in use, which a test may take away.
MAY_CHANGE = {
    "PYTEST_CURRENT_TEST",
    "TORCHINDUCTOR_CACHE_DIR",
    "LABKIT_MACHINE",
    "LABKIT_NVIDIA_SMI",
    "PATH",
}

# No deadlines: a busy machine is no failure. Derandomized: a run finds today what it found
# yesterday.
settings.register_profile("whole", deadline=None, max_examples=200, derandomize=True)
settings.register_profile("sample", deadline=None, max_examples=15, derandomize=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    size = parser.getgroup("general").addoption
    size("--everything", action="store_true", help="run slow tests too, and large sets whole")
    size(
        "--rest",
        action="store_true",
        help="run what a run without options leaves out: slow tests, and the rest of large sets",
    )
    size(
        "--slow",
        action="store_true",
        help="run slow tests, and a fixed sample of large sets of them",
    )


@pytest.hookimpl(tryfirst=True)  # before Hypothesis reads its options
def pytest_configure(config: pytest.Config) -> None:
    """Choose how many examples property tests try: many with --everything or --rest, else few."""
    given = [f"--{size}" for size in ("everything", "rest", "slow") if config.getoption(size)]
    if len(given) > 1:
        raise pytest.UsageError(f"{given[0]} includes {given[1]}: give one of them")
    # A shell's `make test &` leaves SIGINT ignored, also in all processes that tests start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    many = config.getoption("everything") or config.getoption("rest")
    settings.load_profile("whole" if many else "sample")


def pytest_report_header(config: pytest.Config) -> str:
    if config.getoption("everything"):
        return "everything: slow tests, and large sets whole"
    if config.getoption("rest"):
        return "the rest: slow tests, and the cases of large sets outside the fixed samples"
    if config.getoption("slow"):
        return "slow tests, and a fixed sample of each large set of them; --everything runs all"
    return (
        "fast tests, and a fixed sample of each large set; --rest runs the others, --everything all"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With --slow, skip files without a slow test. Importing them takes a worker half a minute."""
    if config.getoption("slow") and re.fullmatch(r"test_.*\.py", collection_path.name):
        return True if "mark.slow" not in collection_path.read_text(encoding="utf-8") else None
    return None


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """Fail a test that leaves another environment to the tests after it."""
    before = dict(os.environ)
    yield
    left = {
        name
        for name in before.keys() | os.environ.keys()
        if before.get(name) != os.environ.get(name)
    }
    assert left <= MAY_CHANGE


@pytest.fixture(autouse=True)
def no_lab_used_before() -> None:
    """Reset the labs before each test, because in a new kernel no lab has been used."""
    if (panel := sys.modules.get("labkit.labs.panel")) is not None:
        panel.Panel._last_used.clear()


@pytest.fixture(autouse=True)
def the_same_draws(request: pytest.FixtureRequest) -> Iterator[None]:
    """Seed the random draws of checks with the test's name, so that every run is the same.

    With LABKIT_TRIES, which asks for a search, draws are random.
    """
    checking = sys.modules.get("labkit.checks.checking")
    # The test's own MonkeyPatch would be undone before the test's fixtures end.
    with pytest.MonkeyPatch.context() as patch:
        if checking is not None and "LABKIT_TRIES" not in os.environ:
            of_this_test = random.Random(request.node.nodeid)

            def by_name(seed: int | None = None) -> random.Random:
                return random.Random(of_this_test.random() if seed is None else seed)

            patch.setattr(checking, "random", SimpleNamespace(Random=by_name))
        yield


@pytest.fixture(autouse=True)
def the_same_main() -> Iterator[None]:
    """Restore `__main__`, which an IPython shell replaces and in which multiprocessing looks."""
    main = sys.modules["__main__"]
    yield
    sys.modules["__main__"] = main


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list:
    """The matplotlib figures behind all figures of the kit that the test has finished."""
    from gputrace.figures import Figure

    canvases = []
    finish = Figure.__init__

    def finished(figure, canvas, alt):
        canvases.append(canvas)
        finish(figure, canvas, alt)

    monkeypatch.setattr(Figure, "__init__", finished)
    return canvases


@pytest.fixture
def run_examples(tmp_path: Path) -> Callable[[Path], str]:
    """Return a function that runs a page's Python examples and returns what they print.

    The examples are one program and run in an empty folder.
    """

    def run(page: Path) -> str:
        examples = re.findall(
            r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
        )
        program = tmp_path / "examples.py"
        program.write_text("\n".join(examples), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, program.name],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert examples and done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture(autouse=True, scope="module")
def little_to_collect() -> None:
    """Exclude the objects that exist already from garbage collections and searches for tensors.

    There are half a million of them, and the tests collect often. This happens before each file,
    because some tests undo it and earlier files have imported more.
    """
    gc.collect()
    gc.freeze()


def gpus_needed(count: int = 1) -> int:
    """Return the number of GPUs in a marker, such as `gpu`, `gpu(2)` or `gpu(count=2)`."""
    return count


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests that this run asks for. Skip tests that need more real GPUs than there are."""
    if not config.getoption("everything"):
        slow = {id(item) for item in items if item.get_closest_marker("slow")}
        sampled_out = not_in_sample(items)
        every = {id(item) for item in items}
        if config.getoption("rest"):
            left_out = every - slow - sampled_out
        elif config.getoption("slow"):
            left_out = (every - slow) | sampled_out
        else:
            left_out = slow | sampled_out
        config.hook.pytest_deselected(items=[item for item in items if id(item) in left_out])
        items[:] = [item for item in items if id(item) not in left_out]
    skip_without_gpus(items)


def not_in_sample(items: list[pytest.Item]) -> set[int]:
    """Return the identities of the cases that the fixed sample of a `sample(n)` test leaves out."""
    cases: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sample"):
            name = getattr(item, "originalname", item.name)
            cases.setdefault((str(item.path), name), []).append(item)
    found = set()
    for (_, name), those in cases.items():
        [size] = those[0].get_closest_marker("sample").args
        chosen = random.Random(name).sample(range(len(those)), min(size, len(those)))
        found |= {id(item) for index, item in enumerate(those) if index not in chosen}
    return found


def skip_without_gpus(items: list[pytest.Item]) -> None:
    marked = [(item, marker) for item in items if (marker := item.get_closest_marker("gpu"))]
    if not marked:
        return
    import torch

    present = torch.cuda.device_count()
    for item, marker in marked:
        needed = gpus_needed(*marker.args, **marker.kwargs)
        if present < needed:
            item.add_marker(
                pytest.mark.skip(
                    reason=f"needs {needed} real CUDA GPU{'s' * (needed > 1)}, "
                    f"this machine has {present}"
                )
            )
