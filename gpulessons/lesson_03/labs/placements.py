"""Which tensors lie on which device, by kind: a column for each device, a row for each kind, as nn.DataParallel moves them about."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import FancyBboxPatch
from torch import nn

from gputrace import units
from gputrace.figures.figure import BLUE, GREEN, GREY, ORANGE, SKY_BLUE, VERMILLION, YELLOW, Figure, new_canvas
from labkit import machine
from labkit.labs.experiment import Result, badge
from labkit.labs.figures import badged, in_style

COLUMNS = {"kind": "", "device": "", "bytes": "bytes", "shape": ""}


def placement(**kinds: Any) -> Result:
    """Where tensors lie: one row for each kind and device, in the order given, and the devices of the machine in use as `devices`.

    `kinds` are named by what they hold, such as `parameters=replicas, inputs=batch`. A value is a tensor, a module (its parameters;
    a replica of DataParallel has some too), or any nesting of lists, tuples and dicts of these; None is skipped. A tensor that is
    given twice, or shares its memory with one given before, counts once. `shape` is that of a kind's tensor on a device if there is
    one only, else how many there are.

    Raises TypeError for other values, RuntimeError when no GPU is in use.
    """
    name = badge()
    rows = []
    for kind, value in kinds.items():
        by_device: dict[str, dict[int, torch.Tensor]] = {}
        for tensor in _tensors(kind, value):
            by_device.setdefault(str(tensor.device), {}).setdefault(tensor.data_ptr(), tensor)
        for device in sorted(by_device):
            found = list(by_device[device].values())
            shape = " × ".join(map(str, found[0].shape)) or "one number" if len(found) == 1 else f"{len(found)} tensors"
            nbytes = sum(tensor.numel() * tensor.element_size() for tensor in found)
            rows.append({"kind": kind, "device": device, "bytes": nbytes, "shape": shape})
    devices = [f"cuda:{index}" for index in range(machine.in_use().count)]
    return Result("placement", {"kinds": list(kinds), "devices": devices}, COLUMNS, rows, name)


def _tensors(kind: str, value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, nn.Module):
        # A replica's parameters are results of a computation, the broadcast, so PyTorch does not list them as parameters.
        yield from value.parameters()
        for module in value.modules():
            yield from getattr(module, "_former_parameters", {}).values()
    elif isinstance(value, dict):
        for child in value.values():
            yield from _tensors(kind, child)
    elif isinstance(value, list | tuple):
        for child in value:
            yield from _tensors(kind, child)
    elif value is not None:
        raise TypeError(f"{kind}={value!r}: give tensors, modules, or lists, tuples and dicts of these")


# The figure


COLOURS = {"parameters": BLUE, "inputs": GREEN, "outputs": ORANGE, "gradients": VERMILLION}
OTHERS = (SKY_BLUE, YELLOW, GREY)
ROW, ROUND = 0.52, 0.45  # inches: the height of a row, and of what stands above and below the rows
LIGHT = 0.35  # how much of its colour a box keeps, so that its text can be read


@in_style
def plot_placement(**kinds: Any) -> Figure:
    """Where tensors lie, such as `plot_placement(parameters=replicas, inputs=batch)`: arguments as of `labkit.labs.placement`."""
    result = placement(**kinds)
    names, devices = result.parameters["kinds"], list(result.parameters["devices"])
    devices = [device for device in dict.fromkeys(result.column("device")) if device not in devices] + devices
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
    return badged(canvas, result.badge, *(_told(result, kind) for kind in names))


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
