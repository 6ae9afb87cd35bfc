"""What the page says about this computer's time: how long a batch takes to load, and slow lines."""

from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from gputrace import units
from gputrace.spans import HOST, launch_times, seconds_of
from gputrace.tables import Table

if TYPE_CHECKING:
    from gputrace.sources.this_computer import ComputerTime, Loading
    from gputrace.trace_data import TraceData

MOST_ROWS = 15  # rows of the table of lines
MOST_STEPS = 100  # steps whose work on the GPUs is summed, because each takes milliseconds
LEAST = 0.02  # seconds of a line that are worth a sentence: a few looks of 5 ms


def loading_sentences(trace: "TraceData") -> list[tuple[str, str]]:
    """Return sentences about loading a batch, one per process, as (title, sentence)."""
    found = [loading_sentence(trace, computer) for computer in trace.computers]
    return [said for said in found if said is not None]


def loading_sentence(trace: "TraceData", computer: "ComputerTime") -> tuple[str, str] | None:
    """Return a sentence about loading a batch in one process, as (title, sentence).

    Without a DataLoader, the sentence is about the slowest line outside torch. None means that
    there was no such line.
    """
    batches = [loading for loading in computer.loading if loading.seconds]
    if not batches:
        slow = [line for line in computer.lines if line[1] >= LEAST]
        if not slow:
            return None
        line, seconds = slow[0]
        said = f"{line.location} {line.text} took {units.time_text(seconds)} outside torch, "
        return _titled("Slowest line", computer), f"{said}measured on this computer"
    loading = max(batches, key=lambda loading: sum(loading.seconds))
    typical, count = median(loading.seconds), len(loading.seconds)
    calls = "one call" if count == 1 else f"median of {count} calls"
    said = (
        f"{units.time_text(typical)} on this computer, measured ({calls} of the DataLoader's "
        f"__next__ at {loading.line.location})"
    )
    rest = step_seconds(trace, computer, loading)
    if rest is not None:
        clock = ", measured"
        if trace.is_virtual:
            clock = " on the model's clock"
        share = typical / (typical + rest or 1.0)
        said += f". The rest of a step takes {units.time_text(rest)}{clock}. "
        said += f"Loading is {share:.0%} of both together"
    if loading.workers and trace.is_virtual:
        said += f". {loaded_ahead(loading.workers).removesuffix('.')}"
    return _titled("Loading a batch", computer), said


def loaded_ahead(workers: int) -> str:
    """Return a sentence that warns that the `workers` of a DataLoader load batches ahead."""
    its = "Its worker" if workers == 1 else f"Its {workers} workers"
    return (
        f"{its} loaded ahead while this computer did the work of the virtual GPU. Beside a real "
        "GPU a script may wait longer. With num_workers=0 you see how long loading takes."
    )


def _titled(title: str, computer: "ComputerTime") -> str:
    """Return a title, followed by the rank of the process if it has one."""
    if computer.rank is None:
        return title
    return f"{title}, rank {computer.rank}"


def step_seconds(trace: "TraceData", computer: "ComputerTime", loading: "Loading") -> float | None:
    """Return the median time of a step without its loading, or None if there was one batch only.

    A step lasts from one batch to the request for the next. It takes as long as the host, or as
    long as a GPU works for it if that is more.
    """
    spans = trace.spans
    launched = launch_times(spans)
    devices = [computer.rank] if computer.rank is not None else trace.devices
    found = []
    for start, end in list(zip(loading.received, loading.asked[1:], strict=False))[-MOST_STEPS:]:
        inside = (launched >= start) & (launched <= end) & (spans.device != HOST)
        work = [seconds_of(spans, inside & (spans.device == device)) for device in devices]
        found.append(max(end - start, *work))
    return float(np.median(found)) if found else None


def lines_table(computer: "ComputerTime") -> Table | None:
    """Return a table of the lines with most time outside torch, or None if there is none."""
    if not computer.lines:
        return None
    rows = []
    for line, seconds in computer.lines[:MOST_ROWS]:
        share = f"{seconds / computer.seconds:.0%}"
        rows.append((line.location, units.time_text(seconds), share, line.text))
    took = units.time_text(computer.seconds)
    caption = f"{_titled('Time outside torch by line', computer)}, measured on this computer: "
    caption += f"the script took {took}"
    if len(computer.lines) > MOST_ROWS:
        caption += f". These are the first {MOST_ROWS} of {len(computer.lines)} lines"
    return Table(("line", "time", "share", "source"), tuple(rows), caption)
