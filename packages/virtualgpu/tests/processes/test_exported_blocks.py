"""Blocks that other processes use, and who frees them when."""

import subprocess
import sys

import pytest

from virtualgpu.allocator import CachingAllocator
from virtualgpu.processes.exported_blocks import (
    WARNING,
    Counter,
    ExportedBlock,
    PendingFrees,
    decrement,
)

MIB = 1 << 20


@pytest.fixture
def pending_frees():
    made = PendingFrees()
    yield made
    made.close()


def exported_block(
    pending_frees: PendingFrees, receivers: int = 1
) -> tuple[ExportedBlock, list[Counter]]:
    exported = ExportedBlock(b"", None)
    return exported, [pending_frees.count(exported) for _ in range(receivers)]


def let_go(counter: Counter) -> None:
    decrement(counter.file.address, counter.index)


def test_a_block_waits_for_all_who_received_it(pending_frees):
    allocator = CachingAllocator(0, 100 * MIB, collect=pending_frees.collect)
    exported, (first, second) = exported_block(pending_frees, receivers=2)
    pending_frees.add(allocator, allocator.malloc(MIB), exported)
    assert allocator.allocated == MIB and not pending_frees.collect()
    let_go(first)
    assert not pending_frees.collect() and allocator.allocated == MIB
    let_go(second)
    assert allocator.allocated == MIB  # nobody has checked yet
    assert pending_frees.collect() and allocator.allocated == 0
    assert not pending_frees.collect()


def test_the_next_that_is_freed_looks_for_the_others(pending_frees):
    allocator = CachingAllocator(0, 100 * MIB, collect=pending_frees.collect)
    (exported, (counter,)), (later, _) = (
        exported_block(pending_frees),
        exported_block(pending_frees),
    )
    pending_frees.add(allocator, allocator.malloc(MIB), exported)
    let_go(counter)
    pending_frees.add(allocator, allocator.malloc(2 * MIB), later)
    assert allocator.allocated == 2 * MIB


def test_who_finds_no_block_looks_too(pending_frees):
    """Check that the allocator checks pending frees before it asks the device for memory.

    A program that sends again and again therefore needs no more memory.
    """
    allocator = CachingAllocator(0, 100 * MIB, collect=pending_frees.collect)
    for _ in range(5):
        exported, (counter,) = exported_block(pending_frees)
        block = allocator.malloc(60 * MIB)
        pending_frees.add(allocator, block, exported)
        let_go(counter)
    assert allocator.reserved == allocator.allocated == 60 * MIB
    assert allocator.stats()["num_alloc_retries"] == 0
    free = allocator.malloc(MIB)  # from a new segment, because the large block was freed before
    assert allocator.allocated == MIB
    allocator.free(free)


def test_counters_are_used_again(pending_frees):
    allocator = CachingAllocator(0, 100 * MIB)
    exported, (counter,) = exported_block(pending_frees)
    let_go(counter)
    pending_frees.add(allocator, allocator.malloc(MIB), exported)
    _, (again,) = exported_block(pending_frees)
    assert (again.file, again.index, again.value) == (counter.file, counter.index, 1)


def test_a_receiver_may_outlive_the_sender(pending_frees):
    _, (counter,) = exported_block(pending_frees)
    address = counter.file.address
    pending_frees.close()
    counter.file.close()
    decrement(address, 0)  # nobody counts any more


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("", [WARNING]),
        ("pending_frees.close()", []),
        ("decrement(counter.file.address, counter.index)", [WARNING]),
    ],
)
def test_the_end_warns_of_what_was_sent_and_not_freed(code, said):
    program = f"""
from virtualgpu.processes.exported_blocks import PendingFrees, ExportedBlock, decrement
pending_frees = PendingFrees()
pending_frees.warn_at_exit()
exported = ExportedBlock(b"", None)
counter = pending_frees.count(exported)
{code}
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stderr.splitlines() == said
