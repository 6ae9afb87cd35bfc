"""The caching allocator: misuse, threads, finalizers, statistics and listeners."""

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest

from .scripted import MiB, allocator, figure


def test_misuse_is_refused():
    memory = allocator()
    with pytest.raises(ValueError, match="at least 1 byte"):
        memory.malloc(0)
    block = memory.malloc(1)
    memory.free(block)
    with pytest.raises(ValueError, match="only an allocated block"):
        memory.free(block)
    with pytest.raises(ValueError, match="needs an allocated block"):
        memory.record_stream(block, 1)

    def allocating(action, block, size):
        memory.malloc(1)

    memory.listen(allocating)
    with pytest.raises(RuntimeError, match="during another call"):
        memory.malloc(1)
    memory.unlisten(allocating)
    memory.malloc(1)
    with pytest.raises(ValueError, match="does not listen"):
        memory.unlisten(allocating)


def test_what_is_freed_during_a_call_is_freed_when_it_is_over():
    memory = allocator()
    block = memory.malloc(30 * MiB)
    memory.listen(lambda action, _, size: action == "segment_alloc" and memory.free(block))
    memory.malloc(40 * MiB)
    assert (memory.allocated, memory.reserved) == (40 * MiB, 70 * MiB)


def test_threads_and_finalizers():
    memory = allocator()

    class Holder:
        def __init__(self, size):
            self.block = memory.malloc(size)
            self.cycle = self

        def __del__(self):
            memory.free(self.block)

    def work(_):
        for size in range(1, 2000):
            Holder(size * 700)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    gc.collect()
    assert (memory.allocated, figure(memory, "active.all.current")) == (0, 0)
    assert (
        figure(memory, "allocation.all.allocated")
        == figure(memory, "allocation.all.freed")
        == 4 * 1999
    )
    assert figure(memory, "inactive_split.all.current") == 0
    memory.empty_cache()
    assert memory.reserved == 0


def test_resets():
    memory = allocator()
    memory.free(memory.malloc(30 * MiB))
    block = memory.malloc(5 * MiB)
    assert (memory.peak_allocated, memory.peak_reserved) == (30 * MiB, 30 * MiB)
    memory.reset_peak_stats()
    assert (memory.peak_allocated, memory.peak_reserved) == (5 * MiB, 30 * MiB)
    memory.reset_accumulated_stats()
    memory.free(block)
    expected = {"current": 0, "peak": 5 * MiB, "allocated": 0, "freed": 5 * MiB}
    assert (
        memory.stats()["allocated_bytes"]["all"]
        == memory.stats()["requested_bytes"]["large_pool"]
        == expected
    )


def test_a_listener_hears_every_event():
    heard = []
    memory = allocator()
    memory.listen(lambda action, block, size: heard.append((action, block.address, size)))
    block = memory.malloc(100)
    address = block.address
    memory.free(block)
    memory.empty_cache()
    whole = 2 * MiB
    actions = [
        ("segment_alloc", whole),
        ("alloc", 100),
        ("free_requested", 100),
        ("free_completed", 100),
        ("segment_free", whole),
    ]
    assert heard == [(action, address, size) for action, size in actions]


def test_listeners_come_and_go_apart():
    memory = allocator()
    first, second = [], []

    def note_first(action, block, size):
        first.append(action)

    def note_second(action, block, size):
        second.append(action)

    memory.listen(note_first)
    memory.listen(note_second)
    block = memory.malloc(100)
    memory.unlisten(note_first)
    memory.free(block)
    assert first == ["segment_alloc", "alloc"]
    assert second == ["segment_alloc", "alloc", "free_requested", "free_completed"]


def test_raised_addresses_go_to_the_lowest_hole_below_all_others():
    memory = allocator()
    before = [memory.malloc(20 * MiB) for _ in range(3)]
    assert before[0].address > before[1].address > before[2].address
    memory.raise_addresses()
    a, b, c = (memory.malloc(size * MiB) for size in (20, 12, 24))
    assert a.address < b.address < c.address < before[2].address
    memory.free(b)
    memory.free(before[1])
    memory.empty_cache()
    assert memory.malloc(14 * MiB).address == c.address + 24 * MiB
    assert memory.malloc(12 * MiB).address == b.address
