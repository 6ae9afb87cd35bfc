"""What lies on which device: a column for each device, a row for each kind of tensor, as nn.DataParallel moves them about."""

from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import FancyBboxPatch

from gputrace import units
from gputrace.figures.figure import BLUE, GREEN, GREY, ORANGE, SKY_BLUE, STYLE, VERMILLION, YELLOW, Figure, add_badge, new_canvas, words
from labkit import experiments
from labkit.experiments.result import Result

COLOURS = {"parameters": BLUE, "inputs": GREEN, "outputs": ORANGE, "gradients": VERMILLION}
OTHERS = (SKY_BLUE, YELLOW, GREY)
ROW, ROUND = 0.52, 0.45  # inches: the height of a row, and of what stands above and below the rows
LIGHT = 0.35  # how much of its colour a box keeps, so that its text can be read


def placement(**kinds: Any) -> Figure:
    """Where tensors lie, such as `placement(parameters=replicas, inputs=batch)`: arguments as of `labkit.experiments.placement`."""
    result = experiments.placement(**kinds)
    names, devices = result.parameters["kinds"], list(result.parameters["devices"])
    devices = [device for device in dict.fromkeys(result.column("device")) if device not in devices] + devices
    with matplotlib.rc_context(STYLE):
        canvas, axes = new_canvas(_finding(result, names, len(result.parameters["devices"])))
        height = ROW * (len(names) + 0.6) + 2 * ROUND
        canvas.set_figheight(height)
        axes.set_position([0.13, ROUND / height, 0.85, 1 - 2 * ROUND / height])
        axes.set(xlim=(0, len(devices)), ylim=(len(names), -0.6))
        axes.set_axis_off()
        for column, device in enumerate(devices):
            axes.text(column + 0.5, -0.3, device, ha="center", va="center", fontweight="bold")
        others = iter(OTHERS * len(names))
        for row, kind in enumerate(names):
            colour = COLOURS.get(kind) or next(others)
            axes.text(-0.05, row + 0.5, kind, ha="right", va="center")
            for column, device in enumerate(devices):
                there = next(iter(_rows(result, kind, device)), None)
                _box(axes, column, row, colour if there else None, "" if there is None else _text(there))
        add_badge(canvas, result.badge)
        return Figure(canvas, words(canvas, *(_told(result, kind) for kind in names), result.badge))


def _rows(result: Result, kind: str, device: str) -> list[dict[str, Any]]:
    return [row for row in result.rows if row["kind"] == kind and row["device"] == device]


def _told(result: Result, kind: str) -> str:
    """The kind's bytes on each device; devices that hold the same are named together."""
    alike: dict[str, list[str]] = {}
    for row in result.rows:
        if row["kind"] == kind:
            alike.setdefault(f"{units.byte_text(row['bytes'])} ({row['shape']})", []).append(row["device"])
    parts = (f"{text} on {'each of ' * (len(devices) > 1)}{', '.join(devices)}" for text, devices in alike.items())
    return f"{kind}: {'; '.join(parts) or 'none'}"


def _text(row: dict[str, Any]) -> str:
    return f"{units.byte_text(row['bytes'])}\n{row['shape']}"


def _box(axes: Axes, column: int, row: int, colour: str | None, text: str) -> None:
    """A box with its text; where there is nothing, a dashed outline."""
    filled = "none" if colour is None else tuple(1 - LIGHT * (1 - part) for part in to_rgb(colour))
    look: dict[str, Any] = {"facecolor": filled, "edgecolor": colour or GREY, "linestyle": "-" if colour else ":"}
    shape = "round,pad=0,rounding_size=0.04"
    axes.add_patch(FancyBboxPatch((column + 0.04, row + 0.06), 0.92, 0.88, boxstyle=shape, linewidth=1.2, **look))
    axes.text(column + 0.5, row + 0.5, text, ha="center", va="center", fontsize=9, linespacing=1.1)


def _finding(result: Result, kinds: list[str], count: int) -> str:
    """Which kinds lie where; those that lie alike are named together."""
    where: dict[tuple[str, ...], list[str]] = {}
    for kind in kinds:
        if devices := tuple(result.column("device", kind=kind)):
            where.setdefault(devices, []).append(kind)
    if not where:
        return "Nothing lies on any device"
    parts = [f"{_listed(found)} on {_named(devices, count)}" for devices, found in where.items()]
    text = ", ".join(parts)
    return text[0].upper() + text[1:]


def _named(devices: tuple[str, ...], count: int) -> str:
    if len(devices) == count > 1 and "cpu" not in devices:
        return f"all {count} GPUs"
    return _listed(devices) if len(devices) < 3 else f"{len(devices)} devices"


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
