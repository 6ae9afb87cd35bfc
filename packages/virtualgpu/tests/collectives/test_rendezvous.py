"""Ranks that meet, in one process, and the errors of a rank that waits in vain."""

import os
import socket
import subprocess
import sys
import threading
import warnings
from datetime import timedelta

import pytest
import torch.distributed as dist

from virtualgpu.collectives import endpoint
from virtualgpu.collectives.group import Transfer
from virtualgpu.collectives.rendezvous import Rendezvous

BARRIER = Transfer("all_reduce", "barrier()", 4, [], [], list)


@pytest.fixture
def pair(monkeypatch):
    """Return a function that makes a group of two ranks, each with an endpoint of its own."""
    made = []
    monkeypatch.setattr(
        "virtualgpu.collectives.rendezvous.current_endpoint",
        lambda store: endpoint.Endpoint("127.0.0.1"),
    )

    def make(store, timeout=60.0):
        ranks = [Rendezvous(rank, [5, 7], timedelta(seconds=timeout)) for rank in range(2)]
        other = threading.Thread(target=ranks[1].open, args=(store, "made()"))
        other.start()
        ranks[0].open(store, "made()")
        other.join()
        made.extend(ranks)
        return ranks

    yield make
    for rank in made:
        rank.end()


@pytest.mark.parametrize("kind", ["in memory", "in a file"])
def test_a_rank_that_never_comes_is_told_whatever_the_store(kind, tmp_path):
    store = dist.HashStore() if kind == "in memory" else dist.FileStore(str(tmp_path / "store"), 2)
    here = Rendezvous(0, [5, 7], timedelta(milliseconds=1))
    with pytest.raises(
        dist.DistBackendError,
        match=(
            r"^Watchdog caught .*rank 7 never entered it; rank 5 waits in made\(\) "
            r"\(test_rendezvous.py:\d+\)"
        ),
    ):
        here.open(store, "made()")


def test_a_rank_that_never_enters_is_told(pair):
    here, _ = pair(dist.HashStore(), timeout=0.1)
    entry = here.enter(BARRIER, 0.0, True)
    with pytest.raises(
        dist.DistBackendError,
        match=(
            r"^Watchdog caught .*rank 7 never entered it; rank 5 waits in barrier\(\) "
            r"\(test_rendezvous.py:\d+\)"
        ),
    ):
        here.meet(entry)


def test_ranks_meet_without_the_store_in_any_order(pair):
    store = dist.HashStore()
    ranks = pair(store)
    del store
    for first in (0, 1):
        entries = [ranks[rank].enter(BARRIER, 2.5, True) for rank in (first, 1 - first)]
        said = [
            ranks[rank].meet(entry)
            for rank, entry in zip((1 - first, first), reversed(entries), strict=True)
        ]
        assert [[each["ready"] for each in heard] for heard in said] == [[2.5, 2.5]] * 2


def test_what_a_rank_said_before_it_ended_counts(pair):
    one, other = pair(dist.HashStore())
    other.enter(BARRIER, 0.0, True)
    other.end()
    assert len(one.meet(one.enter(BARRIER, 0.0, True))) == 2


def test_a_rank_that_has_ended_is_told_at_once(pair):
    one, other = pair(dist.HashStore())
    entries = one.enter(BARRIER, 0.0, True), other.enter(BARRIER, 0.0, True)
    one.meet(entries[0])
    other.meet(entries[1])
    other.end()
    entry = one.enter(BARRIER, 0.0, True)
    with pytest.raises(
        dist.DistBackendError,
        match=(
            r"^all_reduce number 2 of its group will never start: rank 7 never entered it, and "
            r"was last in number 1, barrier"
        ),
    ):
        one.meet(entry)


def test_a_group_that_is_made_again_hears_nothing_of_the_destroyed_one(pair):
    store = dist.HashStore()
    one, other = pair(store)
    one.enter(BARRIER, 0.0, True)
    other.enter(Transfer("broadcast", "broadcast(old)", 4, [], [], list), 0.0, True)
    one.end()
    other.end()
    one, other = pair(store)
    entry, _ = one.enter(BARRIER, 0.0, True), other.enter(BARRIER, 0.0, True)
    assert [said["call"] for said in one.meet(entry)] == ["barrier()"] * 2


def test_an_attempt_that_failed_does_not_count(pair):
    store = dist.HashStore()
    alone = Rendezvous(0, [5, 7], timedelta(milliseconds=1))
    with pytest.raises(dist.DistBackendError, match="did not start within"):
        alone.open(store, "made()")
    pair(store)


def test_many_messages_wait_for_a_rank_that_does_not_look(pair):
    """Send more bytes than the operating system keeps for a receiver that does not read."""
    one, other = pair(dist.HashStore())
    long_send = Transfer("send", "send()" + "x" * 200_000, 4, [], [], list, peers=(0, 1))
    sent = [one.enter(long_send, 0.0, True) for _ in range(100)]
    received = [other.enter(long_send, 0.0, True) for _ in sent]
    assert len([other.meet(entry) for entry in received]) == len(sent)
    assert len([one.meet(entry) for entry in sent]) == len(sent)


def test_a_stranger_does_no_harm(pair):
    one, other = pair(dist.HashStore())
    host, port, _ = one._endpoint.address
    with socket.create_connection((host, port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\n\n")
        entries = one.enter(BARRIER, 0.0, True), other.enter(BARRIER, 0.0, True)
        assert len(one.meet(entries[0])) == len(other.meet(entries[1])) == 2


def test_a_forked_process_leaves_the_connections_alone(pair):
    one, other = pair(dist.HashStore())
    other.enter(BARRIER, 0.0, True)
    with warnings.catch_warnings():
        # Python warns from version 3.12 on, in a process with threads
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        one.end()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert len(one.meet(one.enter(BARRIER, 0.0, True))) == 2


@pytest.mark.parametrize(
    ("interface", "host"), [("lo", "127.0.0.1"), ("none0,lo", "127.0.0.1"), ("", "127.0.0.1")]
)
def test_peers_reach_this_machine_as_gloo_does(monkeypatch, interface, host):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    assert (
        endpoint.own_host(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
        == host
    )


ENDS_AFTER_THE_STORE = """
import subprocess, sys
from datetime import timedelta
import torch.distributed as dist
from virtualgpu.collectives.rendezvous import Rendezvous

keeper = '''
from datetime import timedelta
import torch.distributed as dist
from virtualgpu.collectives.rendezvous import Rendezvous
kept = dist.TCPStore("localhost", 0, is_master=True)
print(kept.port, flush=True)
Rendezvous(0, [0, 1], timedelta(seconds=200)).open(kept, "made()")
input()
'''
command = [sys.executable, "-c", keeper]
rank_0 = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
port, timeout = int(rank_0.stdout.readline()), timedelta(seconds=200)
store = dist.TCPStore("localhost", port, is_master=False, timeout=timeout)
rank_1 = Rendezvous(1, [0, 1], timedelta(seconds=200))
rank_1.open(store, "made()")
rank_0.communicate("the end")
"""


@pytest.mark.slow
def test_a_rank_that_ends_after_the_keeper_of_the_store_says_nothing():
    ended = subprocess.run(
        [sys.executable, "-c", ENDS_AFTER_THE_STORE], capture_output=True, text=True, timeout=240
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
