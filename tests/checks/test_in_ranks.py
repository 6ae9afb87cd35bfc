"""Functions that checks run in ranks: results, errors, and ranks that wait in vain."""

import contextlib
import os
import subprocess
import sys

import psutil
import pytest
import torch
import torch.distributed as dist

import labkit
from labkit.checks import in_ranks as module
from labkit.checks.in_ranks import RankError, in_ranks


def add(answer, number):
    """Return the answer's result for a number, and the state of the rank that computed it."""
    return {
        "sum": answer(torch.tensor([float(number)])).tolist(),
        "virtual": labkit.current() is not None,
    }


def running_children() -> set[int]:
    """Return this process's child processes, except the servers that run as long as it does."""
    found = set()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it may just have ended
            if not any(server in " ".join(child.cmdline()) for server in ("forkserver", "tracker")):
                found.add(child.pid)
    return found


@pytest.fixture
def nothing_left():
    """Fail a test that leaves a child process. A server of earlier tests does not count."""
    before = running_children()
    yield
    assert running_children() - before == set()


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_left")
def test_three_ranks_share_a_collective_without_virtual_gpus_and_leave_nothing():
    def answer(tensor):
        dist.all_reduce(tensor)
        return tensor

    with labkit.use(gpus=2, virtual=True, quiet=True):
        assert in_ranks(add, answer, [1, 2, 4]) == [{"sum": [7.0], "virtual": False}] * 3


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_left")
def test_ranks_with_a_virtual_gpu_each_share_a_collective_by_the_virtual_nccl():
    def answer(tensor):
        tensor = tensor.cuda()
        dist.all_reduce(tensor)
        assert (dist.get_backend(), tensor.device.index) == ("nccl", dist.get_rank())
        return tensor

    assert in_ranks(add, answer, [1, 2], like="H200") == [{"sum": [3.0], "virtual": True}] * 2
    assert labkit.current() is None


def test_an_error_of_a_rank_names_it():
    def answer(tensor):
        if dist.get_rank() == 1:
            raise KeyError("lost")
        dist.all_reduce(tensor)
        return tensor

    with pytest.raises(KeyError, match="lost") as caught:
        in_ranks(add, answer, [1, 2])
    assert caught.value.__notes__ == ["rank 1 of 2"]


def test_an_error_that_cannot_be_sent_is_told_in_words():
    class OwnError(Exception):
        def __reduce__(self):
            raise TypeError("not to be sent")

    def answer(tensor):
        raise OwnError("mine")

    with pytest.raises(RuntimeError, match="OwnError: mine"):
        in_ranks(add, answer, [1, 2])


def test_text_has_another_hash_in_each_rank_as_in_each_python_that_is_started():
    def answer(tensor):
        return tensor.new_tensor(
            [hash("text") % 1000, hash((1, b"bytes")) % 1000, hash((1, 2.5)) % 1000]
        )

    one, other = (told["sum"] for told in in_ranks(add, answer, [1, 2]))
    assert [found == twin for found, twin in zip(one, other, strict=True)] == [False, False, True]


def test_ranks_have_the_variables_that_torchrun_sets():
    def answer(tensor):
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        return tensor.new_tensor([int(os.environ[name]) for name in names])

    told = in_ranks(add, answer, [1, 2])
    assert [of_rank["sum"] for of_rank in told] == [[0, 0, 2, 2], [1, 1, 2, 2]]
    assert "LOCAL_RANK" not in os.environ


def test_a_rank_that_ends_its_process_is_told_at_once():
    def answer(tensor):
        if dist.get_rank() == 1:
            os._exit(0)
        dist.all_reduce(tensor)
        return tensor

    with pytest.raises(RankError, match="rank 1 of 2 ended its process without an error message"):
        in_ranks(add, answer, [1, 2])


@pytest.mark.slow
@pytest.mark.parametrize("other", ["returns", "calls another"])
@pytest.mark.usefixtures("nothing_left")
def test_ranks_that_wait_in_vain_are_told(other, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE", 2.0)

    def answer(tensor):
        if dist.get_rank() == 0:
            dist.all_reduce(tensor)
        elif other == "calls another":
            dist.recv(tensor, src=0)
        return tensor

    with pytest.raises(RankError, match="does every rank call the same collectives"):
        in_ranks(add, answer, [1, 2])


BESIDE_FILES_NAMED_LIKE_PACKAGES = """
import importlib.metadata, os, sys
from labkit.checks.in_ranks import in_ranks
from labkit.processes import by_value

KIT = {"virtualgpu", "gputrace", "labkit", "labcourse"}
for name in importlib.metadata.packages_distributions():
    if name.isidentifier() and name not in KIT:
        with open(f"{name}.py", "w") as file:
            file.write(f"print('imported {name}', flush=True)")
sys.path.insert(0, "")  # as in a notebook
program, answer = lambda answer, number: answer(number), lambda number: 2 * number
print(in_ranks(program, answer, [1, 2], like=sys.argv[1] or None))
sys.path.remove("")  # torch itself imports `tabulate` when this process ends
"""


@pytest.mark.slow
@pytest.mark.parametrize("like", ["", "H200"])
def test_files_named_like_packages_are_not_imported_by_ranks(like, tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", BESIDE_FILES_NAMED_LIKE_PACKAGES, like],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
    )
    assert (ended.stdout, ended.stderr) == ("[2, 4]\n", "")


@pytest.mark.parametrize(
    ("load", "seconds"), [(0.1, 10.0), (4.0, 10.0), (12.0, 30.0), (400.0, 50.0)]
)
def test_on_a_busy_machine_ranks_may_wait_longer(monkeypatch, load, seconds):
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert module._patience() == seconds
