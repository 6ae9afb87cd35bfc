"""Cells and answers that end badly lose only their own points and harm no other submission."""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile

import pytest

from labcourse import backends, examination, sandbox

from .handed_in import HURRIED, LIMITS, notebook, solution

pytestmark = pytest.mark.slow

STUB = "def on_gpu(numbers): ..."
WRONG = "def on_gpu(numbers): return torch.tensor(numbers)"
RIGHT = "def on_gpu(numbers): return torch.tensor(numbers, device='cuda')"

# What a submission does, and how that is reported.
ENDINGS = {
    "exit without a word": ("import os; os._exit(0)", "ended"),
    "crash": ("import ctypes; ctypes.string_at(0)", "ended"),
    "endless loop": ("while True: pass", "time"),
    "endless loop that swallows everything": (
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
        "time",
    ),
    "endless loop deaf to alarms": (
        "import signal\nsignal.signal(signal.SIGALRM, signal.SIG_IGN)\nwhile True: pass",
        "time",
    ),
    "endless loop in C": ("import re; re.match(r'(a*)*b', 'a' * 60)", "time"),
    "fork bomb": (
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        "processes",
    ),
    "processes that leave their session": (
        "import os, time\nfor _ in range(200):\n    if os.fork() == 0:\n"
        "        os.setsid(); time.sleep(1000)",
        "processes",
    ),
    "20 GB of memory": ("big = bytearray(20 << 30)", "memory"),
    "memory bit by bit": ("held = []\nwhile True: held.append(b'x' * (400 << 20))", "memory"),
    "memory of several processes": (
        "import os, time\nfor _ in range(8):\n    if os.fork() == 0:\n"
        "        x = b'x' * (600 << 20); time.sleep(1000)\ntime.sleep(1000)",
        "memory",
    ),
    "10 GB of output": ("while True: print('x' * 1000000)", "output"),
    "output past Python": ("import os\nwhile True: os.write(1, b'x' * 1000000)", "output"),
    "files until the disk is full": (
        "for i in range(10000):\n    open(f'{i}', 'wb').write(b'x' * (64 << 20))",
        "errors",
    ),
    "shared memory": ("open('/dev/shm/big', 'wb').write(bytearray(512 << 20))", "errors"),
    "nonsense in every descriptor": (
        "import os\nfor fd in range(3, 256):\n    try: os.write(fd, b'\\xff' * 1000)\n"
        "    except OSError: pass",
        "tampered",
    ),
    "the line closed": (
        "import os\nfor fd in range(3, 256):\n    try: os.close(fd)\n    except OSError: pass",
        "ended",
    ),
}


@pytest.fixture
def examine(course, sandbox):
    def examined(data, limits=LIMITS, lab=None):
        sandbox.limits = limits
        return examination.examine(
            data, "ada", lab or course.lab("00"), course, frozenset(), sandbox
        )

    yield examined
    sandbox.limits = LIMITS


def limits_for(status):
    return HURRIED if status == "time" else LIMITS


def assert_nothing_gained(examined):
    assert sum(result["points"] for result in examined.exercises) == 0
    assert examined.points == (0 if examined.status in examination.FINISHED else None)
    assert examined.status in examination.KINDS and examined.remarks
    json.dumps(dataclasses.asdict(examined), allow_nan=False)


def assert_unharmed(examine):
    """Check that the next submission gets the points that it deserves."""
    examined = examine(notebook(RIGHT))
    assert (examined.status, examined.points, examined.remarks) == ("graded", 1.0, [])


@pytest.mark.parametrize("name", ENDINGS)
def test_a_cell_that(name, examine):
    source, status = ENDINGS[name]
    examined = examine(notebook(source, STUB), limits_for(status))
    assert_nothing_gained(examined)
    assert examined.status == status, examined.remarks
    assert_unharmed(examine)


@pytest.mark.parametrize(
    "name", [name for name in ENDINGS if ENDINGS[name][1] in ("time", "ended", "memory", "output")]
)
def test_an_answer_that(name, examine):
    """The answer contains the code of a cheat, which then runs when the answer is tried."""
    source, status = ENDINGS[name]
    body = "\n".join(f"    {line}" for line in source.splitlines())
    examined = examine(notebook(f"def on_gpu(numbers):\n{body}"), limits_for(status))
    assert sum(result["points"] for result in examined.exercises) == 0
    assert examined.points is None or examined.exercises[0]["message"].startswith(
        "Not yet: your answer raised"
    )
    assert_unharmed(examine)


def test_a_right_answer_beside_a_hanging_one_keeps_its_point(course, examine):
    """Only the exercise that hangs is lost, because another process tries the others."""
    lab = course.lab("01")
    # that take no time, however busy the machine
    lab = dataclasses.replace(lab, exercises=lab.exercises[:3])
    cells = [solution(exercise.number) for exercise in lab.exercises]
    cells[1] = "def on_device(index, work):\n    while True: pass"
    examined = examine(
        notebook(*cells, number="01.2", name="on_device"),
        dataclasses.replace(LIMITS, trial_seconds=10),
        lab,
    )
    assert [result["status"] for result in examined.exercises] == ["right", "time", "right"]
    assert (examined.points, examined.status) == (2.0, "time")


