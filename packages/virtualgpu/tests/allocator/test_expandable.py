"""Expandable segments map and unmap pages."""

from virtualgpu.allocator import Settings

from .scripted import GiB, MiB, allocator, figure


def test_expandable_segments_map_and_unmap_pages():
    memory = allocator(1 * GiB, "expandable_segments:True")
    first, second = memory.malloc(15 * MiB), memory.malloc(10 * MiB)
    assert (
        memory.reserved,
        second.address - first.address,
        figure(memory, "segment.all.current"),
    ) == (40 * MiB, 15 * MiB, 0)
    (segment,) = memory.segments()
    assert (segment["is_expandable"], segment["total_size"]) == (True, 40 * MiB)
    memory.free(first)
    # 15 MiB of free memory hold no whole page of 20 MiB, and neither does the tail of 15 MiB.
    memory.empty_cache()
    assert memory.reserved == 40 * MiB
    memory.free(second)
    memory.empty_cache()
    assert (memory.reserved, memory.segments()) == (0, [])


def test_expandable_segments_switched_off_again_are_passed_over():
    memory = allocator(1 * GiB, "expandable_segments:True")
    memory.free(memory.malloc(15 * MiB))
    memory.configure(Settings())
    assert memory.malloc(15 * MiB).segment.page == 0
    assert memory.reserved == 36 * MiB


def test_a_listener_hears_which_addresses_are_mapped():
    """Check this also for mapped memory that becomes one block with its free neighbours."""
    memory = allocator(1 * GiB, "expandable_segments:True")
    heard = []
    memory.listen(
        lambda action, block, size: (
            action.startswith("segment") and heard.append((action, block.address, size))
        )
    )
    first = memory.malloc(15 * MiB)
    start = first.address
    second = memory.malloc(30 * MiB)  # in the 5 MiB that remain, and in 40 MiB more
    memory.free(second)
    memory.empty_cache()
    memory.free(first)
    memory.empty_cache()
    page = 20 * MiB
    assert [(action, address - start, size) for action, address, size in heard] == [
        ("segment_map", 0, page),
        ("segment_map", page, 2 * page),
        ("segment_unmap", page, 2 * page),
        ("segment_unmap", 0, page),
    ]
