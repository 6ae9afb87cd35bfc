"""Isolated runs called from a thread, from a script without a guard, and from a notebook."""

import os
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

import nbclient
import nbformat
import psutil
import pytest

import labkit
from labkit.processes.supervision import processes_of

pytestmark = pytest.mark.slow


@pytest.mark.usefixtures("nothing_left")
def test_a_thread_without_a_machine():
    with ThreadPoolExecutor(1) as threads:
        came = threads.submit(labkit.isolated, sum, [1, 2]).result()
    assert came == labkit.Isolated(3, "")


SCRIPT = """
import os, pickle, signal, sys, threading
import torch, labkit

class Point:
    x = 1

def run(limit):
    torch.ones(3, device="cuda")
    same = pickle.loads(pickle.dumps(Point)) is Point
    return Point(), same, torch.cuda.get_device_name(1)

def end_the_caller(caller):
    os.kill(caller, signal.SIGKILL)
    threading.Event().wait()

point, same, name = labkit.isolated(run, 1).value
print(type(point) is Point, same, name)
if "end" in sys.argv:
    def started():
        labkit.isolated(end_the_caller, os.getpid(), timeout=None)
    started()
"""


def test_a_script_without_a_guard_which_is_killed(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # it hides virtual GPUs too
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "labkit",
        "run",
        "--gpus",
        "2",
        "--like",
        "H200",
        script,
        "end",
    ]
    with tempfile.TemporaryDirectory() as folder:
        ran = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env=os.environ | {"TMPDIR": folder},
            timeout=240,
        )
        assert (ran.stdout, ran.returncode) == ("True True NVIDIA H200\n", -signal.SIGKILL)
        assert len(ran.stderr.splitlines()) == 1  # where it runs
        psutil.wait_procs(processes_of(folder), timeout=60)
        assert processes_of(folder) == []


CELLS = (
    "import labkit",
    "scale = 3\nclass Point:\n    x = 1\ndef train(n):\n    if n < 0:\n"
    "        raise ValueError('negative')\n    return Point(), n * scale",
    "point, tripled = labkit.isolated(train, 4).value\nprint(tripled, isinstance(point, Point))",
    "labkit.isolated(train, -1)",
)


def test_from_a_notebook():
    cells = [nbformat.v4.new_code_cell(source) for source in CELLS]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(
        notebook, timeout=240, kernel_name="python3", allow_errors=True
    ).execute()
    assert notebook.cells[2].outputs[0].text == "12 True\n"
    error = notebook.cells[3].outputs[0]
    assert (error.ename, error.evalue) == ("IsolatedError", "train() raised ValueError: negative.")
    shown = "\n".join(error.traceback)
    assert "raise ValueError('negative')" in shown and "in train" in shown


def free_here() -> int:
    import torch

    torch.ones(1, device="cuda:1")
    return torch.cuda.mem_get_info(1)[0]


def test_an_isolated_function_sees_what_this_process_holds():
    import torch

    with labkit.use(gpus=2, like="H200", virtual=True, quiet=True):
        context = torch.cuda.get_device_properties(1).total_memory - torch.cuda.mem_get_info(1)[0]
        held = torch.empty(1 << 30, dtype=torch.uint8, device="cuda:1")
        assert labkit.isolated(free_here).value == torch.cuda.mem_get_info(1)[0] - context - (
            2 << 20
        )
        assert held.nbytes == torch.cuda.memory_reserved(1)
