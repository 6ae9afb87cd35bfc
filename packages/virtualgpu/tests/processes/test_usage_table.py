"""The table of the memory that all processes of a machine hold, without those that have ended."""

import os
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from virtualgpu.processes import usage_table
from virtualgpu.processes.usage_table import UsageTable

OTHER = """
import os, sys
from virtualgpu.processes.usage_table import UsageTable
usage_table = UsageTable("T4", 2, 100, sys.argv[1])
usage_table.hold(1, 30)
print(usage_table.holders(0), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def table() -> Iterator[UsageTable]:
    made = UsageTable("T4", 2, 100)
    yield made
    made.close()


def other(table: UsageTable, code: str = OTHER) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", code, table.address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    process.line = process.stdout.readline().strip()
    return process


def test_each_process_sees_what_the_others_hold(table):
    table.hold(0, 20)
    with other(table) as process:
        assert process.line == f"[({os.getpid()}, 20)]"
        assert table.holders(1) == [(process.pid, 30)] and table.others(1) == 30
        assert table.others(0) == 0  # a process does not count its own memory as another's
        table.hold(1, 5)
        assert (
            sorted(table.holders(1))
            == table.holders(1)
            == sorted([(os.getpid(), 5), (process.pid, 30)])
        )
        table.hold(1, 0)
        assert table.holders(1) == [(process.pid, 30)]
        process.stdin.close()
    assert table.holders(1) == []


def test_a_killed_process_holds_nothing_even_before_its_parent_notices(table):
    with other(table) as process:
        process.kill()
        # it has ended, but the system still lists it
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE
        assert table.holders(1) == [] and table.others(1) == 0


def test_rows_of_the_dead_are_given_anew(table, monkeypatch):
    monkeypatch.setattr(usage_table, "ROWS", 2)
    small = UsageTable("T4", 2, 100)
    for _ in range(3):
        with other(small) as process:
            assert small.holders(1) == [(process.pid, 30)]
            process.kill()
    small.hold(0, 1)
    with other(small):
        again = UsageTable("T4", 2, 100, small.address)
        with pytest.raises(
            RuntimeError, match="more than 2 processes hold memory of one virtual machine"
        ):
            again.hold(0, 1)
        again.close()
    small.close()


def test_a_number_that_has_come_again_is_another_process(table, monkeypatch):
    with other(table) as process:
        born = usage_table.started
        monkeypatch.setattr(usage_table, "started", lambda pid: born(pid) + (pid == process.pid))
        assert table.holders(1) == []
        process.stdin.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_has_a_row_of_its_own(table):
    table.hold(0, 20)
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        table.after_fork()
        table.hold(0, 7)
        os.write(writing, str(table.others(0)).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        assert answer.read() == "20"
    assert table.holders(0) == [(os.getpid(), 20)]


def test_only_the_same_machine_is_joined(table):
    joined = usage_table.join("T4", 2, 100, table.address)
    assert joined is not None
    joined.close()
    assert (
        usage_table.join("T4", 2, 101, table.address)
        is usage_table.join("T4", 3, 100, table.address)
        is None
    )
    assert (
        usage_table.join("L4", 2, 100, table.address)
        is usage_table.join("T4", 2, 100, None)
        is usage_table.join("T4", 2, 100, "/nowhere")
        is None
    )


def test_a_closed_one_holds_nothing(table):
    again = UsageTable("T4", 2, 100, table.address)
    again.hold(0, 9)
    again.close()
    assert table.holders(0) == [] == again.holders(0)
    again.hold(0, 9)
    with again.claiming():
        assert table.holders(0) == []


def test_processes_have_a_start_and_a_program():
    assert usage_table.started(os.getpid()) == usage_table.started(os.getpid()) != 0
    assert usage_table.started(2**22 + 1) == 0 and usage_table.program(2**22 + 1) == "[Not Found]"
    assert usage_table.program(os.getpid()) == sys.executable
