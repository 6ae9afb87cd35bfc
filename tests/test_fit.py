"""`labkit fit` runs its attempts in copies of one process, and leaves no process behind."""

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from labkit.processes.supervision import is_running

WAITS = """
    import os, sys, time, torch
    from torch.utils.data import DataLoader
    class Samples(torch.utils.data.Dataset):
        def __len__(self):
            return 8
        def __getitem__(self, i):
            open(sys.argv[1], "a").write(f"{os.getpid()} {os.getppid()} ")
            time.sleep(600)
    for batch in DataLoader(Samples(), num_workers=1):
        pass
"""
LOOKS = """
    import os, sys, torch
    folders = [os.getcwd(), sys.path[0]]
    marks = [hasattr(torch, "mark"), os.environ["MARK"]]
    seen = [__name__, sys.argv[1:], *folders, sys.stdin.read(), *marks]
    torch.mark = True
    open(sys.argv[1], "a").write(f"{seen}\\n")
    model = torch.nn.Linear(8, 8).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        model(torch.ones(2, 8, device="cuda")).sum().backward()
        optimizer.step()
"""


@pytest.fixture
def temporary():
    """A folder for temporary files whose name is short enough for a socket's address."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        yield Path(name)


@pytest.fixture
def fit(tmp_path, temporary):
    """Return a function that starts `labkit fit` for a script that gets the name of a file."""
    folder = tmp_path / "here"
    folder.mkdir()

    def start(source: str, *options: str) -> "tuple[subprocess.Popen[str], Path]":
        script, told = tmp_path / "train.py", tmp_path / "told"
        script.write_text(textwrap.dedent(source), encoding="utf-8")
        command = [sys.executable, "-m", "labkit", "fit", *options, str(script), str(told)]
        environment = {**os.environ, "TMPDIR": str(temporary), "MARK": "mine"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        processes.append(subprocess.Popen(command, cwd=folder, env=environment, text=True, **pipes))
        return processes[0], told

    processes: list[subprocess.Popen[str]] = []
    yield start
    for process in processes:
        process.kill()
        process.communicate()


def wait_until(done: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
def test_interrupted_in_the_middle_it_ends_and_leaves_nothing(fit, temporary):
    """A worker process of a data loader may run at the moment of the interrupt."""
    process, told = fit(WAITS, "--like", "T4")
    wait_until(lambda: told.exists() and len(told.read_text().split()) == 2, 250)
    children = {child.pid for child in psutil.Process(process.pid).children(recursive=True)}
    assert children >= {int(pid) for pid in told.read_text().split()}
    process.send_signal(signal.SIGINT)
    page, said = process.communicate(timeout=280)
    # a slow machine tells of itself
    told_once = [line for line in said.splitlines()[1:] if ": running for " not in line]
    assert (process.returncode, page, told_once) == (130, "", ["labkit fit: interrupted."])
    wait_until(lambda: not any(map(is_running, children)), 120)
    # that the next machine removes
    assert [path.name[:11] for path in temporary.glob("labkit-*")] in (
        [],
        ["labkit-smi-"],
    )


@pytest.mark.slow
def test_each_attempt_is_a_process_that_knows_nothing_of_the_others(fit, tmp_path):
    process, told = fit(LOOKS, "--like", "T4,H200")
    _, said = process.communicate("input", timeout=300)
    assert process.returncode == 0, said
    looks = set(told.read_text().splitlines())
    assert len(told.read_text().splitlines()) > 2 and len(looks) == 1
    plain = subprocess.run(
        [sys.executable, tmp_path / "train.py", tmp_path / "plain"],
        cwd=tmp_path / "here",
        env={**os.environ, "MARK": "mine"},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    assert plain.returncode in (0, 1)  # it has no GPU
    assert looks == {
        (tmp_path / "plain").read_text().strip().replace(f"{tmp_path}/plain", f"{tmp_path}/told")
    }
