"""Processes that share the GPUs of one virtual machine see the same as on CUDA."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import torch

import virtualgpu
from virtualgpu import sharing

HERE = Path(__file__).parent
WARNING = (
    "Producer process has been terminated before all shared CUDA tensors released. See Note "
    "[Sharing CUDA tensors]"
)
# The output of the programs in sharing_programs.py. Memory is in MiB.
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
            "RuntimeError: Attempted to send CUDA tensor received from another process; this is "
            "not currently supported. "
            "Consider cloning before sending.",
            "RuntimeError: Trying to resize storage that is not resizable",
        ],
        "sent back": [[0, 1, 2, 4, 5, 6], True],
        "exit": 0,
        "non-leaf": "RuntimeError: Cowardly refusing to serialize non-leaf tensor which "
        "requires_grad, since autograd does not support crossing process boundaries.  If you just "
        "want to transfer the data, call detach() on the tensor before serializing (e.g., putting "
        "it on the queue).",
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
    "by file name": {"sum": 4, "used": 512, "let go": 0, "exit": 0},
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
        "after CUDA": "RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA "
        "with multiprocessing, you must use the "
        "'spawn' start method",
    },
    "events": {
        "in the child": [False, True],
        "here": True,
        "of the child": [False, True],
        "exit": 0,
    },
    "producer ends first": {
        "exit": 0,
        "received": f"{torch.AcceleratorError.__name__}: CUDA error: invalid resource handle",
    },
    "held at the end": {"sum": 4, "gone": "gone"},
}
WARNS = ("held at the end", "producer ends first")  # once each
GROUPS = {
    "sent": ("one memory", "lifetime", "from a child", "by file name"),
    "used": ("ways to send", "one device", "events"),
    "forked": ("forks",),
    "warned": WARNS,
}


def _without_hidden_gpus() -> dict[str, str]:
    """Return the environment without CUDA_VISIBLE_DEVICES, which would hide virtual GPUs, too."""
    return {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}


def run(names: tuple[str, ...], real: bool) -> tuple[dict, list[str]]:
    """Run programs in turn in one process, and return their output and the lines of stderr."""
    command = [
        sys.executable,
        *(() if real else ("-m", "virtualgpu", "run", "--gpus", "2", "--like", "H200")),
    ]
    environment = os.environ if real else _without_hidden_gpus()
    result = subprocess.run(
        [*command, HERE / "sharing_programs.py", *names],
        capture_output=True,
        text=True,
        timeout=280,
        # Python 3.12 warns about forks in a process with threads.
        env=environment | {"PYTHONWARNINGS": "ignore"},
    )
    seen: dict = {}
    for line in result.stdout.splitlines():
        seen |= json.loads(line)
    # the kit's first line says on which GPUs it runs
    return seen, result.stderr.splitlines()[0 if real else 1 :]


def check(names: tuple[str, ...], real: bool) -> None:
    seen, complaints = run(names, real)
    assert set(seen) == set(names), "\n".join(complaints)
    for name in names:
        assert seen[name] == EXPECTED[name]
    said = [
        line.partition("] ")[2] for line in complaints if not real or "CudaIPCTypes.cpp" in line
    ]
    expected = [WARNING] * sum(name in WARNS for name in names)
    # The child of another program warns, too, if it ends before its memory is given back here.
    if real:
        assert set(said) <= {WARNING} and len(said) >= len(expected)
    else:
        assert said == expected


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_processes_see_what_they_would_on_cuda(group):
    check(GROUPS[group], real=False)


@pytest.mark.gpu
@pytest.mark.parametrize("group", GROUPS)
def test_processes_see_the_same_on_a_real_gpu(group):
    check(GROUPS[group], real=True)


# Only on virtual GPUs


def run_script(tmp_path: Path, code: str, *options: str, **environment: str) -> subprocess.Popen:
    """Run a program with `virtualgpu run`, in a process group of its own."""
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(code))
    return subprocess.Popen(
        [sys.executable, "-m", "virtualgpu", "run", *options, path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=_without_hidden_gpus() | environment,
    )


WITHOUT_VALUES = """
    import torch, torch.multiprocessing as mp
    def child(end):
        x, number = end.recv()
        x.add_(1)
        said = []
        for unknown in (x, number):
            said.append(repr(unknown.sum().item()))
        end.send([x.shape, x.stride(), x.data_ptr() != 0, torch.cuda.memory_allocated(), said])
        end.recv()
        end.send(x.new_zeros(2, 2))
        end.recv()
    if __name__ == "__main__":
        context = mp.get_context("fork")  # CUDA is not up yet
        here, there = context.Pipe()
        process = context.Process(target=child, args=(there,))
        process.start()
        there.close()
        x = torch.ones(1 << 20, 3, device="cuda").t()
        here.send((x, torch.ones(1, device="cuda")))
        print(here.recv())
        here.send(None)
        print(here.recv().shape, torch.cuda.memory_allocated())
        here.send(None)
        process.join()
