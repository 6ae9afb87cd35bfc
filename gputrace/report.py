"""`python -m labkit trace`: run a script under the instrument, and write one HTML page about the memory and the time of its GPUs."""

import os
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from gputrace import units
from gputrace.events import OOM
from gputrace.leaks import Leaks
from gputrace.recording import MAX_EVENTS, record
from gputrace.tables import Table
from gputrace.trace import Trace

if TYPE_CHECKING:
    from gputrace.figures.figure import Figure

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1b; --paper: #fff; --line: #c8c8c8; --faint: #f3f3f3; --alarm: #a33b00; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8e8; --paper: #161616; --line: #4a4a4a; --faint: #242424; --alarm: #ffab7a; } }
body { margin: 0 auto; max-width: 62rem; padding: 1rem 1.5rem 3rem; color: var(--ink); background: var(--paper);
  font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; overflow-wrap: anywhere; } h2 { font-size: 1.2rem; margin-top: 2.5rem; } h3 { font-size: 1rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; } dt { font-weight: 600; }
dd { margin: 0; overflow-wrap: anywhere; }
figure { margin: 1rem 0; } figure img { border-radius: 4px; } figcaption { font-size: .9rem; }
:focus-visible { outline: 3px solid #0072b2; outline-offset: 2px; }
table { border-collapse: collapse; font-size: .9rem; } caption { text-align: left; padding: .3rem 0; }
th, td { text-align: left; vertical-align: top; padding: .2rem .7rem .2rem .4rem; border-bottom: 1px solid var(--line); }
th { background: var(--faint); } td { font-variant-numeric: tabular-nums; }
.lines td:last-child, code { font-family: ui-monospace, monospace; } code { white-space: pre-wrap; } summary { cursor: pointer; }
.alarm { border-left: 4px solid var(--alarm); padding-left: 1rem; }
"""
_NAMES = {"torch": "PyTorch"}
_OPEN = 10  # tensors that were alive at the end, shown without a click
# Nothing is fetched: pictures and style are in the page.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def default_path(script: str) -> Path:
    """Where the page about a script goes unless it is said otherwise: `train-memory.html` in the current directory."""
    return Path(f"{Path(script).stem}-memory.html")


def checked(path: str | Path) -> Path:
    """The absolute path of a page that can be written there. Raises ValueError for one that cannot."""
    target = Path(path).absolute()
    if target.is_dir():
        raise ValueError(f"--output {path}: that is a directory; give the name of a file, such as {Path(path) / 'report.html'}")
    if not target.parent.is_dir():
        raise ValueError(f"--output {path}: there is no directory {target.parent}")
    if target.exists() and target.suffix not in (".html", ".htm"):
        raise ValueError(
            f"--output {path}: there is another file of that name; give that of a new file, or of a page, {Path(path).with_suffix('.html')}"
        )
    if not os.access(target if target.exists() else target.parent, os.W_OK):
        raise ValueError(f"--output {path}: it may not be written")
    return target


def run_and_report(run: Callable[[], None], command: str, target: Path, max_events: int | None = None, timeline: bool = True) -> bool:
    """Record `run()` and write the page to `target`, also when an exception ends it, which then goes on its way.

    `timeline=False` leaves out what ran when. Returns whether the page could be written; if not, that is said on the standard error.
    """
    process, ended, trace, written = os.getpid(), "at its last line", None, True
    try:
        with record(MAX_EVENTS if max_events is None else max_events, timeline=timeline) as trace:
            run()
    except BaseException as raised:
        ended = _ending(raised)
        raise
    finally:
        if trace is not None and os.getpid() == process:  # a child that the script forked comes by here too
            written = _write(page(trace, trace.leaks(), command, ended), target)
            if trace.error and trace.oom is not None:
                print(f"labkit trace: {trace.oom.title}", file=sys.stderr)
    return written


def _write(text: str, target: Path) -> bool:
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        print(f"labkit trace: {target} could not be written: {error.strerror}", file=sys.stderr)
        return False
    print(f"labkit trace: the memory of the GPUs is told in {target}", file=sys.stderr)
    return True


def _ending(raised: BaseException) -> str:
    """How an exception ended the script, in a few words."""
    if isinstance(raised, SystemExit):
        return "at its last line" if raised.code is None else f"by sys.exit({raised.code!r})"
    if isinstance(raised, KeyboardInterrupt):
        return "by Ctrl-C (KeyboardInterrupt)"
    said = textwrap.shorten(str(raised), 160, placeholder=" …")
    return f"by {type(raised).__name__}{': ' if said else ''}{said}"


# The page


def page(trace: Trace, leaks: Leaks, command: str, ended: str) -> str:
    """One self-contained HTML page: where the numbers come from, and what each device's memory did."""
    peaks = trace.peaks
    devices = [device for device in trace.devices if peaks[device] or (trace.events.device == device).any()]
    title = f"GPU memory and time of {command}"
    body = [f"<h1>GPU memory and time of <code>{escape(command)}</code></h1>", _facts(trace, command, ended)]
    if trace.lost:
        text = (
            f"{trace.lost} events were lost, the oldest. Peaks may have been higher, and which blocks lay where is not known: "
            f"run it again with --max-events {max(2 * (trace.lost + len(trace.events)), 1)}."
        )
        body.append(f'<p class="alarm">{text}</p>')
    if (explained := trace.oom) is not None:
        body.append(f'<section class="alarm"><h2>Why the memory ran out</h2>{explained._repr_html_()}</section>')
    if devices:
        body.append(_time(trace, devices))
    if len(devices) > 1:
        from gputrace.figures.devices import trace_devices

        body.append(f"<section><h2>All devices</h2>{_figure(trace_devices(trace))}</section>")
    body += [_device(trace, device) for device in devices] or ["<p>The script asked for no memory on a GPU.</p>"]
    body.append(_kept(trace, leaks))
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n'
        + "\n".join(body)
        + "\n</main>\n</body>\n</html>\n"
    )


