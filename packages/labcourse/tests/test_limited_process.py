"""Text that is too much to read costs one call, not the process that asked."""

import ast
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from labcourse import reading
from labcourse.limited_process import LimitedProcess, LimitError
from labcourse.reading import UnreadableError

from .handed_in import notebook

pytestmark = pytest.mark.slow


@pytest.fixture
def lines():
    return []


@pytest.fixture
def limited(lines):
    with LimitedProcess(lines.append, seconds=3, memory=256 << 20) as process:
        yield process


def test_a_notebook_is_read_in_another_process(limited, lines):
    assert limited.call(os.getpid) == limited.call(os.getpid) != os.getpid()
    read = limited.call(reading.parse, notebook("x = 1"))
    assert read == reading.parse(notebook("x = 1")) and lines == []


def test_the_functions_own_exception_is_raised_and_the_process_lives_on(limited):
    before = limited.call(os.getpid)
    with pytest.raises(UnreadableError, match="the file is empty"):
        limited.call(reading.parse, b"")
    with pytest.raises(SyntaxError):
        limited.call(ast.parse, "def f(:")
    assert limited.call(os.getpid) == before


@pytest.mark.parametrize(
    ("function", "argument", "message"),
    [
        (time.sleep, 1000, "longer than 3 s"),
        (bytearray, 1 << 33, "more than 256 MiB of memory"),
        (json.loads, "[" * 1_000_000, "nested too deeply"),
        (os._exit, 3, "exit status 3"),
        (os.urandom, 70 << 20, "more than 64 MiB"),
    ],
)
def test_what_exceeds_a_limit_is_one_errors_worth(limited, function, argument, message):
    with pytest.raises(LimitError, match=message):
        limited.call(function, argument)
    assert limited.call(abs, -1) == 1


def test_the_screen_names_what_takes_long(limited, lines):
    with pytest.raises(LimitError):
        limited.call(time.sleep, 1000, about="reading ada/02_streams.ipynb")
    assert lines == ["reading ada/02_streams.ipynb takes long. It will be ended after 3 s"]


def test_ctrl_c_ends_a_call_and_leaves_no_process():
    program = (
        "import os, time\n"
        "from labcourse.limited_process import LimitedProcess\n"
        "with LimitedProcess(seconds=1000) as process:\n"
        "    print(process.call(os.getpid), flush=True)\n"
        "    process.call(time.sleep, 1000)\n"
    )
    command = [sys.executable, "-c", program]
    folder = Path(reading.__file__).parents[1]
    started = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with started:
        pid = int(started.stdout.readline())
        started.send_signal(signal.SIGINT)
        _, error = started.communicate(timeout=280)
    assert b"KeyboardInterrupt" in error
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
