"""The phases of training as a strip below the axes of a figure: forward, backward, step."""

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from gputrace.figures.figure import SIZE, TEXT_POINTS, text_width, time_ticks

if TYPE_CHECKING:
    from gputrace.phases import Phase

COLOURS = {"forward": "#EDEDED", "backward": "#C4C4C4", "step": "#8F8F8F"}
NAMES = {"forward": ("forward", "fwd"), "backward": ("backward", "bwd"), "step": ("step",)}
NARROW = 2  # points: phases that are narrower are not drawn one by one


def add_phases(axes: Axes, phases: "list[Phase]", end: float, start: float = 0.0) -> None:
    """Draw the phases under `axes`, whose scale of time, from `start` to `end`, then stands below them."""
    axes.set_xlim(start, end)
    if not phases:
        time_ticks(axes, end, start)
        return
    phases = [replace(p, start=max(p.start, start), end=min(p.end, end)) for p in phases if p.start <= end and p.end >= start]
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
    unnamed = [name for name in COLOURS if not _draw_kind(strip, name, [phase for phase in phases if phase.name == name], points)]
    patches = [Patch(facecolor=COLOURS[name], edgecolor="#777777", linewidth=0.5, label=name) for name in unnamed]
    axes.figure.legend(handles=patches, loc="upper left", bbox_to_anchor=(box.x1 + 0.01, box.y0), frameon=False, fontsize=TEXT_POINTS)


def _draw_kind(strip: Axes, name: str, phases: "list[Phase]", points: float) -> bool:
    """Draw all phases of one name, at so many points a second, with the name, or a shorter one, where it fits.

    Returns whether the reader can do without a legend.
    """
    rooms = [(phase.end - phase.start) * points - 3 for phase in phases]
    text = next((short for short in NAMES[name] if text_width(short) <= np.median(rooms)), "") if phases else ""
    for phase, room in zip(phases, rooms, strict=True):
        strip.axvspan(phase.start, phase.end, facecolor=COLOURS[name], edgecolor="white", linewidth=0.5)
        if text_width(text) <= room:
            strip.text((phase.start + phase.end) / 2, 0.45, text, ha="center", va="center", fontsize=TEXT_POINTS)
    return text == NAMES[name][0] or not phases


def _draw_crowd(strip: Axes, phases: "list[Phase]") -> None:
    """More phases than can be distinguished: one band with the number of each."""
    counts = {name: count for name in COLOURS if (count := sum(phase.name == name for phase in phases))}
    together = len(set(counts.values())) == 1
    text = f"{len(phases) // len(counts)} × {', '.join(counts)}" if together else ", ".join(f"{n} × {name}" for name, n in counts.items())
    strip.axvspan(phases[0].start, phases[-1].end, facecolor=COLOURS["forward"], edgecolor="none")
    strip.text(0.5, 0.45, text, ha="center", va="center", fontsize=TEXT_POINTS, transform=strip.transAxes)
