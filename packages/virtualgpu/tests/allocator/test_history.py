"""The history of an allocator, in PyTorch's schema."""

import pytest

from virtualgpu.allocator import OutOfMemory

from .scripted import GiB, MiB, allocator


def test_actions_that_are_skipped_and_the_programs_words():
    memory = allocator()
    memory.record_history(metadata=lambda: "step 1", skipped=["alloc"])
    memory.free(memory.malloc(1000))
    assert {x["action"] for x in memory.history()} == {
        "segment_alloc",
        "free_requested",
        "free_completed",
    }
    assert {x["user_metadata"] for x in memory.history()} == {"step 1"}


def test_history_in_pytorchs_schema():
    """Check that actions, sizes and keys are those of the same calls on an H200 (torch 2.11)."""
    memory = allocator(1 * GiB)
    ticks = iter(range(100))
    frames = [{"filename": "a.py", "line": 1, "name": "f"}]
    memory.record_history("all", 100, lambda: frames, clock=lambda: next(ticks))
    large = memory.malloc(5 * MiB)
    memory.malloc(100)
    memory.free(large)
    with pytest.raises(OutOfMemory):
        memory.malloc(2 * GiB)
    memory.segments()
    entries = memory.history()
    assert [(entry["action"], entry["size"]) for entry in entries] == [
        ("segment_alloc", 20 * MiB),
        ("alloc", 5 * MiB),
        ("segment_alloc", 2 * MiB),
        ("alloc", 100),
        ("free_requested", 5 * MiB),
        ("free_completed", 5 * MiB),
        ("segment_free", 20 * MiB),
        ("oom", 2 * GiB),
        ("snapshot", 512),
    ]
    assert [entry["time_us"] for entry in entries] == list(range(9))
    keys = {
        "action",
        "addr",
        "size",
        "stream",
        "pool_id",
        "time_us",
        "compile_context",
        "user_metadata",
    }
    assert entries[7].keys() == keys - {"addr"} | {"device_free", "frames"}
    assert entries[7]["device_free"] == 1 * GiB - 2 * MiB
    assert all(entry["frames"] == frames for entry in entries[:8])
    (segment,) = memory.segments()
    assert segment["blocks"][0]["frames"] == frames
    assert (segment["segment_type"], segment["requested_size"], segment["segment_pool_id"]) == (
        "small",
        100,
        (0, 0),
    )
    memory.record_history("all", 2, context=None)
    memory.malloc(1)
    assert [entry["action"] for entry in memory.history()] == ["snapshot", "alloc"]
    assert "frames" not in memory.history()[-1]
    memory.record_history(None)
    assert memory.history() == []
    with pytest.raises(ValueError, match="enabled"):
        memory.record_history("some")
