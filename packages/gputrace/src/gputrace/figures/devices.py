"""Figure of the memory of all devices over time, one below the other."""

from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from gputrace import units
from gputrace.figures.columns import columns_of, highest
from gputrace.figures.figure import (
    BESIDE,
    BLACK,
    BLUE,
    DOTS_PER_INCH,
    SIZE,
    STYLE,
    TEXT_POINTS,
    Figure,
    add_badge,
    byte_ticks,
    new_canvas,
    time_ticks,
    words,
)

if TYPE_CHECKING:
    from gputrace.trace_data import TraceData

ALIKE = 1.05  # ratio below which peaks count as equal
CLOSE = 4  # panels. With more, the tick at 0 of a panel would touch the highest tick of the next.


def trace_devices(trace: "TraceData") -> Figure:
    """Draw the allocated and the reserved memory of every device over time, on equal scales."""
    peaks = trace.peaks
    with matplotlib.rc_context(STYLE):
        canvas, *panels = new_canvas(_finding(peaks), rows=len(peaks))
        pixels = round(panels[0].get_position().width * SIZE[0] * DOTS_PER_INCH)
        edges = columns_of(trace, pixels)
        reserved_peaks = [int(trace.timeline(device).reserved.max()) for device in peaks]
        top = 1.05 * max(1, *peaks.values(), *reserved_peaks)
        for axes, device in zip(panels, peaks, strict=True):
            line = trace.timeline(device)
            allocated = line.allocated[highest(line.times, line.allocated, edges)]
            reserved = line.reserved[highest(line.times, line.reserved, edges)]
            axes.stairs(allocated, edges, fill=True, color=BLUE, linewidth=0, zorder=2)
            axes.stairs(reserved, edges, baseline=None, color=BLACK, linewidth=1.6, zorder=3)
            byte_ticks(axes, top, max(1, 6 // len(peaks)), zero=len(peaks) <= CLOSE)
            time_ticks(axes, float(edges[-1]))
            axes.label_outer()
            axes.grid(axis="x", visible=False)
            label = f"cuda:{device}\npeak {units.byte_text(peaks[device])}"
            beside: dict[str, Any] = {"xycoords": "axes fraction", **BESIDE}
            axes.annotate(label, (1, 0.5), (9, 0), **beside, fontsize=TEXT_POINTS)
        entries = [
            Patch(color=BLUE, label="allocated"),
            Line2D([], [], color=BLACK, linewidth=1.6, label="reserved"),
        ]
        look: dict[str, Any] = {"frameon": False, "fontsize": TEXT_POINTS}
        canvas.legend(handles=entries, loc="lower left", bbox_to_anchor=(0, 0), ncols=2, **look)
        add_badge(canvas, trace.badge)
        listed = []
        for device, nbytes in peaks.items():
            listed.append(f"{units.byte_text(nbytes)} on cuda:{device}")
        recorded = f"{units.time_text(trace.seconds)}, {len(trace.events)} events"
        alt = words(canvas, f"Peaks: {', '.join(listed)}", recorded, trace.badge)
        return Figure(canvas, alt)


def _finding(peaks: dict[int, int]) -> str:
    """Return a text that says on which device the peak is highest, and on which it is lowest."""
    most = max(peaks, key=lambda device: (peaks[device], -device))
    least = min(peaks, key=lambda device: peaks[device])
    high, low = units.byte_text(peaks[most]), units.byte_text(peaks[least])
    if not peaks[most]:
        return "Nothing was allocated on any device"
    if len(peaks) == 1:
        return f"Peak {high} on cuda:{most}"
    if peaks[most] <= ALIKE * peaks[least]:
        return f"All {len(peaks)} devices peak at about {high}"
    second = max(nbytes for device, nbytes in peaks.items() if device != most)
    others = f"cuda:{least}" if len(peaks) == 2 else f"the other {len(peaks) - 1}"
    if second > ALIKE * peaks[least]:
        return f"Peak {high} on cuda:{most}, {low} to {units.byte_text(second)} on {others}"
    if not peaks[least]:
        return f"Peak {high} on cuda:{most}, nothing on {others}"
    ratio = peaks[most] / second
    digits = 0 if ratio >= 10 else 1
    return f"Peak {high} on cuda:{most}: {ratio:.{digits}f} times the {low} on {others}"
