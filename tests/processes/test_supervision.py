"""Output that is kept in part, and processes that lose their caller."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from labkit.processes import supervision

pytestmark = pytest.mark.slow


def test_short_output_is_whole():
    ends = supervision.KeptOutput()
    for _ in range(3):
        ends.add("µ\n".encode())
    assert ends.text() == "µ\n" * 3


def test_of_long_output_both_ends_are_kept(monkeypatch):
    monkeypatch.setattr(supervision, "KEPT", 1 << 10)
    ends, lines = supervision.KeptOutput(), [f"line {number} µµµ\n" for number in range(100_000)]
    for line in lines:
        ends.add(line.encode())
    first, last = ends.text().split("\n[... 1.7 MiB of output left out ...]\n")
    assert "".join(lines).startswith(first) and "".join(lines).endswith(last)
    assert all(1020 <= len(part.encode()) <= 1024 for part in (first, last))
    assert len(ends.last) <= 2 << 10


_WORKER = """
import socket, sys, time
from labkit.processes.supervision import end_with_caller
caller = socket.socket(fileno=int(sys.argv[1]))
end_with_caller(caller, sys.argv[2])
caller.send(b"!")
time.sleep(60)
"""


def test_workers_in_one_folder_that_lose_their_caller_at_once_leave_nothing(tmp_path):
    folder = tmp_path / "labkit-job"
    folder.mkdir()
    lines, workers = [], []
    for _ in range(4):
        mine, other = socket.socketpair()
        workers.append(
            subprocess.Popen(
                [sys.executable, "-c", _WORKER, str(other.fileno()), str(folder)],
                pass_fds=[other.fileno()],
                start_new_session=True,
                env=os.environ | {supervision.JOB_VARIABLE: str(folder)},
            )
        )
        other.close()
        lines.append(mine)
    for line in lines:
        assert line.recv(1) == b"!"
    for line in lines:
        line.close()
    assert [worker.wait(200) for worker in workers] == [-signal.SIGKILL] * 4
    assert list(tmp_path.iterdir()) == []
