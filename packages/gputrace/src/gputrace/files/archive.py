"""File to which a trace is saved.

It is an archive of NumPy. The columns of the events are arrays, and everything else is JSON in an
array of bytes.
"""

import errno
import json
import os
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from gputrace.events import Events, SourceLine
from gputrace.phases import Phase
from gputrace.replay import RecordedBlock, RecordedSegment
from gputrace.sources.this_computer import ComputerTime, Loading
from gputrace.spans import (
    SPAN_COLUMNS,
    WAIT_COLUMNS,
    Execution,
    Mark,
    RacingSpan,
    RankHost,
    RecordedRace,
    Spans,
    Waits,
)
from virtualgpu.allocator import Settings

if TYPE_CHECKING:
    from gputrace.trace_data import TraceData

BY_DEVICE = ("allocated_at_end", "reserved_at_end", "totals")
# The attributes that JSON can hold as they are.
_PLAIN = ("used", *BY_DEVICE, "seconds", "lost", "error", "badge", "origin")
# np.load returns an array from some other files, which leads to a TypeError. A changed byte can ask
# for a compression or an encryption that zipfile does not have, which is a RuntimeError.
_DAMAGE = (
    ValueError,
    KeyError,
    EOFError,
    TypeError,
    RuntimeError,
    zipfile.BadZipFile,
    zlib.error,
)
_BEGINNING = b"PK\x03\x04"  # of every archive
_ADVICE = "`trace --save` and `Trace.save` write a trace"
_EVENT_COLUMNS = tuple(column.name for column in fields(Events))


def write(trace: "TraceData", path: str | Path) -> None:
    """Write a trace to a file. Raise OSError if that fails."""
    execution = trace.execution
    stacks = []
    for stack in trace.stacks:
        stacks.append([[line.filename, line.line, line.function, line.text] for line in stack])
    header = {
        "stacks": stacks,
        "start": [asdict(segment) for segment in trace.start],
        "settings": asdict(trace.settings),
        "phases": [asdict(phase) for phase in trace.phases],
        **{name: getattr(trace, name) for name in _PLAIN},
        "work": {
            "names": execution.spans.names,
            "races": [asdict(race) for race in execution.races],
            "marks": [asdict(mark) for mark in execution.marks],
            "hosts": [asdict(host) for host in execution.hosts],
            "lost": execution.lost,
            "missing": execution.missing,
        },
        "computers": [asdict(computer) for computer in trace.computers],
    }
    columns: dict[str, Any] = {"header": np.frombuffer(json.dumps(header).encode(), np.uint8)}
    columns |= {f"event_{name}": getattr(trace.events, name) for name in _EVENT_COLUMNS}
    columns |= {f"span_{name}": getattr(execution.spans, name) for name in SPAN_COLUMNS}
    columns |= {f"wait_{name}": getattr(execution.waits, name) for name in WAIT_COLUMNS}
    with written_whole(path) as file:
        np.savez_compressed(file, **columns)


def read(path: str | Path) -> dict[str, Any]:
    """Read the arguments from which a `Trace` is made.

    Raises:
        ValueError: the file is something else.
        OSError: the file cannot be read.
    """
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as stored:
            header = json.loads(stored["header"].tobytes())
            events = Events(**{name: stored[f"event_{name}"] for name in _EVENT_COLUMNS})
            execution = _execution(header, stored)
        plain = {name: header[name] for name in _PLAIN}
    except (*_DAMAGE, OSError) as error:
        if isinstance(error, OSError) and error.filename is not None:
            raise  # the file cannot be opened
        why = "It is another kind of file"
        if _begins_as_archive(path):
            why = f"It is damaged, or another program wrote it ({error})"
        raise ValueError(f"{path} holds no trace. {why}. {_ADVICE}") from None
    for name in BY_DEVICE:
        plain[name] = {int(device): nbytes for device, nbytes in plain[name].items()}
    plain["used"] = [tuple(row) for row in plain["used"]]
    start = []
    for segment in header["start"]:
        blocks = [RecordedBlock(**block) for block in segment["blocks"]]
        start.append(RecordedSegment(**{**segment, "blocks": blocks}))
    divisions = tuple(header["settings"]["divisions"])
    return plain | {
        "events": events,
        "execution": execution,
        "census": None,  # its tensors were in another process
        "stacks": [tuple(SourceLine(*line) for line in stack) for stack in header["stacks"]],
        "start": start,
        "settings": Settings(**{**header["settings"], "divisions": divisions}),
        "phases": [Phase(**phase) for phase in header["phases"]],
        "computers": [_computer(computer) for computer in header.get("computers", [])],
    }


def _begins_as_archive(path: str | Path) -> bool:
    """Return whether a file begins as an archive of NumPy does."""
    with open(path, "rb") as file:
        return file.read(len(_BEGINNING)) == _BEGINNING


def _computer(stored: dict[str, Any]) -> ComputerTime:
    """Return the `ComputerTime` that was stored in a file as JSON."""
    lines = [(SourceLine(**line), seconds) for line, seconds in stored["lines"]]
    loading = []
    for one in stored["loading"]:
        loading.append(Loading(**{**one, "line": SourceLine(**one["line"])}))
    return ComputerTime(**{**stored, "lines": lines, "loading": loading})


def _execution(header: dict[str, Any], stored: Any) -> Execution:
    """Return the spans, waits and races that a file stores.

    `header` has the file's JSON, and `stored` its arrays.
    """
    work = header["work"]
    spans = Spans(**{name: stored[f"span_{name}"] for name in SPAN_COLUMNS}, names=work["names"])
    waits = Waits(**{name: stored[f"wait_{name}"] for name in WAIT_COLUMNS})
    races = []
    for race in work["races"]:
        sides = {name: RacingSpan(**race[name]) for name in ("first", "second")}
        races.append(RecordedRace(**{**race, **sides}))
    marks = [Mark(**mark) for mark in work["marks"]]
    hosts = []
    for host in work["hosts"]:
        phases = [Phase(**phase) for phase in host["phases"]]
        hosts.append(RankHost(host["rank"], host["threads"], phases))
    return Execution(spans, waits, races, work["lost"], work["missing"], marks, hosts)


@contextmanager
def written_whole(path: str | Path) -> Iterator[IO[bytes]]:
    """Open a file for writing. It gets the name `path` only when it is complete.

    If an error occurs before that, the old file is kept.
    """
    target = Path(path)
    if not target.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "there is no folder", os.fspath(target.parent))
    if target.is_dir():
        raise IsADirectoryError(
            errno.EISDIR, "that is a folder: give the name of a file", os.fspath(target)
        )
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        with open(part, "wb") as file:
            yield file
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
