"""Processes that share the GPUs of one virtual machine: what each sees, the same as on CUDA."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
WARNING = "Producer process has been terminated before all shared CUDA tensors released. See Note [Sharing CUDA tensors]"
# What the programs in sharing_programs.py see. Memory in MiB.
EXPECTED = {
    "one memory": {
        "child": {
            "values": [0, 1, 2, 4, 5, 6],
            "allocated, reserved": [0, 0],
            "allocated after a write": 0,
            "one storage": True,
            "offset": 3,
            "device": "cuda:0",
            "a parameter": [True, True, True, True],
            "empty": [[0, 3], "cuda:0"],
            "strides": [1, 3],
            "shared": True,
        },
        "parent": [0, 1, 2, 4, 5, 6],
        "child again": [
            True,
            "RuntimeError: Attempted to send CUDA tensor received from another process; this is not currently supported. "
            "Consider cloning before sending.",
            "RuntimeError: Trying to resize storage that is not resizable",
        ],
        "sent back": [[0, 1, 2, 4, 5, 6], True],
        "exit": 0,
        "non-leaf": "RuntimeError: Cowardly refusing to serialize non-leaf tensor which requires_grad, since autograd does not support "
        "crossing process boundaries.  If you just want to transfer the data, call detach() on the tensor before serializing (e.g., "
        "putting it on the queue).",
        "storage": "RuntimeError: Cannot pickle CUDA storage; try pickling a CUDA tensor instead",
    },
    "lifetime": {
        "deleted, used": 4,
        "collected, used": 4,
        "let go": 4,
        "let go, collected": 0,
        "a block found again": [32, 32, True],
    },
    "from a child": {"mean": 2, "parent": 0, "child, used": 4, "exit": 0},
    "ways to send": {
        "pool": [[0, 0], [16, 81]],
        "made in a pool": [[5, 5], [6, 6]],
        "names": ["weight", "bias"],
        "trained by the child": [[[0.5, 0.5]], [0.5]],
        "gradients here": [None, None],
    },
    "one device": {
        "a limit for the child alone": [True, True, 1],
        "the child has a context": True,
        "taken, whole GiB": 2,
        "in the error": [[False, "MiB"], [True, "GiB"]],
        "the child in the error": True,
        "the child in nvidia-smi, whole GiB": 2,
        "a killed child holds nothing": True,
    },
    "forks": {
        "before CUDA": "nothing was raised",
        "after CUDA": "RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the "
        "'spawn' start method",
    },
    "producer ends first": {"exit": 0, "received": "AcceleratorError: CUDA error: invalid device context"},
    "held at the end": {"sum": 4, "gone": "gone"},
}
WARNS = ("producer ends first", "held at the end")  # once each
GROUPS = (tuple(name for name in EXPECTED if name not in ("forks", *WARNS)), ("forks",), WARNS)


def run(names: tuple[str, ...], real: bool) -> tuple[dict, list[str]]:
    """What the programs saw, one after the other in one process, and the lines of stderr."""
    command = [sys.executable, *(() if real else ("-m", "labkit", "run", "--gpus", "2", "--like", "H200"))]
    result = subprocess.run(
        [*command, HERE / "sharing_programs.py", *names],
        capture_output=True,
        text=True,
        timeout=280,
        env=os.environ | {"PYTHONWARNINGS": "ignore"},  # Python 3.12 warns of forks beside threads
    )
    seen: dict = {}
    for line in result.stdout.splitlines():
        seen |= json.loads(line)
    return seen, result.stderr.splitlines()


def check(names: tuple[str, ...], real: bool) -> None:
    seen, complaints = run(names, real)
    assert set(seen) == set(names), "\n".join(complaints)
    for name in names:
        assert seen[name] == EXPECTED[name]
    assert [line.partition("] ")[2] for line in complaints] == [WARNING] * sum(name in WARNS for name in names)


@pytest.mark.parametrize("names", GROUPS, ids=["sent", "forked", "warned"])
def test_processes_see_what_they_would_on_cuda(names):
    check(names, real=False)


@pytest.mark.gpu
@pytest.mark.parametrize("names", GROUPS, ids=["sent", "forked", "warned"])
def test_processes_see_the_same_on_a_real_gpu(names):
    check(names, real=True)
