"""The memory of all devices over time, side by side: what replicas hold, and which device holds more."""

from typing import TYPE_CHECKING

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

ALIKE = 1.05  # peaks closer than this factor are called the same
CLOSE = 4  # panels, more of which lie so close together that the 0 of one would touch the last tick of the next


def trace_devices(trace: "TraceData") -> Figure:
    """Bytes allocated and reserved on every device of a trace over time, one panel a device, on the same scales."""
    peaks = trace.peaks
    with matplotlib.rc_context(STYLE):
        canvas, *panels = new_canvas(_finding(peaks), rows=len(peaks))
        edges = columns_of(trace, round(panels[0].get_position().width * SIZE[0] * DOTS_PER_INCH))
        top = 1.05 * max(1, *peaks.values(), *(int(trace.timeline(device).reserved.max()) for device in peaks))
        for axes, device in zip(panels, peaks, strict=True):
            line = trace.timeline(device)
            allocated, reserved = (values[highest(line.times, values, edges)] for values in (line.allocated, line.reserved))
            axes.stairs(allocated, edges, fill=True, color=BLUE, linewidth=0, zorder=2)
            axes.stairs(reserved, edges, baseline=None, color=BLACK, linewidth=1.6, zorder=3)
            byte_ticks(axes, top, max(1, 6 // len(peaks)), zero=len(peaks) <= CLOSE)
            time_ticks(axes, float(edges[-1]))
            axes.label_outer()
            axes.grid(axis="x", visible=False)
            label = f"cuda:{device}\npeak {units.byte_text(peaks[device])}"
            axes.annotate(label, (1, 0.5), (9, 0), xycoords="axes fraction", **BESIDE, fontsize=TEXT_POINTS)
        entries = [Patch(color=BLUE, label="allocated"), Line2D([], [], color=BLACK, linewidth=1.6, label="reserved")]
        canvas.legend(handles=entries, loc="lower left", bbox_to_anchor=(0, 0), ncols=2, frameon=False, fontsize=TEXT_POINTS)
        add_badge(canvas, trace.badge)
        listed = ", ".join(f"{units.byte_text(nbytes)} on cuda:{device}" for device, nbytes in peaks.items())
        return Figure(
            canvas, words(canvas, f"Peaks: {listed}", f"{units.time_text(trace.seconds)}, {len(trace.events)} events", trace.badge)
        )


def _finding(peaks: dict[int, int]) -> str:
    """Which device holds most, and which least."""
    most, least = max(peaks, key=lambda device: (peaks[device], -device)), min(peaks, key=lambda device: peaks[device])
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
    return f"Peak {high} on cuda:{most}: {ratio:.{0 if ratio >= 10 else 1}f} times the {low} on {others}"