WORTHLESS = {
    "what is expected, printed": "print('00.1 Right.', {'observed': 1, 'points': 1})\n" + WRONG,
    "a chain of names without end": "x" + ".y" * 1500 + " = 0\n" + WRONG,
    "an exception that lies": "class E(Exception):\n    def __str__(self): raise SystemExit\n"
    "def on_gpu(numbers): raise E()",
    "SystemExit": "def on_gpu(numbers): raise SystemExit(0)",
    "no answer any more": RIGHT + "\ndel on_gpu",
}


@pytest.mark.parametrize("name", WORTHLESS)
def test_a_worthless_answer(name, examine):
    examined = examine(notebook(WORTHLESS[name]))
    assert examined.exercises[0]["status"] in ("wrong", "not attempted", "disturbed")
    assert sum(result["points"] for result in examined.exercises) == 0
    assert_unharmed(examine)


def test_nothing_is_left_between_submissions(examine):
    first = examine(
        notebook(
            "open('mine', 'w').write('1'); open('/dev/shm/mine', 'w').write('1')\n"
            "import torch; torch.mark = 1",
            RIGHT,
        )
    )
    assert first.points == 1
    second = examine(
        notebook(
            "import os\nassert 'mine' not in os.listdir('.')",
            "assert 'mine' not in os.listdir('/dev/shm')",
            "assert not hasattr(torch, 'mark')",
            RIGHT,
        )
    )
    assert (second.points, second.cell_errors) == (1, [])


UNREADABLE = {
    "broken JSON": b'{"cells": [',
    "empty": b"",
    "not text": b"\x00\xff" * 100,
    "a list": b"[]",
    "no cells": b'{"cells": [], "nbformat": 4, "nbformat_minor": 5, "metadata": {}}',
    "cells of nothing": b'{"cells": [1, null], "nbformat": 4}',
    "sources of numbers": b'{"cells": [{"cell_type": "code", "source": [1, 2]}], "nbformat": 4}',
    "deep nesting": b'{"cells": ' + b"[" * 100_000,
    "an old format": b'{"worksheets": [], "nbformat": 3}',
    "a number of a million digits": b'{"cells": ' + b"9" * 1_000_000 + b"}",
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_an_unreadable_file(name, examine):
    examined = examine(UNREADABLE[name])
    assert_nothing_gained(examined)
    assert examined.status == "unreadable"


def test_a_lost_tag_or_check_is_reported_only_where_the_answer_is_lost_too(examine):
    def changed(source, *changes):
        content = json.loads(notebook(source))
        for change in changes:
            change(content["cells"])
        found = examine(json.dumps(content).encode())
        return found.status, found.points, found.remarks

    def lose_tag(cells):
        cells[1]["metadata"].clear()

    def lose_check(cells):
        cells.pop()

    for changes in [(lose_tag,), (lose_check,), (lose_tag, lose_check)]:
        assert changed(RIGHT, *changes) == ("graded", 1, [])
        assert changed(WRONG, *changes) == ("graded", 0, [])
    assert changed(STUB, lose_tag) == ("graded", 0, [])
    status, points, remarks = changed("x = 1", lose_tag, lose_check)
    assert (status, points) == (
        "altered",
        0,
    ) and "neither the cell of 00.1 nor its check is there" in remarks[0]


@pytest.fixture(scope="module", params=["unshare", "none"])
def lesser(request):
    """A sandbox with a weaker backend."""
    try:
        backend = backends.best(LIMITS.scratch, request.param)
    except RuntimeError as error:
        pytest.skip(f"{request.param}: {error}")
    with sandbox.Sandbox(backend, LIMITS) as box:
        yield box


@pytest.mark.skipif(
    not os.path.isdir("/dev/shm"), reason="this system's shared memory has no folder"
)
def test_the_lesser_backends_leave_the_memory_that_others_share_alone(lesser, course):
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as anothers:
        assert (
            examination.examine(
                notebook(RIGHT), "ada", course.lab("00"), course, frozenset(), lesser
            ).points
            == 1
        )
        assert os.path.exists(anothers.name)


def test_the_lesser_backends_warn_and_still_keep_their_limits(lesser, course):
    assert "bubblewrap" in lesser.backend.warning
    for source, status in {
        "import os; os._exit(0)": "ended",
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass": "time",
        "held = []\nwhile True: held.append(b'x' * (256 << 20))": "memory",
        "while True: print('x' * 1000000)": "output",
        "import os, time\nfor _ in range(80):\n    if os.fork() == 0:\n"
        "        time.sleep(1000)\ntime.sleep(3)": "processes",
    }.items():
        lesser.limits = limits_for(status)
        examined = examination.examine(
            notebook(source, STUB), "ada", course.lab("00"), course, frozenset(), lesser
        )
        assert examined.points is None and examined.status == status, (source, examined)
    lesser.limits = LIMITS
    assert (
        examination.examine(
            notebook(RIGHT), "ada", course.lab("00"), course, frozenset(), lesser
        ).points
        == 1
    )


def test_no_process_stays_when_a_sandbox_is_closed(bubblewrap):
    box = sandbox.Sandbox(bubblewrap, LIMITS)
    with box.run() as process:
        process.ask({"cells": [], "random": 1, "seconds": 1}, 10)
        children = subprocess.run(
            ["ps", "-e", "-ww", "-o", "args"], capture_output=True, text=True
        ).stdout
    assert "labcourse.sandbox_server" in children
    pid = box._server.pid
    box.close()
    assert not os.path.exists(f"/proc/{pid}")
    assert sys.exc_info() == (None, None, None)
