"""Freed blocks wait for other streams that use them."""

import pytest

from virtualgpu.allocator import OutOfMemory

from .scripted import MiB, Streams, Tickets, allocator, figure, states


def test_a_block_that_another_stream_uses_waits_for_it():
    streams = Streams()
    memory = allocator(events=streams)
    block = memory.malloc(4 * MiB)
    memory.record_stream(block, 0)  # its own stream needs no event
    memory.record_stream(block, 7)
    streams.busy.add(7)
    memory.free(block)
    assert (memory.allocated, figure(memory, "active_bytes.all.current")) == (0, 4 * MiB)
    assert states(memory) == [[(4 * MiB, "active_pending_free"), (16 * MiB, "inactive")]]
    streams.busy.clear()
    # nobody checks the events before the next malloc
    assert figure(memory, "active_bytes.all.current") == 4 * MiB
    small = memory.malloc(1)
    assert figure(memory, "active_bytes.all.current") == 512
    memory.free(small)
    assert figure(memory, "active_bytes.all.peak") == 4 * MiB


def test_a_peak_just_before_a_deferred_free_completes_is_noted():
    memory = allocator()
    block = memory.malloc(4 * MiB)
    memory.record_stream(block, 7)
    memory.free(block)
    memory.reset_peak_stats()
    assert figure(memory, "active_bytes.all.peak") == 4 * MiB
    events = Tickets()
    memory = allocator(events=events)
    block = memory.malloc(4 * MiB)
    memory.record_stream(block, 7)
    memory.free(block)
    memory.malloc(30 * MiB)
    events.done_tickets = {1}
    memory.malloc(2 * MiB)
    assert figure(memory, "active_bytes.all.current") == 32 * MiB
    assert figure(memory, "active_bytes.all.peak") == 34 * MiB


def test_frees_of_one_stream_complete_in_order():
    memory = allocator(events=(events := Tickets()))
    blocks = [memory.malloc(2 * MiB) for _ in range(2)]
    for block in blocks:
        memory.record_stream(block, 3)
        memory.free(block)
    events.done_tickets = {2}  # the second free's event, while the first one still waits
    memory.malloc(1)
    assert figure(memory, "active.large_pool.current") == 2
    events.done_tickets = {1, 2}
    memory.malloc(1)
    assert figure(memory, "active.large_pool.current") == 0


def test_after_waiting_for_streams_the_pool_is_not_searched_again():
    streams = Streams()
    memory = allocator(20 * MiB, events=streams)
    kept = memory.malloc(2 * MiB)
    block = memory.malloc(5 * MiB)
    memory.record_stream(block, 1)
    streams.busy.add(1)
    memory.free(block)
    with pytest.raises(OutOfMemory):
        memory.malloc(15 * MiB)
    assert streams.waited == [1]
    assert memory.malloc(15 * MiB).segment is kept.segment
