"""The file that a trace is saved to: NumPy's archive of the events' columns, and everything else as JSON in one array of bytes."""

import errno
import json
import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from gputrace.events import Events, SourceLine
from gputrace.phases import Phase
from gputrace.replay import RecordedBlock, RecordedSegment
from gputrace.spans import SPAN_COLUMNS, WAIT_COLUMNS, Execution, Mark, RacingSpan, RecordedRace, Spans, Waits
from virtualgpu.allocator import Settings

if TYPE_CHECKING:
    from gputrace.trace_data import TraceData

BY_DEVICE = ("allocated_at_end", "reserved_at_end", "totals")
_PLAIN = ("used", *BY_DEVICE, "seconds", "lost", "error", "badge", "origin")  # what JSON holds as it is
_EVENT_COLUMNS = tuple(column.name for column in fields(Events))


def write(trace: "TraceData", path: str | Path) -> None:
    """Write a trace to a file. Raises OSError where it cannot be written."""
    execution = trace.execution
    header = {
        "stacks": [[[line.filename, line.line, line.function, line.text] for line in stack] for stack in trace.stacks],
        "start": [asdict(segment) for segment in trace.start],
        "settings": asdict(trace.settings),
        "phases": [asdict(phase) for phase in trace.phases],
        **{name: getattr(trace, name) for name in _PLAIN},
        "work": {
            "names": execution.spans.names,
            "races": [asdict(race) for race in execution.races],
            "marks": [asdict(mark) for mark in execution.marks],
            "lost": execution.lost,
            "missing": execution.missing,
        },
    }
    columns: dict[str, Any] = {"header": np.frombuffer(json.dumps(header).encode(), np.uint8)}
    columns |= {f"event_{name}": getattr(trace.events, name) for name in _EVENT_COLUMNS}
    columns |= {f"span_{name}": getattr(execution.spans, name) for name in SPAN_COLUMNS}
    columns |= {f"wait_{name}": getattr(execution.waits, name) for name in WAIT_COLUMNS}
    with written_whole(path) as file:
        np.savez_compressed(file, **columns)


def read(path: str | Path) -> dict[str, Any]:
    """The arguments that `Trace` is made of. Raises ValueError for another file, OSError where there is none."""
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as stored:
            header = json.loads(stored["header"].tobytes())
            events = Events(**{name: stored[f"event_{name}"] for name in _EVENT_COLUMNS})
            execution = _execution(header, stored)
        plain = {name: header[name] for name in _PLAIN}
    except (ValueError, KeyError, EOFError, TypeError, zipfile.BadZipFile) as error:  # TypeError: it holds one array
        raise ValueError(f"{path} holds no trace: {error}") from None
    plain |= {name: {int(device): nbytes for device, nbytes in plain[name].items()} for name in BY_DEVICE}
    plain["used"] = [tuple(row) for row in plain["used"]]
    return plain | {
        "events": events,
        "execution": execution,
        "census": None,  # its tensors lived in another process
        "stacks": [tuple(SourceLine(*line) for line in stack) for stack in header["stacks"]],
        "start": [
            RecordedSegment(**{**segment, "blocks": [RecordedBlock(**block) for block in segment["blocks"]]}) for segment in header["start"]
        ],
        "settings": Settings(**{**header["settings"], "divisions": tuple(header["settings"]["divisions"])}),
        "phases": [Phase(**phase) for phase in header["phases"]],
    }


def _execution(header: dict[str, Any], stored: Any) -> Execution:
    work = header["work"]
    spans = Spans(**{name: stored[f"span_{name}"] for name in SPAN_COLUMNS}, names=work["names"])
    waits = Waits(**{name: stored[f"wait_{name}"] for name in WAIT_COLUMNS})
    races = [RecordedRace(RacingSpan(**race["first"]), RacingSpan(**race["second"]), race["kind"]) for race in work["races"]]
    marks = [Mark(**mark) for mark in work["marks"]]
    return Execution(spans, waits, races, work["lost"], work["missing"], marks)


@contextmanager
def written_whole(path: str | Path) -> Iterator[IO[bytes]]:
    """A file to write to, which takes the name `path` once it is complete; an error before that leaves the old file."""
    target = Path(path)
    if not target.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "there is no folder", os.fspath(target.parent))
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, "that is a folder: give the name of a file", os.fspath(target))
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        with open(part, "wb") as file:
            yield file
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
