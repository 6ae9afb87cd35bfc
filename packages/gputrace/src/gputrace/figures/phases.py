"""Strip below the axes of a figure that shows the phases of training: forward, backward, step."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from gputrace.figures.figure import SIZE, TEXT_POINTS, text_width, time_ticks

if TYPE_CHECKING:
    from gputrace.phases import Phase

COLOURS = {"forward": "#EDEDED", "backward": "#C4C4C4", "step": "#8F8F8F"}
NAMES = {"forward": ("forward", "fwd"), "backward": ("backward", "bwd"), "step": ("step",)}
NARROW = 2  # points. Narrower phases are not drawn one by one.


def add_phases(axes: Axes, phases: "list[Phase]", end: float, start: float = 0.0) -> None:
    """Draw the phases below `axes`, and the time axis, from `start` to `end`, below the phases."""
    axes.set_xlim(start, end)
    if not phases:
        time_ticks(axes, end, start)
        return
    shown = []
    for phase in phases:
        if phase.start <= end and phase.end >= start:
            shown.append(replace(phase, start=max(phase.start, start), end=min(phase.end, end)))
    phases = shown
    axes.tick_params(axis="x", bottom=False, labelbottom=False)
    box = axes.get_position()
    strip = axes.figure.add_axes((box.x0, box.y0 - 0.055, box.width, 0.045))
    time_ticks(strip, end, start)
    strip.set_yticks([])
    strip.grid(visible=False)
    strip.spines[:].set_visible(False)
    points = 72 * SIZE[0] * box.width / (end - start)
    if phases and np.median([phase.end - phase.start for phase in phases]) * points < NARROW:
        _draw_crowd(strip, phases)
        return
    unnamed = []
    for name in COLOURS:
        if not _draw_kind(strip, name, [phase for phase in phases if phase.name == name], points):
            unnamed.append(name)
    edge: dict[str, Any] = {"edgecolor": "#777777", "linewidth": 0.5}
    patches = [Patch(facecolor=COLOURS[name], **edge, label=name) for name in unnamed]
    look: dict[str, Any] = {"frameon": False, "fontsize": TEXT_POINTS}
    corner = box.x1 + 0.01, box.y0
    axes.figure.legend(handles=patches, loc="upper left", bbox_to_anchor=corner, **look)


def _draw_kind(strip: Axes, name: str, phases: "list[Phase]", points: float) -> bool:
    """Draw all phases with one name, and write the name where it fits.

    `points` is the width of a second in points. Return whether the phases need no legend.
    """
    if not phases:
        return True
    rooms = [(phase.end - phase.start) * points - 3 for phase in phases]
    text = ""
    for name_or_short in NAMES[name]:
        if text_width(name_or_short) <= np.median(rooms):
            text = name_or_short
            break
    look: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": TEXT_POINTS}
    for phase, room in zip(phases, rooms, strict=True):
        facecolor = COLOURS[name]
        strip.axvspan(phase.start, phase.end, facecolor=facecolor, edgecolor="white", linewidth=0.5)
        if text_width(text) <= room:
            strip.text((phase.start + phase.end) / 2, 0.45, text, **look)
    return text == NAMES[name][0]


def _draw_crowd(strip: Axes, phases: "list[Phase]") -> None:
    """Draw many phases, too narrow to be told apart, as one band with their count."""
    counts = {}
    for name in COLOURS:
        count = sum(phase.name == name for phase in phases)
        if count:
            counts[name] = count
    if len(set(counts.values())) == 1:
        text = f"{len(phases) // len(counts)} × {', '.join(counts)}"
    else:
        text = ", ".join(f"{count} × {name}" for name, count in counts.items())
    colour = COLOURS["forward"]
    strip.axvspan(phases[0].start, phases[-1].end, facecolor=colour, edgecolor="none")
    look: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": TEXT_POINTS}
    strip.text(0.5, 0.45, text, **look, transform=strip.transAxes)