def _facts(trace: Trace, command: str, ended: str) -> str:
    """What was run, on what, for how long, and the peak."""
    line = trace.peak_line
    peak = f"{units.byte_text(trace.peak)} allocated on cuda:{trace.device}"
    made = "" if line is None else f", made by {escape(line.place)} <code>{escape(line.text)}</code>"
    clock = ", on the model's clock" if trace.badge.startswith("virtual") else ""
    rest = "" if trace.no_timeline or trace.end <= trace.seconds else f"; the GPUs' last work ended after {units.time_text(trace.end)}"
    facts = {
        "GPU": escape(trace.badge),
        "Ended": escape(ended),
        "Duration": f"{units.time_text(trace.seconds)}{clock}{rest}",
        "Peak": escape(peak) + made,
        **{_NAMES.get(name, name.capitalize()): escape(value) for name, value in sorted(trace.origin.items())},
    }
    return "<dl>" + "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in facts.items()) + "</dl>"


def _time(trace: Trace, devices: list[int]) -> str:
    """What ran when, and how long each device worked."""
    if trace.no_timeline:
        return f"<section><h2>What ran when</h2><p>Not known: {escape(trace.no_timeline)}.</p></section>"
    header = ("device", "worked", "kernels", "copies", "both at once", "idle")
    figures = (
        (trace.busy(device), trace.busy(device, "kernel"), trace.busy(device, "copy"), trace.overlap(device), trace.idle(device))
        for device in devices
    )
    rows = tuple((f"cuda:{device}", *map(units.time_text, row)) for device, row in zip(devices, figures, strict=True))
    table = Table(header, rows, f"Of {units.time_text(trace.end)}; the host waited {units.time_text(trace.host_waited)}")
    return f"<section><h2>What ran when</h2>{_figure(trace.plot_timeline(memory=True))}{table._repr_html_()}</section>"


def _device(trace: Trace, device: int) -> str:
    """One device's memory over time, its lines, and its segments when it ran out of memory, else at the peak."""
    refused = ((trace.events.device == device) & (trace.events.action == OOM)).nonzero()[0]
    moment, when = (int(refused[-1]), "when the memory ran out") if len(refused) else ("peak", "at the peak")
    segments = "<p>Not known, as events were lost.</p>" if trace.lost else _figure(trace.plot_segments(moment, device))
    lines = f'<div class="lines">{trace.lines(device)._repr_html_()}</div>'
    return (
        f"<section><h2>cuda:{device}</h2>{_figure(trace.plot_memory(device))}<h3>Line by line</h3>{lines}"
        f"<h3>The allocator's segments {when}</h3>{segments}</section>"
    )


def _kept(trace: Trace, leaks: Leaks) -> str:
    """What was still alive when the script ended, and who held it; all but the largest rows folded away."""
    if not leaks:
        told = f"<p>Nothing that the script allocated{' after the lost events' if trace.lost else ''} was alive when it ended.</p>"
    else:
        table, count = leaks.table(), f"{len(leaks)} tensor{'s' * (len(leaks) > 1)} with {units.byte_text(leaks.bytes)}"
        told = (
            f"<p>{count}: what the script allocated and still held when it ended, and by which name. "
            "What you did not mean to keep is a leak.</p>"
        )
        told += replace(table, rows=table.rows[:_OPEN], caption=f"What takes most, {trace.badge}")._repr_html_()
        if rest := table.rows[_OPEN:]:
            others = replace(table, rows=rest, caption=f"The others, {trace.badge}")._repr_html_()
            told += f"<details><summary>{len(rest)} more row{'s' * (len(rest) > 1)}</summary>{others}</details>"
    return f'<section class="kept"><h2>Alive at the end</h2>{told}</section>'


def _figure(figure: "Figure") -> str:
    words = f"<details><summary>The figure in words</summary>{escape(figure.alt)}</details>"
    return f"<figure>{figure.html}<figcaption>{words}</figcaption></figure>"
