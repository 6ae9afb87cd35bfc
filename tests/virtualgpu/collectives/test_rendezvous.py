"""How ranks meet, in one process: what one that waits in vain is told."""

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
    with pytest.raises(dist.DistBackendError, match=r"^Watchdog caught .*rank 7 never entered it; rank 5 waits in barrier\(\) \(\S+:16\)"):
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
