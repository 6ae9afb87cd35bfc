"""How ranks meet, in one process: what one that waits in vain is told."""

import subprocess
import sys
from datetime import timedelta

import pytest
import torch.distributed as dist

from virtualgpu.collectives.group import Transfer
from virtualgpu.collectives.rendezvous import Rendezvous


@pytest.mark.parametrize("kind", ["in memory", "in a file"])
def test_a_rank_that_never_comes_is_told_whatever_the_store(kind, tmp_path):
    store = dist.HashStore() if kind == "in memory" else dist.FileStore(str(tmp_path / "store"), 2)
    here = Rendezvous(store, 0, [5, 7], timedelta(milliseconds=1))
    entry = here.enter(Transfer("all_reduce", "barrier()", 4, [], [], list), 0.0, True)
    with pytest.raises(dist.DistBackendError, match=r"^Watchdog caught .*rank 7 never entered it; rank 5 waits in barrier\(\) \(\S+:18\)"):
        here.meet(entry)


def test_a_rank_whose_script_has_ended_is_told_at_once():
    store = dist.HashStore()
    one, other = (Rendezvous(store, rank, [0, 1], timedelta(minutes=10)) for rank in range(2))
    transfer = Transfer("all_reduce", "barrier()", 4, [], [], list)
    entries = one.enter(transfer, 0.0, True), other.enter(transfer, 0.0, True)
    one.meet(entries[0]), other.meet(entries[1])
    other.leave()
    entry = one.enter(transfer, 0.0, True)
    with pytest.raises(
        dist.DistBackendError,
        match=r"^all_reduce number 2 of its group will never start: rank 1 never entered it, and was last in .*number 1",
    ):
        one.meet(entry)


def test_a_group_that_a_rank_has_destroyed_is_not_told_of_its_end():
    store = dist.HashStore()
    one, other = (Rendezvous(store, rank, [0, 1], timedelta(milliseconds=1)) for rank in range(2))
    other.end()
    other.leave()
    entry = one.enter(Transfer("all_reduce", "barrier()", 4, [], [], list), 0.0, True)
    with pytest.raises(dist.DistBackendError, match="did not start within 0.001 s"):
        one.meet(entry)


OUTLIVES_THE_STORE = """
import subprocess, sys
from datetime import timedelta
import torch.distributed as dist
from virtualgpu.collectives.group import Transfer
from virtualgpu.collectives.rendezvous import Rendezvous

keeper = "import torch.distributed as dist; kept = dist.TCPStore('localhost', 0, is_master=True); print(kept.port, flush=True); input()"
rank_0 = subprocess.Popen([sys.executable, "-c", keeper], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
store = dist.TCPStore("localhost", int(rank_0.stdout.readline()), is_master=False, timeout=timedelta(seconds=200))
rank_1 = Rendezvous(store, 1, [0, 1], timedelta(seconds=200))
for tag in range(3):
    rank_1.enter(Transfer("send", "send()", 4, [], [], list, peers=(1, 0), tag=tag), 0.0, True)
rank_0.communicate("the end")
"""


def test_a_rank_that_ends_after_the_keeper_of_the_store_says_nothing():
    ended = subprocess.run([sys.executable, "-c", OUTLIVES_THE_STORE], capture_output=True, text=True, timeout=240)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