"""


@pytest.mark.slow
def test_without_values_shapes_and_memory_are_sent(tmp_path):
    with run_script(tmp_path, WITHOUT_VALUES, "--no-values") as process:
        output, complaints = process.communicate(timeout=280)
    assert output.splitlines() == [
        f"{[torch.Size([3, 1 << 20]), (1, 3), True, 0, ['nan', 'nan']]}",
        f"torch.Size([2, 2]) {(12 << 20) + 512}",
    ], complaints


WITH_FEW_VALUES = """
    import torch, torch.multiprocessing as mp
    def child(end):
        x, large = end.recv()
        try:
            x.add_(large.sum())
        except NotImplementedError as error:
            end.send(str(error).partition(" is not supported")[0])
        end.recv()
    if __name__ == "__main__":
        context = mp.get_context("fork")  # CUDA is not up yet
        here, there = context.Pipe()
        process = context.Process(target=child, args=(there,))
        process.start()
        there.close()
        x, large = torch.ones(2, device="cuda"), torch.ones(1 << 20, device="cuda")
        here.send((x, large))
        print(here.recv(), x.tolist())
        here.send(None)
        process.join()
"""


@pytest.mark.slow
def test_values_that_were_too_large_to_keep_are_not_sent(tmp_path):
    with run_script(tmp_path, WITH_FEW_VALUES, LABKIT_HOST_BUDGET="100000") as process:
        output, complaints = process.communicate(timeout=280)
    assert (
        output
        == "writing values that were not kept into a tensor that another process sees [1.0, 1.0]\n"
    ), complaints


FROM_A_LOADER = """
    import torch
    class Numbers(torch.utils.data.Dataset):
        def __len__(self):
            return 4
        def __getitem__(self, number):
            return torch.full((2,), float(number), device="cuda")
    if __name__ == "__main__":  # its worker is forked, and CUDA is not up yet
        loader = torch.utils.data.DataLoader(
            Numbers(), batch_size=2, num_workers=1, multiprocessing_context="fork"
        )
        for batch in loader:
            print(batch.tolist(), batch.device, torch.cuda.memory_allocated())
"""


@pytest.mark.slow
def test_a_loader_s_workers_make_batches_on_the_gpu(tmp_path):
    with run_script(tmp_path, FROM_A_LOADER) as process:
        output, complaints = process.communicate(timeout=280)
    assert output == "[[0.0, 0.0], [1.0, 1.0]] cuda:0 0\n[[2.0, 2.0], [3.0, 3.0]] cuda:0 0\n", (
        complaints
    )


HOLDING = """
    import torch, torch.multiprocessing as mp
    def child(end):
        x = end.recv()
        end.send(None)
        end.recv()
    if __name__ == "__main__":
        context = mp.get_context("fork")  # CUDA is not up yet
        here, there = context.Pipe()
        process = context.Process(target=child, args=(there,))
        process.start()
        here.send(torch.ones(1 << 20, device="cuda"))
        here.recv()
        print(process.pid, flush=True)
        here.recv()
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not os.path.isdir("/dev/shm"), reason="this system's shared memory has no folder"
)
def test_killed_processes_leave_no_shared_memory(tmp_path):
    with run_script(tmp_path, HOLDING) as process:
        child = int(process.stdout.readline())
        os.killpg(process.pid, signal.SIGKILL)
    names = os.listdir("/dev/shm")
    assert not [
        name
        for name in names
        if "labkit" in name or f"_{process.pid}_" in name or f"_{child}_" in name
    ]


@pytest.fixture
def two():
    with virtualgpu.use(gpus=2, like="H200"):
        yield


def sent_to_oneself(x):
    return ForkingPickler.loads(ForkingPickler.dumps(x))


def test_memory_cannot_be_received_where_it_was_sent(two):
    with pytest.raises(torch.AcceleratorError, match="CUDA error: invalid device context"):
        sent_to_oneself(torch.ones(2, device="cuda"))


def test_empty_tensors_have_no_memory_to_send(two):
    empty = sent_to_oneself(torch.nn.Parameter(torch.empty(0, 3, device="cuda:1")))
    assert (empty.shape, empty.device.index, empty.requires_grad) == (
        (0, 3),
        1,
        True,
    ) and isinstance(empty, torch.nn.Parameter)
    plain = sent_to_oneself(torch.empty(2, 0, dtype=torch.int8, device="cuda"))
    assert (plain.shape, plain.dtype, plain.requires_grad) == ((2, 0), torch.int8, False)


def test_what_was_sent_does_not_grow(two):
    x = torch.ones(4, device="cuda")
    ForkingPickler.dumps(x)
    refused = "resizing a tensor that was sent to another process"
    for grow in (
        lambda: x.resize_(1000),
        lambda: torch.add(torch.ones(1000, device="cuda"), 1, out=x),
        lambda: torch.max(
            torch.ones(2, 1000, device="cuda"),
            0,
            out=(x, torch.empty(0, dtype=torch.long, device="cuda")),
        ),
        lambda: x.untyped_storage().resize_(8),
    ):
        with pytest.raises(NotImplementedError, match=refused):
            grow()
    assert torch.add(torch.ones(4, device="cuda"), 1, out=x).tolist() == [2.0] * 4
    assert x.resize_(2).tolist() == [2.0] * 2


def test_what_is_sent_keeps_its_storage(two):
    x = torch.arange(4.0, device="cuda")
    view, seen = x[1:], x.sum().item()
    before = x.data_ptr(), torch.cuda.memory_allocated()
    ForkingPickler.dumps(view)
    x.add_(1)
    assert view.tolist() == [2.0, 3.0, 4.0] and x.sum().item() == seen + 4
    assert (x.data_ptr(), torch.cuda.memory_allocated()) == before
    handles = [
        sharing.share_cuda(y.untyped_storage())[1] for y in (x, view, torch.ones(1, device="cuda"))
    ]
    assert handles[0] == handles[1] != handles[2]
