"""The parts of a program that its author has named, as brackets above the lanes of a timeline."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from matplotlib.axes import Axes

from gputrace.figures.figure import BLACK, SIZE, TEXT_POINTS, drawable, shortened, text_width
from gputrace.spans import Mark

MARGIN = 6  # points between a name and the ends of its bracket


def shown_marks(marks: Iterable[Mark], devices: list[int], window: tuple[float, float]) -> list[Mark]:
    """The marks that a picture of these devices has room for, in order of time.

    The same part on several devices is one mark, from its first start to its last end. The marks of one name are counted on each
    device. A part inside another is left out.
    """
    together: dict[tuple[str, int], Mark] = {}
    count: dict[tuple[str, int], int] = {}
    for mark in sorted(marks, key=lambda mark: mark.start):
        if mark.device not in devices:
            continue
        number = count[mark.name, mark.device] = count.get((mark.name, mark.device), 0) + 1
        same = together.setdefault((mark.name, number), mark)
        together[mark.name, number] = replace(same, start=min(same.start, mark.start), end=max(same.end, mark.end))
    shown: list[Mark] = []
    for mark in sorted(together.values(), key=lambda mark: (mark.start, -mark.end)):
        in_window = mark.start < window[1] and mark.end > window[0]
        if in_window and (not shown or mark.end > shown[-1].end):
            shown.append(mark)
    return shown


def add_marks(axes: Axes, marks: list[Mark], window: tuple[float, float], height: float) -> None:
    """Draw a bracket for each mark above the axes, as high as this share of them, and lines through the lanes at its ends."""
    points = 72 * SIZE[0] * axes.get_position().width / (window[1] - window[0])
    look: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "color": BLACK, "linewidth": 0.8, "clip_on": False}
    drawn_until = window[0]
    for mark in marks:  # one rank may begin a step while another still works on the step before
        start, end = max(mark.start, drawn_until), min(mark.end, window[1])
        drawn_until = end
        name = shortened(drawable(mark.name), (end - start) * points - 2 * MARGIN)
        middle, half = (start + end) / 2, (text_width(name) / 2 + MARGIN) / points
        for left, right in ((start, middle - half), (middle + half, end)):
            if right > left:
                axes.plot([left, right], [1 + height / 2] * 2, **look)
        for edge, cut in ((start, mark.start < window[0]), (end, end < mark.end)):
            if not cut:
                axes.plot([edge, edge], [0, 1 + height / 2], linestyle=(0, (1, 2)), zorder=4, **look)
        text: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": TEXT_POINTS, "parse_math": False}
        axes.text(middle, 1 + height / 2, name, transform=axes.get_xaxis_transform(), **text)
