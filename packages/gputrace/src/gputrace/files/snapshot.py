"""Trace in the format of `torch.cuda.memory._snapshot`, which PyTorch's own viewer opens."""

import pickle
from typing import TYPE_CHECKING, Any

from gputrace.events import ACTIONS, CATEGORIES, OOM, Stack
from gputrace.replay import RecordedBlock, RecordedSegment
from virtualgpu.allocator import UNLIMITED

if TYPE_CHECKING:
    from gputrace.trace_data import TraceData

_STATES = {"allocated": "active_allocated", "pending": "active_pending_free", "free": "inactive"}
_POOL = (0, 0)


def content(trace: "TraceData") -> bytes:
    """Return the content of the file. Raise ValueError if events were lost."""
    return pickle.dumps(of(trace), protocol=4)


def of(trace: "TraceData") -> dict[str, Any]:
    """Return the snapshot of a trace: its segments at the end, and the events of every device."""
    frames = [_frames(stack) for stack in trace.stacks]
    devices = max(trace.totals) + 1
    history: list[list[dict]] = [[] for _ in range(devices)]
    for event, category in zip(trace.events, trace.events.category.tolist(), strict=True):
        history[event.device].append(
            {
                "action": ACTIONS[event.action],
                "device_free" if event.action == OOM else "addr": event.address,
                "size": event.requested,
                "stream": event.stream,
                "pool_id": _POOL,
                "time_us": round(event.time * 1e6),
                "frames": frames[event.stack],
                "compile_context": "N/A",
                "user_metadata": CATEGORIES[category],
            }
        )
    divisions = trace.settings.divisions
    segments = []
    for device in range(devices):
        segments += [_segment(segment, frames) for segment in trace.segments("end", device)]
    most = trace.settings.max_split_size
    return {
        "segments": segments,
        "device_traces": history,
        "allocator_settings": {
            "max_split_size": -1 if most == UNLIMITED else most,
            "garbage_collection_threshold": 0.0,
            "expandable_segments": trace.settings.expandable_segments,
            "roundup_power2_divisions": {
                str(1 << i): division for i, division in enumerate(divisions)
            },
        },
        "external_annotations": [],
    }


def _frames(stack: Stack) -> list[dict[str, Any]]:
    """Return the lines of a stack in PyTorch's format."""
    return [{"filename": line.filename, "line": line.line, "name": line.function} for line in stack]


def _segment(segment: RecordedSegment, frames: list[list[dict]]) -> dict[str, Any]:
    """Return a segment in PyTorch's format. `frames` are the stacks, by number."""
    used = [block for block in segment.blocks if block.state != "free"]
    return {
        "device": segment.device,
        "address": segment.address,
        "total_size": segment.size,
        "allocated_size": sum(block.size for block in used if block.state == "allocated"),
        "active_size": sum(block.size for block in used),
        "requested_size": sum(block.requested for block in used),
        "stream": segment.stream,
        "segment_type": "small" if segment.small else "large",
        "segment_pool_id": _POOL,
        "is_expandable": segment.expandable,
        "frames": [],
        "blocks": [_block(block, frames) for block in segment.blocks],
    }


def _block(block: RecordedBlock, frames: list[list[dict]]) -> dict[str, Any]:
    """Return a block in PyTorch's format. `frames` are the stacks, by number."""
    return {
        "address": block.address,
        "size": block.size,
        "requested_size": block.requested,
        "state": _STATES[block.state],
        "frames": frames[block.stack],
    }
