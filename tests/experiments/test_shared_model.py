"""What the processes hold that use one model, on a virtual GPU."""

import time

import psutil
import pytest
import torch

import labkit
from labkit.experiments import collect, shared_model
from labkit.experiments.shared_model import WAYS, held

pytestmark = pytest.mark.slow

MIB = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def gpu():
    with labkit.use(virtual=True, quiet=True):
        torch.empty(1, device="cuda")
        yield


def used() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


def workers() -> list[psutil.Process]:
    """Processes that the server of processes has started, not those of another test's sandbox."""
    running = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    servers = [child for child in running if "multiprocessing.forkserver" in " ".join(child.cmdline())]
    return [process for child in servers for process in child.children()]


def test_who_holds_what_in_each_way():
    context = 126 * MIB
    before = used()
    result = collect(shared_model(processes=3, weights=100 * MIB, work=40 * MIB))
    rows = {way: [(row["context"], row["weights"], row["cache"]) for row in result.rows if row["way"] == way] for way in WAYS}
    alone = (context, 100 * MIB, 40 * MIB)
    assert rows["a copy each"] == [alone] * 3
    assert rows["shared weights"] == [alone] + [(context, 0, 40 * MIB)] * 2
    assert rows["one server"] == [alone, (0, 0, 0), (0, 0, 0)]
    assert result.column("process") == (
        ["worker 1", "worker 2", "worker 3", "owner", "borrower 1", "borrower 2", "server", "client 1", "client 2"]
    )
    assert held(result) == {"a copy each": 3 * 266 * MIB, "shared weights": (3 * 166 + 100) * MIB, "one server": 266 * MIB}
    assert used() == before and not workers()


def test_one_that_is_stopped_half_way_leaves_nothing_behind():
    before = used()
    run = shared_model(["shared weights"])
    next(run), next(run)
    assert used() > before and len(workers()) == 3
    run.close()
    end = time.monotonic() + 10
    while used() > before and time.monotonic() < end:
        time.sleep(0.01)
    assert used() == before and not workers()


def test_bad_arguments_name_what_is_allowed():
    with pytest.raises(ValueError, match=r"ways=\['magic'\]: choose from 'a copy each', 'shared weights', 'one server'"):
        shared_model(["magic"])
    with pytest.raises(ValueError, match="ways="):
        shared_model([])
    for processes in (1, 9, 2.0):
        with pytest.raises(ValueError, match="processes=.*from 2 to 8"):
            shared_model(processes=processes)
    for name in ("weights", "work"):
        with pytest.raises(ValueError, match=f"{name}=0: give a number of bytes from 1048576"):
            shared_model(**{name: 0})


@pytest.mark.gpu
def test_a_real_gpu_shares_the_same():
    labkit.use(None)
    with labkit.use(virtual=False, quiet=True):
        result = collect(shared_model(weights=512 * MIB, work=64 * MIB))
    assert result.column("weights", way="shared weights") == [512 * MIB, 0, 0]
    assert result.column("cache", way="a copy each") == [64 * MIB] * 3
    assert all(size > 100 * MIB for size in result.column("context", way="shared weights"))
    assert all(abs(size) < 16 * MIB for size in result.column("context", process="client 1"))
    sums = held(result)
    assert sums["one server"] < sums["shared weights"] < sums["a copy each"]
