"""Isolated runs called from a thread, from a script without a guard, and from a notebook."""

import os
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbclient
import nbformat
import psutil
import pytest
import torch

import labkit
from labkit.processes.supervision import processes_of

pytestmark = pytest.mark.slow


def failure(function, *args):
    with pytest.raises(labkit.IsolatedError) as caught:
        labkit.isolated(function, *args)
    return caught.value


@pytest.mark.usefixtures("nothing_left")
def test_a_thread_without_a_machine():
    def fail(depth):
        class OwnError(ValueError):
            def __reduce__(self):
                raise TypeError("cannot be sent")

        try:
            raise KeyError("first")
        except KeyError as error:
            raise OwnError("second\nand more") from error

    with ThreadPoolExecutor(1) as threads:
        error = threads.submit(failure, fail, 2).result()
    assert str(error).endswith("OwnError: second.") and error.kind == "exception"
    assert error.original.text == "second\nand more" and 'raise OwnError("second\\nand more") from error' in error.original.traceback
    assert 'raise KeyError("first")' in error.original.traceback and "/labkit/isolation/" not in error.original.traceback
    if not torch.cuda.is_available():
        assert error.why_no_trace == "there is no GPU to record: labkit.use(gpus=1) gives you one, real or virtual"


SCRIPT = """
import os, pickle, signal, subprocess, sys, threading
import torch, labkit

class Point:
    x = 1

def run(limit):
    torch.ones(3, device="cuda")
    same = pickle.loads(pickle.dumps(Point)) is Point
    return Point(), same, torch.cuda.get_device_name(1)

def end_the_parent():
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    os.kill(os.getppid(), signal.SIGKILL)
    threading.Event().wait()

point, same, name = labkit.isolated(run, 1).value
print(type(point) is Point, same, name)
if "end" in sys.argv:
    def started():
        labkit.isolated(end_the_parent, timeout=None)
    started()
"""


def test_a_script_without_a_guard_which_is_killed(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # it hides virtual GPUs too
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "labkit", "run", "--gpus", "2", "--like", "H200", script, "end"]
    with tempfile.TemporaryDirectory() as folder:
        ran = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"TMPDIR": folder}, timeout=240)
        assert (ran.stdout, ran.returncode) == ("True True NVIDIA H200\n", -signal.SIGKILL)
        assert len(ran.stderr.splitlines()) == 1  # where it runs
        psutil.wait_procs(processes_of(folder), timeout=60)
        assert processes_of(folder) == []
        assert [path.name for path in Path(folder).glob("labkit-*") if (path / "request.json").exists()] == []


CELLS = (
    "import labkit",
    "scale = 3\nclass Point:\n    x = 1\ndef train(n):\n    if n < 0:\n        raise ValueError('negative')\n    return Point(), n * scale",
    "point, tripled = labkit.isolated(train, 4).value\nprint(tripled, isinstance(point, Point))",
    "labkit.isolated(train, -1)",
)


def test_from_a_notebook():
    cells = [nbformat.v4.new_code_cell(source) for source in CELLS]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3", allow_errors=True).execute()
    assert notebook.cells[2].outputs[0].text == "12 True\n"
    error = notebook.cells[3].outputs[0]
    assert (error.ename, error.evalue) == ("IsolatedError", "train() raised ValueError: negative.")
    shown = "\n".join(error.traceback)
    assert "raise ValueError('negative')" in shown and "in train" in shown
