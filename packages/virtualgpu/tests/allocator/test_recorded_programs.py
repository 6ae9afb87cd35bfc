"""The allocator does what a real GPU's did in recorded programs, after every step."""

import json
from pathlib import Path

import pytest

from virtualgpu.allocator import OutOfMemory

from .scripted import Streams, allocator, figure

RECORDINGS = Path(__file__).parents[1] / "recordings"


def replay(memory, streams, steps):
    """Perform recorded steps. Yield the text of the error, or "", after each step."""
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
    """Check that every statistic after every step, and every event, is equal to the byte."""
    program = RANDOM["programs"][name]
    streams = Streams()
    memory = allocator(
        RANDOM["total_memory"], program["settings"], events=streams, version=RANDOM["torch"]
    )
    memory.listen(streams.synchronized_by)
    memory.record_history("all")
    for step, failure, row in zip(
        program["steps"], replay(memory, streams, program["steps"]), program["rows"], strict=True
    ):
        assert [figure(memory, key) for key in RANDOM["keys"]] == row[:-1], step
        assert failure[:60] == row[-1][:60]
    stats = memory.stats()
    assert {key: stats[key] for key in program["stats"]} == program["stats"]
    # new in 2.12 and 2.13
    assert stats.keys() - program["stats"].keys() == {
        "num_oom_rejections",
        "reserved_bytes_by_private_pools",
    }
    assert [[entry["action"], entry["size"]] for entry in memory.history()] == [
        [e[0], e[2]] for e in program["events"]
    ]


PROGRAMS = json.loads((RECORDINGS / "allocator_programs.json").read_text())
NAMES = {  # the names of the recording, and those of memory_stats
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
