"""The rules for sizes and for splitting, merging and finding blocks."""

from itertools import permutations

import pytest

from virtualgpu.allocator import Settings

from .scripted import MiB, allocator, figure, states


@pytest.mark.parametrize(
    ("request_size", "rounded", "segment"),
    [
        (1, 512, 2 * MiB),
        (512, 512, 2 * MiB),
        (513, 1024, 2 * MiB),
        (MiB, MiB, 2 * MiB),
        (MiB + 1, 1_049_088, 20 * MiB),
        (10 * MiB - 1, 10 * MiB, 10 * MiB),
        (10 * MiB + 1, 10_486_272, 12 * MiB),
    ],
)
def test_sizes(request_size, rounded, segment):
    settings = Settings()
    assert settings.round_size(request_size) == rounded
    assert settings.segment_size(rounded) == segment
    memory = allocator()
    memory.malloc(request_size)
    assert memory.reserved == segment


@pytest.mark.parametrize(
    ("conf", "request_size", "rounded"),
    [
        # Divisions have at most 512 bytes, so the size is rounded to 512.
        ("roundup_power2_divisions:4", 1200, 1536),
        ("roundup_power2_divisions:4", 2049, 2560),
        ("roundup_power2_divisions:4", 4096, 4096),
        ("roundup_power2_divisions:4", 1200 * 1024, 1280 * 1024),
        ("roundup_power2_divisions:[1:8,4:2,>:1]", 1200 * 1024, 1280 * 1024),
        ("roundup_power2_divisions:[1:8,4:2,>:1]", 5 * MiB, 6 * MiB),
        # between two entries, so off
        (
            "roundup_power2_divisions:[1:8,4:2,>:1]",
            2 * MiB + 1,
            2 * MiB + 512,
        ),
        ("roundup_power2_divisions:[1:8,4:2,>:1]", 9 * MiB + 1, 9 * MiB + 512),
    ],
)
def test_rounding_up_to_divisions_of_powers_of_two(conf, request_size, rounded):
    assert Settings.parse(conf).round_size(request_size) == rounded


def test_a_small_request_takes_part_of_a_small_segment():
    memory = allocator()
    block = memory.malloc(1000)
    assert (memory.allocated, memory.reserved, figure(memory, "requested_bytes.all.current")) == (
        1024,
        2 * MiB,
        1000,
    )
    assert figure(memory, "inactive_split.all.current") == 1
    memory.free(block)
    assert (memory.allocated, memory.reserved, figure(memory, "inactive_split.all.current")) == (
        0,
        2 * MiB,
        0,
    )
    memory.empty_cache()
    assert memory.reserved == 0


def test_the_large_pool_splits_only_if_more_than_1_mib_is_left():
    memory = allocator()
    memory.malloc(19 * MiB + MiB // 2)
    assert (memory.allocated, figure(memory, "requested_bytes.all.current")) == (
        20 * MiB,
        19 * MiB + MiB // 2,
    )
    memory = allocator()
    first, second = memory.malloc(9 * MiB + MiB // 2), memory.malloc(9 * MiB + MiB // 2)
    assert (first.size, second.size, memory.reserved) == (
        9 * MiB + MiB // 2,
        10 * MiB + MiB // 2,
        20 * MiB,
    )
    memory = allocator()
    memory.malloc(5 * MiB)
    assert states(memory) == [[(5 * MiB, "active_allocated"), (15 * MiB, "inactive")]]


def test_requests_up_to_1_mib_are_of_the_small_pool():
    memory = allocator()
    memory.malloc(MiB)
    memory.malloc(MiB)
    assert (memory.reserved, figure(memory, "allocated_bytes.small_pool.current")) == (
        2 * MiB,
        2 * MiB,
    )
    memory.malloc(MiB + 1)
    assert (memory.reserved, figure(memory, "allocated_bytes.large_pool.current")) == (
        22 * MiB,
        MiB + 512,
    )


@pytest.mark.parametrize(("first", "second"), [(1, 2), (0, 1), (1, 0)])
def test_streams_do_not_share_free_blocks(first, second):
    memory = allocator()
    block = memory.malloc(4 * MiB, stream=first)
    memory.free(block)
    memory.malloc(4 * MiB, stream=second)
    assert memory.reserved == 40 * MiB
    assert memory.malloc(4 * MiB, stream=first).address == block.address


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_neighbours_merge_in_whatever_order_they_are_freed(order):
    memory = allocator()
    blocks = [memory.malloc(3 * MiB) for _ in range(3)]
    for i in order:
        memory.free(blocks[i])
    assert states(memory) == [[(20 * MiB, "inactive")]]
    assert figure(memory, "inactive_split.all.current") == 0


def test_equal_blocks_go_lowest_address_first():
    memory = allocator()
    blocks = [memory.malloc(12 * MiB) for _ in range(3)]
    for block in blocks:
        memory.free(block)
    assert memory.malloc(12 * MiB).address == min(block.address for block in blocks)


def test_one_small_block_keeps_its_segment():
    memory = allocator()
    memory.malloc(512)
    memory.free(memory.malloc(64 * MiB))
    memory.empty_cache()
    assert memory.reserved == 2 * MiB


def test_oversize_blocks_serve_only_oversize_requests_near_their_size():
    memory = allocator(conf="max_split_size_mb:26")
    memory.free(memory.malloc(26 * MiB))  # a block of exactly the limit is oversize
    assert figure(memory, "oversize_segments.current") == 1
    memory.malloc(24 * MiB)
    assert memory.reserved == 50 * MiB
    memory = allocator(conf="max_split_size_mb:26")
    memory.free(memory.malloc(60 * MiB))
    memory.malloc(40 * MiB)  # 20 MiB would be wasted, which is one byte too much
    assert memory.reserved == 100 * MiB
    memory.malloc(40 * MiB + 1)
    assert memory.reserved == 100 * MiB


@pytest.mark.parametrize("conf", ["", "garbage_collection_threshold:0.5"])
def test_segments_that_lie_idle_for_longest_go_back_above_the_threshold(conf):
    memory = allocator(200 * MiB, conf)
    memory.set_memory_fraction(0.5)
    old, young = memory.malloc(30 * MiB), memory.malloc(32 * MiB)
    memory.free(old)
    memory.malloc(20 * MiB)  # cut out of the old one, so no whole segment is free
    memory.free(young)
    other = memory.malloc(34 * MiB)
    assert memory.reserved == (64 if conf else 96) * MiB
    memory.free(other)
    memory.malloc(34 * MiB)
    assert memory.reserved == (64 if conf else 96) * MiB


def test_a_private_pool_keeps_its_segments_until_nobody_uses_it():
    memory = allocator()
    memory.begin_pool((1, 0), lambda stream: stream == 7)
    mine, other = memory.malloc(1000, 7), memory.malloc(1000, 0)
    assert [segment["segment_pool_id"] for segment in memory.segments()] == [(1, 0), (0, 0)]
    memory.free(mine)
    memory.free(other)
    memory.empty_cache()  # during a capture, no memory goes back to the device
    assert len(memory.segments()) == 2
    memory.end_pool((1, 0))
    memory.empty_cache()
    assert [segment["segment_pool_id"] for segment in memory.segments()] == [(1, 0)]
    again = memory.malloc(1000, 7)
    assert len(memory.segments((1, 0))) == 1 and len(memory.segments()) == 2
    memory.free(again)
    memory.release_pool((1, 0))
    memory.empty_cache()
    assert memory.segments() == []
