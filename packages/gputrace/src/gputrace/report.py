"""The page of the command `trace`: record a script, and show the memory and the time of its GPUs."""

import datetime
import os
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jinja2

from gputrace import units
from gputrace.events import OOM
from gputrace.explorer import element as explorer
from gputrace.lines import times_of
from gputrace.recording import MAX_EVENTS, record
from gputrace.tables import Table
from gputrace.trace import Trace

KINDS = {"--output": (".html", ".htm"), "--chrome": (".json",), "--snapshot": (".pickle", ".pkl")}
_OPEN = 10  # tensors that were alive at the end, shown without a click


def default_path(script: str) -> Path:
    """The default path of the page about a script: `train-memory.html` in the current directory."""
    return Path(f"{Path(script).stem}-memory.html")


def checked(path: str | Path, option: str = "--output") -> Path:
    """The absolute path of a file that can be written there. Raises ValueError for one that cannot, and for a file of another kind."""
    target, kinds = Path(path).absolute(), KINDS[option]
    if target.is_dir():
        raise ValueError(f"{option} {path}: that is a directory; give the name of a file, such as {Path(path) / f'report{kinds[0]}'}")
    if not target.parent.is_dir():
        raise ValueError(f"{option} {path}: there is no directory {target.parent}")
    if target.exists() and target.suffix not in kinds:
        other = Path(path).with_suffix(kinds[0])
        raise ValueError(f"{option} {path}: there is another file of that name; give that of a new file, or one such as {other}")
    if not os.access(target if target.exists() else target.parent, os.W_OK):
        raise ValueError(f"{option} {path}: it may not be written")
    return target


def run_and_report(
    run: Callable[[], None],
    command: str,
    files: dict[str, Path],
    max_events: int | None = None,
    timeline: bool = True,
    name: str = "gputrace trace",
) -> bool:
    """Record `run()`, and write the page and the other files, by their options.

    They are also written if `run` raises an error, which is then raised again.

    Args:
        run: runs the script.
        command: the script and its arguments, which the page shows.
        files: the files to write, by their options.
        max_events: the number of events to keep.
        timeline: False leaves out what ran when.
        name: the command, with which messages begin.

    Returns whether all files could be written. If not, standard error says why.
    """
    process, ended, trace, written = os.getpid(), "at its last line", None, True
    today = datetime.date.today()
    try:
        with record(MAX_EVENTS if max_events is None else max_events, timeline=timeline) as trace:
            run()
    except BaseException as raised:
        ended = _ending(raised)
        raise
    finally:
        if trace is not None and os.getpid() == process:  # not in a child that the script forked
            written = write_all(trace, command, ended, files, today, name)
            if trace.error and trace.oom is not None:
                print(f"{name}: {trace.oom.title}", file=sys.stderr)
    return written


def write_all(
    trace: Trace,
    command: str,
    ended: str,
    files: dict[str, Path],
    today: datetime.date,
    name: str = "gputrace trace",
) -> bool:
    """Write the page and the other files, by their options.

    Returns whether all could be written. If not, standard error says why, beginning with `name`.
    """
    makers: dict[str, Callable[[Path], object]] = {
        "--output": lambda path: path.write_text(page(trace, command, ended, today), encoding="utf-8"),
        "--chrome": trace.export_chrome,
        "--snapshot": trace.export_snapshot,
    }
    return all([_write(makers[option], path, name) for option, path in files.items()])


def _write(make: Callable[[Path], object], target: Path, name: str) -> bool:
    """Write a file. Print its address, which a terminal opens, or why there is none."""
    try:
        make(target)
    except (OSError, ValueError, RuntimeError) as error:  # no folder, lost events, or no timeline
        why = getattr(error, "strerror", None) or error
        print(f"{name}: {target} could not be written: {why}", file=sys.stderr)
        return False
    print(f"{name}: wrote {target.as_uri()}", file=sys.stderr)
    return True


def _ending(raised: BaseException) -> str:
    """How an exception ended the script, in a few words."""
    if isinstance(raised, SystemExit):
        return "at its last line" if raised.code is None else f"by sys.exit({raised.code!r})"
    if isinstance(raised, KeyboardInterrupt):
        return "by Ctrl-C (KeyboardInterrupt)"
    text = textwrap.shorten(str(raised), 160, placeholder=" …")
    return f"by {type(raised).__name__}{': ' if text else ''}{text}"


# The page


def page(trace: Trace, command: str, ended: str, today: datetime.date) -> str:
    """One self-contained HTML page about a recording of today: where the numbers come from, and what each device did."""
    leaks = None if trace.census is None else trace.leaks()  # of several ranks: their tensors lived in other processes
    pages = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined
    )
    pages.filters |= {"bytes": units.byte_text, "time": units.time_text}
    peaks, kept = trace.peaks, Table((), (), "") if leaks is None else leaks.table()
    devices = [device for device in trace.devices if peaks[device] or (trace.events.device == device).any()]
    return pages.get_template("page.html").render(
        trace=trace,
        explorer=explorer,
        leaks=leaks,
        oom=trace.oom,
        command=command,
        ended=ended,
        recorded=today.isoformat(),
        devices=[(device, *_moment(trace, device)) for device in devices],
        times=[] if trace.no_timeline else [_times(trace, devices), *times_of(trace)],
        all_devices=trace.plot_devices() if len(devices) > 1 else None,
        most=replace(kept, rows=kept.rows[:_OPEN], caption=f"What takes most, {trace.badge}"),
        others=replace(kept, rows=kept.rows[_OPEN:], caption=f"The others, {trace.badge}"),
    )


def _times(trace: Trace, devices: list[int]) -> Table:
    """How long each device worked."""
    header = ("device", "worked", "kernels", "copies", "both at once", "idle")
    rows = []
    for device in devices:
        seconds = trace.busy(device), trace.busy(device, "kernel"), trace.busy(device, "copy"), trace.overlap(device), trace.idle(device)
        rows.append((f"cuda:{device}", *map(units.time_text, seconds)))
    host = f"; the host waited {units.time_text(trace.host_waited)}" if trace.tells_of_host else ""
    return Table(header, tuple(rows), f"Of {units.time_text(trace.end)}{host}")


def _moment(trace: Trace, device: int) -> tuple[str | int, str]:
    """When to show a device's segments, and in words: when it ran out of memory, else at the peak."""
    refused = ((trace.events.device == device) & (trace.events.action == OOM)).nonzero()[0]
    return (int(refused[-1]), "when the memory ran out") if len(refused) else ("peak", "at the peak")
