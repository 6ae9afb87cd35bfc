"""nvidia-smi and GPUtil describe the virtual GPUs in the format of driver 580 on an H200."""

import json
import multiprocessing
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

import virtualgpu
from virtualgpu import hardware
from virtualgpu.driver import nvml, smi

TOOLS = json.loads((Path(__file__).parents[2] / "benchmarks/fidelity/h200/probe.json").read_text())[
    "tools"
]


@pytest.fixture
def one():
    with virtualgpu.use(gpus=1, like="H200"):
        yield hardware.machine().gpus[0]


def run(command: str) -> subprocess.CompletedProcess:
    return subprocess.run(command, shell=True, capture_output=True, text=True, timeout=280)


def as_recorded(text: str) -> str:
    """Return the text with the figures of the recorded machine instead of this one's."""
    gpu = nvml.gpu_report(hardware.machine().gpus[0])
    text = text.replace(gpu.uuid, "GPU-85a3bf5c-7ab3-f17b-913c-9d6f69196dff").replace(
        gpu.bus_id, "00000000:00:06.0"
    )
    text = text.replace("580.00    ", "580.159.04").replace("580.00", "580.159.04")
    return re.sub(r"^\w{3} \w{3} [ \d]\d \d\d:\d\d:\d\d \d{4}", "Sat Nov 21 06:24:30 2026", text)


def test_the_table_looks_like_a_real_one(one):
    mine = as_recorded(run("nvidia-smi").stdout)
    # the whole memory, not only CUDA's, and idle
    real = (
        TOOLS["nvidia-smi"][1].replace("143771MiB", "143156MiB").replace("|      2%", "|      0%")
    )
    assert mine == real


@pytest.mark.parametrize(
    "command", ["nvidia-smi -L", "nvidia-smi --query-gpu=name,memory.total --format=csv"]
)
def test_lists_and_queries_look_like_real_ones(command, one):
    assert as_recorded(run(command).stdout) == TOOLS[command][1].replace("143771", "143156")


def test_the_query_of_gputil_looks_like_a_real_one(one):
    command = next(command for command in TOOLS if "gpu_serial" in command)
    mine, real = (
        text.strip().split(", ") for text in (as_recorded(run(command).stdout), TOOLS[command][1])
    )
    changed = {3: "143156", 8: "[N/A]"}  # memory as CUDA counts it, without a serial number
    assert mine == [changed.get(position, cell) for position, cell in enumerate(real)]


def test_the_topology_looks_like_a_real_one(one):
    mine, real = run("nvidia-smi topo -m").stdout, TOOLS["nvidia-smi topo -m"][1]
    assert mine == real.replace("0-15", f"0-{os.cpu_count() - 1}")


def test_memory_and_process_of_the_asking_program_are_shown(one):
    kept = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    used = round((one.machine.total_memory - one.allocator.free_bytes()) / 2**20)
    assert (
        run("nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits").stdout
        == f"{used}\n"
    )
    assert used > kept.nbytes >> 20
    assert f"{os.getpid()}      C" in run("nvidia-smi").stdout
    apps = run("nvidia-smi --query-compute-apps=pid,used_memory --format=csv,noheader").stdout
    assert apps == f"{os.getpid()}, {used} MiB\n"


@pytest.mark.parametrize(
    ("command", "status", "words"),
    [
        (
            "nvidia-smi --query-gpu=foo --format=csv",
            2,
            'Field "foo" is not a valid field to query.',
        ),
        ("nvidia-smi --query-gpu=name", 2, '"--format=" switch is missing'),
        ("nvidia-smi --query-gpu=name --format=csv,nohead", 2, 'Unknown format option "nohead"'),
        (
            "nvidia-smi -q",
            1,
            "nvidia-smi -q is not supported for virtual GPUs. Supported: the table",
        ),
        ("nvidia-smi topo -p2p r", 1, "not supported"),
        ("nvidia-smi -i 7", 6, "No devices were found"),
    ],
)
def test_mistakes_are_told(command, status, words, one):
    answer = run(command)
    assert answer.returncode == status
    assert words in answer.stdout


def test_a_gpu_can_be_chosen():
    with virtualgpu.use(gpus=3, like="T4"):
        assert (
            run("nvidia-smi -i 1,2 --query-gpu=index,name --format=csv,noheader").stdout
            == "1, Tesla T4\n2, Tesla T4\n"
        )
        assert run("nvidia-smi --id=0 -L").stdout.startswith("GPU 0: Tesla T4 (UUID: GPU-")
        assert "PHB" in run("nvidia-smi topo -m").stdout.splitlines()[1]


def test_a_child_asks_its_parent(one):
    program = (
        "import subprocess; print(subprocess.run(['nvidia-smi', '-L'], capture_output=True, "
        "text=True).stdout)"
    )
    assert (
        "NVIDIA H200"
        in subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout
    )


def ask_and_stay(line):
    line.send(
        (
            shutil.which("nvidia-smi"),
            subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout,
        )
    )
    line.poll(None)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_child_of_multiprocessing_asks_its_parent_and_leaves_no_folder_when_killed(one, method):
    """Check this also for a fork server that has seen another machine before."""
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context(method).Process(target=ask_and_stay, args=(theirs,))
    child.start()
    program, answer = ours.recv()
    child.kill()
    child.join()
    assert program == shutil.which("nvidia-smi") and "NVIDIA H200" in answer


def test_nothing_stays_behind():
    path, program = os.environ["PATH"], shutil.which("nvidia-smi")
    with virtualgpu.use(gpus=1):
        folder = Path(shutil.which("nvidia-smi")).parent
        address = os.environ[smi.ADDRESS]
    assert (os.environ["PATH"], shutil.which("nvidia-smi")) == (path, program)
    assert smi.ADDRESS not in os.environ
    assert not folder.exists()
    with pytest.raises(smi.MistakeError, match="does not answer any more"):
        smi.ask(address)


@pytest.mark.slow
def test_a_process_that_ends_leaves_no_folder():
    program = "import shutil, virtualgpu; virtualgpu.use(1); print(shutil.which('nvidia-smi'))"
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert not Path(answer.stdout.strip()).parent.exists()


@pytest.fixture
def own_temporary_folder(monkeypatch):
    """Make a folder for temporary files of this test only. A socket's path must be short."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield


@pytest.mark.usefixtures("own_temporary_folder", "one")
def test_folders_of_killed_processes_are_removed_and_no_others(monkeypatch):
    program = (
        "import os; from virtualgpu.driver import smi; print(smi.Server(dict).folder, "
        "flush=True); os._exit(1)"
    )

    def killed() -> Path:
        return Path(
            subprocess.run(
                [sys.executable, "-c", program], capture_output=True, text=True
            ).stdout.strip()
        )

    first = killed()
    assert (first / "socket").exists()
    second = killed()
    assert not first.exists() and (second / "socket").exists()
    with monkeypatch.context() as another_user:
        another_user.setattr(os, "getuid", lambda: -1)
        smi.Server(dict).close()
    assert second.exists()
    smi.Server(dict).close()
    assert not second.exists()
    assert smi.ask(os.environ[smi.ADDRESS])["gpus"]  # of this process, which listens


def test_nothing_is_reported_to_who_only_looks_whether_anybody_listens():
    ours, theirs = socket.socketpair()
    with ours:
        assert not smi._has_gone(ours)
        theirs.close()
        assert smi._has_gone(ours)
