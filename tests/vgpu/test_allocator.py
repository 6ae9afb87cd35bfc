"""The allocator's rules one by one, its faces (statistics, snapshot, history, errors), and programs recorded on a real GPU."""

import gc
import json
import threading
from itertools import permutations
from pathlib import Path

import pytest

from labkit.vgpu.allocator import CachingAllocator, OutOfMemory, Settings
from labkit.vgpu.allocator.oom import size_text

RECORDINGS = Path(__file__).parent / "recordings"
MiB = 1 << 20
GiB = 1 << 30


class Streams:
    """An event source whose streams are busy until the test says otherwise."""

    def __init__(self):
        self.busy = set()
        self.waited = []

    def record(self, stream):
        return stream

    def done(self, stream):
        return stream not in self.busy

    def wait(self, stream):
        self.waited.append(stream)
        self.busy.discard(stream)

    def synchronized_by(self, action, block, size):
        """cudaFree waits for the whole device, unmapping for the block's stream."""
        if action == "segment_free":
            self.busy.clear()
        elif action == "segment_unmap":
            self.busy.discard(block.stream)


def allocator(total=16 * GiB, conf="", **options):
    return CachingAllocator(0, total, settings=Settings.parse(conf), **options)


def figure(memory, key):
    """One flat statistic, named as `torch.cuda.memory_stats` names it."""
    value = memory.stats()
    for part in key.split("."):
        value = value[part]
    return value


def states(memory):
    return [[(block["size"], block["state"]) for block in segment["blocks"]] for segment in memory.segments()]


# Sizes


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
        ("roundup_power2_divisions:4", 1200, 1536),  # at most 512 bytes a division: rounded to 512
        ("roundup_power2_divisions:4", 2049, 2560),
        ("roundup_power2_divisions:4", 4096, 4096),
        ("roundup_power2_divisions:4", 1200 * 1024, 1280 * 1024),
        ("roundup_power2_divisions:[1:8,4:2,>:1]", 1200 * 1024, 1280 * 1024),
        ("roundup_power2_divisions:[1:8,4:2,>:1]", 5 * MiB, 6 * MiB),
        ("roundup_power2_divisions:[1:8,4:2,>:1]", 2 * MiB + 1, 2 * MiB + 512),  # between two entries: off
        ("roundup_power2_divisions:[1:8,4:2,>:1]", 9 * MiB + 1, 9 * MiB + 512),
    ],
)
def test_rounding_up_to_divisions_of_powers_of_two(conf, request_size, rounded):
    assert Settings.parse(conf).round_size(request_size) == rounded


# Splitting, merging, searching


def test_a_small_request_takes_part_of_a_small_segment():
    memory = allocator()
    block = memory.malloc(1000)
    assert (memory.allocated, memory.reserved, figure(memory, "requested_bytes.all.current")) == (1024, 2 * MiB, 1000)
    assert figure(memory, "inactive_split.all.current") == 1
    memory.free(block)
    assert (memory.allocated, memory.reserved, figure(memory, "inactive_split.all.current")) == (0, 2 * MiB, 0)
    memory.empty_cache()
    assert memory.reserved == 0


