"""Page of the command `trace`, which records a script and shows its GPUs' memory and time."""

import datetime
import os
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from gputrace import units
from gputrace.certainty import certainty
from gputrace.collectives import collectives_of, hosts_table, waits_for_ranks
from gputrace.events import OOM
from gputrace.explorer import element as explorer
from gputrace.lines import times_of
from gputrace.loading import lines_table, loading_sentences
from gputrace.pages import templates
from gputrace.recording import MAX_EVENTS, record_and_measure
from gputrace.tables import Table
from gputrace.trace import Trace

KINDS = {
    "--output": (".html", ".htm"),
    "--chrome": (".json",),
    "--snapshot": (".pickle", ".pkl"),
    "--save": (".trace",),
}
_OPEN = 10  # rows of the table of tensors that are visible without a click


def default_path(script: str) -> Path:
    """Return the default path of the page about a script: SCRIPT-memory.html in this folder."""
    return Path(f"{Path(script).stem}-memory.html")


def checked(path: str | Path, option: str = "--output") -> Path:
    """Return the absolute path of a file that an option names.

    Raises:
        ValueError: the file cannot be written, or a file of another kind has this name.
    """
    target, kinds = Path(path).absolute(), KINDS[option]
    if target.is_dir():
        example = Path(path) / f"report{kinds[0]}"
        raise ValueError(f"{option} {path}: expected a file such as {example}, got a directory")
    if not target.parent.is_dir():
        raise ValueError(f"{option} {path}: there is no directory {target.parent}. Create it first")
    if target.exists() and target.suffix not in kinds:
        example = Path(path).with_suffix(kinds[0])
        raise ValueError(
            f"{option} {path}: this file exists and does not end in {kinds[0]}, so it may be "
            f"something else. Give the name of a new file, or one such as {example}"
        )
    if not os.access(target if target.exists() else target.parent, os.W_OK):
        raise ValueError(f"{option} {path}: you have no permission to write this file")
    return target


def run_and_report(
    run: Callable[[], None],
    command: str,
    files: dict[str, Path],
    max_events: int | None = None,
    timeline: bool = True,
    name: str = "gputrace trace",
) -> bool:
    """Record `run()`, and write the page and the other files.

    If `run` raises an error, the files are written, and the error is raised again.

    Args:
        run: runs the script.
        command: the script and its arguments, which the page shows.
        files: the path of each file to write, by its option.
        max_events: how many events to keep. None keeps the default number.
        timeline: whether to record what runs when.
        name: the command, with which messages begin.

    Returns:
        Whether all files could be written. If not, standard error says why.
    """
    process, ended, trace, written = os.getpid(), "at its last line", None, True
    today = datetime.date.today()
    events = MAX_EVENTS if max_events is None else max_events
    try:
        with record_and_measure(events, timeline=timeline) as trace:
            run()
    except BaseException as raised:
        ended = _ending(raised)
        raise
    finally:
        if trace is not None and os.getpid() == process:  # not in a process that the script forked
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
    """Write the page and the other files.

    Args:
        command: the script and its arguments, which the page shows.
        ended: how the script ended, such as "at its last line".
        files: the path of each file to write, by its option.
        today: the day of the recording.
        name: the command, with which messages begin.

    Returns:
        Whether all files could be written. If not, standard error says why.
    """

    def write_page(path: Path) -> None:
        path.write_text(page(trace, command, ended, today), encoding="utf-8")

    makers: dict[str, Callable[[Path], object]] = {
        "--output": write_page,
        "--chrome": trace.export_chrome,
        "--snapshot": trace.export_snapshot,
        "--save": trace.save,
    }
    return all([write(makers[option], path, name) for option, path in files.items()])


def write(make: Callable[[Path], object], target: Path, name: str) -> bool:
    """Let `make` write the file `target`, and return whether that worked.

    Print the file's address, or why it could not be written, after `name`.
    """
    try:
        make(target)
    except (OSError, ValueError, RuntimeError) as error:  # lost events or no timeline, for example
        why = getattr(error, "strerror", None) or error
        print(f"{name}: {target} could not be written: {why}", file=sys.stderr)
        return False
    print(f"{name}: wrote {target.as_uri()}", file=sys.stderr)
    return True


def _ending(raised: BaseException) -> str:
    """Return a few words that say which exception ended the script."""
    if isinstance(raised, SystemExit):
        if raised.code is None:
            return "at its last line"
        return f"by sys.exit({raised.code!r})"
    if isinstance(raised, KeyboardInterrupt):
        return "by Ctrl-C (KeyboardInterrupt)"
    text = textwrap.shorten(str(raised), 160, placeholder=" …")
    kind = type(raised).__name__
    return f"by {kind}: {text}" if text else f"by {kind}"


# The page


def page(trace: Trace, command: str, ended: str, today: datetime.date) -> str:
    """Return an HTML page about a recording, which contains all that it shows.

    Args:
        command: the script and its arguments.
        ended: how the script ended, such as "at its last line".
        today: the day of the recording.
    """
    leaks, kept = None, Table((), (), "")
    if trace.census is not None:  # the tensors of other processes are not known
        leaks = trace.leaks()
        kept = leaks.table()
    peaks, devices = trace.peaks, []
    for device in trace.devices:
        if peaks[device] or (trace.events.device == device).any():
            devices.append(device)
    times, ranks = [], []
    if not trace.no_timeline:
        times = [_times(trace, devices), *(table for table in times_of(trace) if table.rows)]
        if trace.hosts:
            waits = waits_for_ranks(trace, collectives_of(trace))
            ranks = [table for table in (waits, hosts_table(trace)) if table is not None]
    lines_outside = [lines_table(computer) for computer in trace.computers]
    all_devices = None
    if len(devices) > 1:
        all_devices = trace.plot_devices()
    most, others = kept.rows[:_OPEN], kept.rows[_OPEN:]
    return (
        templates()
        .get_template("page.html")
        .render(
            trace=trace,
            explorer=explorer,
            leaks=leaks,
            oom=trace.oom,
            command=command,
            ended=ended,
            recorded=today.isoformat(),
            devices=[(device, *_moment(trace, device)) for device in devices],
            times=times,
            ranks=ranks,
            certainty=certainty(trace),
            loading=loading_sentences(trace),
            lines_outside=[table for table in lines_outside if table is not None],
            all_devices=all_devices,
            most=replace(kept, rows=most, caption=f"What takes most, {trace.badge}"),
            others=replace(kept, rows=others, caption=f"The others, {trace.badge}"),
        )
    )


def _times(trace: Trace, devices: list[int]) -> Table:
    """Return a table of the time for which each device worked."""
    header = ("device", "worked", "kernels", "copies", "both at once", "idle")
    rows = []
    for device in devices:
        seconds = (
            trace.busy(device),
            trace.busy(device, "kernel"),
            trace.busy(device, "copy"),
            trace.overlap(device),
            trace.idle(device),
        )
        rows.append((f"cuda:{device}", *map(units.time_text, seconds)))
    caption = f"Of {units.time_text(trace.end)}"
    if trace.tells_of_host:
        caption += f"; the host waited {units.time_text(trace.host_waited)}"
    return Table(header, tuple(rows), caption)


def _moment(trace: Trace, device: int) -> tuple[str | int, str]:
    """Return the moment at which a device's segments are shown, and its name in words.

    It is the moment when memory ran out, or otherwise the peak.
    """
    refused = ((trace.events.device == device) & (trace.events.action == OOM)).nonzero()[0]
    if len(refused):
        return int(refused[-1]), "when the memory ran out"
    return "peak", "at the peak"
