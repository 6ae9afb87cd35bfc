"""Blocks that other processes use: who frees them, and when."""

import subprocess
import sys

import pytest

from virtualgpu.allocator import CachingAllocator
from virtualgpu.processes.loans import WARNING, Counter, Limbo, Loan, count_down

MIB = 1 << 20


@pytest.fixture
def limbo():
    made = Limbo()
    yield made
    made.close()


def lent(limbo: Limbo, receivers: int = 1) -> tuple[Loan, list[Counter]]:
    loan = Loan(b"", None)
    return loan, [limbo.count(loan) for _ in range(receivers)]


def let_go(counter: Counter) -> None:
    count_down(counter.file.address, counter.index)


def test_a_block_waits_for_all_who_received_it(limbo):
    allocator = CachingAllocator(0, 100 * MIB, collect=limbo.collect)
    loan, (first, second) = lent(limbo, receivers=2)
    limbo.add(allocator, allocator.malloc(MIB), loan)
    assert allocator.allocated == MIB and not limbo.collect()
    let_go(first)
    assert not limbo.collect() and allocator.allocated == MIB
    let_go(second)
    assert allocator.allocated == MIB  # nobody has looked yet
    assert limbo.collect() and allocator.allocated == 0
    assert not limbo.collect()


def test_the_next_that_is_freed_looks_for_the_others(limbo):
    allocator = CachingAllocator(0, 100 * MIB, collect=limbo.collect)
    (loan, (counter,)), (later, _) = lent(limbo), lent(limbo)
    limbo.add(allocator, allocator.malloc(MIB), loan)
    let_go(counter)
    limbo.add(allocator, allocator.malloc(2 * MIB), later)
    assert allocator.allocated == 2 * MIB


def test_who_finds_no_block_looks_too(limbo):
    """PyTorch does so before it asks the device, so that a program which sends again and again needs no more memory."""
    allocator = CachingAllocator(0, 100 * MIB, collect=limbo.collect)
    for _ in range(5):
        loan, (counter,) = lent(limbo)
        block = allocator.malloc(60 * MIB)
        limbo.add(allocator, block, loan)
        let_go(counter)
    assert allocator.reserved == allocator.allocated == 60 * MIB
    assert allocator.stats()["num_alloc_retries"] == 0
    free = allocator.malloc(MIB)  # from a new segment: by then the large block has been freed
    assert allocator.allocated == MIB
    allocator.free(free)


def test_counters_are_used_again(limbo):
    allocator = CachingAllocator(0, 100 * MIB)
    loan, (counter,) = lent(limbo)
    let_go(counter)
    limbo.add(allocator, allocator.malloc(MIB), loan)
    _, (again,) = lent(limbo)
    assert (again.file, again.index, again.value) == (counter.file, counter.index, 1)


def test_a_receiver_may_outlive_the_sender(limbo):
    _, (counter,) = lent(limbo)
    address = counter.file.address
    limbo.close()
    counter.file.close()
    count_down(address, 0)  # nobody counts any more


@pytest.mark.parametrize(
    ("code", "said"), [("", [WARNING]), ("limbo.close()", []), ("count_down(counter.file.address, counter.index)", [WARNING])]
)
def test_the_end_warns_of_what_was_sent_and_not_freed(code, said):
    program = f"""
from virtualgpu.processes.loans import Limbo, Loan, count_down
limbo = Limbo()
limbo.watch_the_end()
loan = Loan(b"", None)
counter = limbo.count(loan)
{code}
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stderr.splitlines() == said