def test_the_large_pool_splits_only_if_more_than_1_mib_is_left():
    memory = allocator()
    memory.malloc(19 * MiB + MiB // 2)
    assert (memory.allocated, figure(memory, "requested_bytes.all.current")) == (20 * MiB, 19 * MiB + MiB // 2)
    memory = allocator()
    first, second = memory.malloc(9 * MiB + MiB // 2), memory.malloc(9 * MiB + MiB // 2)
    assert (first.size, second.size, memory.reserved) == (9 * MiB + MiB // 2, 10 * MiB + MiB // 2, 20 * MiB)
    memory = allocator()
    memory.malloc(5 * MiB)
    assert states(memory) == [[(5 * MiB, "active_allocated"), (15 * MiB, "inactive")]]


def test_streams_do_not_share_free_blocks():
    memory = allocator()
    memory.free(memory.malloc(4 * MiB, stream=1))
    memory.malloc(4 * MiB, stream=2)
    assert memory.reserved == 40 * MiB


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
    memory.free(memory.malloc(26 * MiB))  # a block of just the limit is oversize
    assert figure(memory, "oversize_segments.current") == 1
    memory.malloc(24 * MiB)
    assert memory.reserved == 50 * MiB
    memory = allocator(conf="max_split_size_mb:26")
    memory.free(memory.malloc(60 * MiB))
    memory.malloc(40 * MiB)  # 20 MiB would be wasted: too much by one byte
    assert memory.reserved == 100 * MiB
    memory.malloc(40 * MiB + 1)
    assert memory.reserved == 100 * MiB


# Other streams


def test_a_block_that_another_stream_uses_waits_for_it():
    streams = Streams()
    memory = allocator(events=streams)
    block = memory.malloc(4 * MiB)
    memory.record_stream(block, 0)  # its own stream: nothing to wait for
    memory.record_stream(block, 7)
    streams.busy.add(7)
    memory.free(block)
    assert (memory.allocated, figure(memory, "active_bytes.all.current")) == (0, 4 * MiB)
    assert states(memory) == [[(4 * MiB, "active_pending_free"), (16 * MiB, "inactive")]]
    streams.busy.clear()
    assert figure(memory, "active_bytes.all.current") == 4 * MiB  # nobody looks before the next malloc
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
    events.done_tickets = {2}  # the second free's: the first one's still bars the way
    memory.malloc(1)
    assert figure(memory, "active.large_pool.current") == 2
    events.done_tickets = {1, 2}
    memory.malloc(1)
    assert figure(memory, "active.large_pool.current") == 0


class Tickets:
    """An event source in which the test names the events that are done."""

    def __init__(self):
        self.count = 0
        self.done_tickets = set()

    def record(self, stream):
        self.count += 1
        return self.count

    def done(self, ticket):
        return ticket in self.done_tickets

    def wait(self, ticket):
        self.done_tickets.add(ticket)


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


# Running out


def test_the_memory_fraction_limits_what_is_reserved():
    memory = allocator(1 * GiB, processes=lambda: [(4711, 3 * MiB)], others=lambda: 24 * MiB)
    memory.set_memory_fraction(100 / 1024)
    memory.malloc(512)
    with pytest.raises(OutOfMemory) as error:
        memory.malloc(101 * MiB)
    assert (
        error.value.message
        == str(error.value)
        == (
            "CUDA out of memory. Tried to allocate 102.00 MiB. GPU 0 has a total capacity of 1024.00 MiB of which 998.00 MiB is free. "
            "Process 4711 has 3.00 MiB memory in use. 100.00 MiB allowed; Of the allocated memory 512 bytes is allocated by PyTorch, "
            "and 2.00 MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory Management  "
            "(https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"
        )
    )
    assert (error.value.requested, error.value.segment_size, error.value.allowed) == (101 * MiB, 102 * MiB, 100 * MiB)
    assert (error.value.total, error.value.free, error.value.allocated, error.value.reserved) == (GiB, 998 * MiB, 512, 2 * MiB)
    assert (figure(memory, "num_ooms"), figure(memory, "num_alloc_retries")) == (1, 1)
    memory.set_memory_fraction(1)
    memory.malloc(101 * MiB)


def test_others_take_memory_away():
    memory = allocator(64 * MiB, others=lambda: 60 * MiB)
    assert memory.free_bytes() == 4 * MiB
    with pytest.raises(OutOfMemory, match=r"Tried to allocate 20\.00 MiB"):
        memory.malloc(2 * MiB)


@pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan")])
def test_a_fraction_outside_0_to_1_is_refused(fraction):
    memory = allocator()
    with pytest.raises(ValueError, match="between 0 and 1"):
        memory.set_memory_fraction(fraction)
    assert memory.memory_fraction == 1.0


def test_an_exabyte_is_refused_without_a_retry():
    memory = allocator()
    with pytest.raises(OutOfMemory) as error:
        memory.malloc(1 << 60)
    assert str(error.value) == "CUDA out of memory. Tried to allocate more than 1EB memory."
    assert figure(memory, "num_ooms") == 0


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 bytes"), (1024, "1024 bytes"), (1025, "1.00 KiB"), (MiB, "1024.00 KiB"), (GiB, "1024.00 MiB"), (3 * GiB, "3.00 GiB")],
)
def test_sizes_in_error_texts(nbytes, text):
    assert size_text(nbytes) == text


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("2.6.0", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True .*#environment-variables"),
        ("2.10.0+cu128", "PYTORCH_ALLOC_CONF=expandable_segments:True .*#environment-variables"),
        ("2.13.0", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True .*#optimizing-memory-usage"),
    ],
)
def test_the_text_follows_the_version(version, words):
    with pytest.raises(OutOfMemory, match=words):
        allocator(MiB, version=version).malloc(1)


# Settings


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_split_size:20", "Unrecognized key 'max_split_size'.*max_split_size_mb"),
        ("max_split_size_mb:10", "max_split_size_mb must be at least 20"),
        ("max_split_size_mb:many", "max_split_size_mb must be a whole number"),
        ("large_segment_size_mb:10", "must be more than 10"),
        ("large_segment_size_mb:40,max_split_size_mb:30", "max_split_size_mb must be at least 40"),
        ("roundup_power2_divisions:3", "must be a power of two"),
        ("roundup_power2_divisions:[1:2", "closing bracket"),
        ("roundup_power2_divisions:[2]", "start:number"),
        ("expandable_segments:true", "True or False"),
        ("per_process_memory_fraction:1.5", "between 0 and 1"),
        ("expandable_segments", "key:value"),
        ("backend:other", "native"),
    ],
)
def test_bad_settings_are_named(text, message):
    with pytest.raises(ValueError, match=message):
        Settings.parse(text)


@pytest.mark.parametrize("text", ["garbage_collection_threshold:0.8", "backend:cudaMallocAsync", "pinned_num_register_threads:4"])
def test_settings_that_are_not_served_say_so(text):
    with pytest.raises(NotImplementedError, match="not serve"):
        Settings.parse(text)


def test_settings_from_the_environment():
    assert Settings.from_environment({}) == Settings()
    both = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:30", "PYTORCH_CUDA_ALLOC_CONF": " backend:native, max_split_size_mb : 40 "}
    assert Settings.from_environment(both).max_split_size == 40 * MiB
    memory = allocator(100 * MiB, "per_process_memory_fraction:0.5")
    assert memory.allowed == 50 * MiB


# Misuse, threads, finalizers


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
    memory.listen(lambda action, block, size: memory.malloc(1))
    with pytest.raises(RuntimeError, match="while it was at work"):
        memory.malloc(1)
    memory.listen(None)
    memory.malloc(1)


def test_what_is_freed_in_the_midst_of_a_call_is_freed_when_it_is_over():
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

    def work():
        for size in range(1, 2000):
            Holder(size * 700)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert (memory.allocated, figure(memory, "active.all.current")) == (0, 0)
    assert figure(memory, "allocation.all.allocated") == figure(memory, "allocation.all.freed") == 4 * 1999
    assert figure(memory, "inactive_split.all.current") == 0
    memory.empty_cache()
    assert memory.reserved == 0


# Statistics, snapshot, history


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
    assert memory.stats()["allocated_bytes"]["all"] == memory.stats()["requested_bytes"]["large_pool"] == expected


def test_history_in_pytorchs_schema():
    """Beside a recording of the same calls, torch 2.11 on an H200: the same actions, sizes and keys."""
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
    keys = {"action", "addr", "size", "stream", "pool_id", "time_us", "compile_context", "user_metadata"}
    assert entries[7].keys() == keys - {"addr"} | {"device_free", "frames"}
    assert entries[7]["device_free"] == 1 * GiB - 2 * MiB
    assert all(entry["frames"] == frames for entry in entries[:8])
    (segment,) = memory.segments()
    assert segment["blocks"][0]["frames"] == frames
    assert (segment["segment_type"], segment["requested_size"], segment["segment_pool_id"]) == ("small", 100, (0, 0))
    memory.record_history("all", 2, context=None)
    memory.malloc(1)
    assert [entry["action"] for entry in memory.history()] == ["snapshot", "alloc"]
    assert "frames" not in memory.history()[-1]
    memory.record_history(None)
    assert memory.history() == []
    with pytest.raises(ValueError, match="enabled"):
        memory.record_history("some")


def test_a_listener_hears_every_event():
    heard = []
    memory = allocator()
    memory.listen(lambda action, block, size: heard.append((action, block.address, size)))
    block = memory.malloc(100)
    address = block.address
    memory.free(block)
    memory.empty_cache()
    whole = 2 * MiB
    actions = [("segment_alloc", whole), ("alloc", 100), ("free_requested", 100), ("free_completed", 100), ("segment_free", whole)]
    assert heard == [(action, address, size) for action, size in actions]


def test_expandable_segments_map_and_unmap_pages():
    memory = allocator(1 * GiB, "expandable_segments:True")
    first, second = memory.malloc(15 * MiB), memory.malloc(10 * MiB)
    assert (memory.reserved, second.address - first.address, figure(memory, "segment.all.current")) == (40 * MiB, 15 * MiB, 0)
    (segment,) = memory.segments()
    assert (segment["is_expandable"], segment["total_size"]) == (True, 40 * MiB)
    memory.free(first)
    memory.empty_cache()  # 15 MiB free hold no whole page of 20 MiB; the 15 MiB tail neither
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


# Recorded on real GPUs


def replay(memory, streams, steps):
    """Performs recorded steps; yields, after each, the text of the error it ended in ("" for none)."""
    blocks = {}
    for action, *details in steps:
        failure = ""
        match action:
            case "malloc":
                try:
                    blocks[details[0]] = memory.malloc(details[1], details[2])
                except OutOfMemory as error:
                    failure = error.message
            case "free" if details[0] in blocks:
                memory.free(blocks.pop(details[0]))
            case "record_stream" if details[0] in blocks:
                memory.record_stream(blocks[details[0]], details[1])
            case "busy":
                streams.busy.add(details[0])
            case "synchronize":
                streams.busy.clear()
            case "empty_cache":
                memory.empty_cache()
            case "limit":
                memory.set_memory_fraction(details[0] / memory.total)
        yield failure


RANDOM = json.loads((RECORDINGS / "allocator_random.json").read_text())


@pytest.mark.parametrize("name", RANDOM["programs"])
def test_random_programs_as_recorded(name):
    """Every figure after every step, the events with their sizes, and at the end every statistic, equal to the byte."""
    program = RANDOM["programs"][name]
    streams = Streams()
    memory = allocator(RANDOM["total_memory"], program["settings"], events=streams, version=RANDOM["torch"])
    memory.listen(streams.synchronized_by)
    memory.record_history("all")
    for step, failure, row in zip(program["steps"], replay(memory, streams, program["steps"]), program["rows"], strict=True):
        assert [figure(memory, key) for key in RANDOM["keys"]] == row[:-1], step
        assert failure[:60] == row[-1][:60]
    stats = memory.stats()
    assert {key: stats[key] for key in program["stats"]} == program["stats"]
    assert stats.keys() - program["stats"].keys() == {"num_oom_rejections", "reserved_bytes_by_private_pools"}  # new in 2.12 and 2.13
    assert [[entry["action"], entry["size"]] for entry in memory.history()] == [[e[0], e[2]] for e in program["events"]]


PROGRAMS = json.loads((RECORDINGS / "allocator_programs.json").read_text())
NAMES = {  # how the recording names what memory_stats names
    "allocated": "allocated_bytes.all.current",
    "reserved": "reserved_bytes.all.current",
    "peak_allocated": "allocated_bytes.all.peak",
    "peak_reserved": "reserved_bytes.all.peak",
    "active_blocks": "active.all.current",
    "segments": "segment.all.current",
    "inactive_split": "inactive_split_bytes.all.current",
    "requested": "requested_bytes.all.current",
}


@pytest.mark.parametrize("name", PROGRAMS["programs"])
def test_programs_as_recorded(name):
    program = PROGRAMS["programs"][name]
    memory = allocator(PROGRAMS["total_memory"], version=PROGRAMS["torch"])
    rows = []
    for step, _ in zip(program["steps"], replay(memory, Streams(), program["steps"]), strict=True):
        if step == ["read"]:
            rows.append([figure(memory, NAMES.get(key, key)) for key in PROGRAMS["keys"]])
    assert rows == program["rows"]
