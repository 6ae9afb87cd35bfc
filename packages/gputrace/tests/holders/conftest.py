"""What the tests of holders share: who holds a tensor that a test has planted."""

import pytest

from gputrace.holders.references import Snapshot
from gputrace.holders.search import search
from gputrace.holders.tensors import alive


@pytest.fixture
def holders_at():
    """A function that lists the holders of the tensor at an address of the first GPU."""

    def find(address):
        snapshot = Snapshot.take()
        living = alive(snapshot.objects)
        return search(snapshot, living, [living.storages[0, address]])[0]

    return find


@pytest.fixture
def planted(holders_at):
    """A function that lists the holders of a tensor that the function `plant` has made.

    `plant` returns the tensor's address. The variables of `plant` no longer exist then.
    """
    return lambda plant, *arguments: holders_at(plant(*arguments))
