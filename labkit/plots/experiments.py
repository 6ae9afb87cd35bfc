"""The figures of the experiments.

Solid lines are this machine's (measured or virtual), dashed ones are recordings, hollow markers are predictions.
"""

import math
from collections.abc import Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from gputrace import units
from gputrace.figures.figure import (
    BESIDE,
    BLACK,
    BLUE,
    STYLE,
    VERMILLION,
    Figure,
    add_badge,
    binary_scale,
    darker,
    decimal_scale,
    label_ends,
    new_canvas,
    time_unit,
    words,
)
from labkit.experiments.copies import PREDICTED_SIZE, pinned_gain
from labkit.experiments.memory import MemorySample
from labkit.experiments.result import Result
from labkit.experiments.sizes import gpu_gain

MARKERS = {BLUE: "o", VERMILLION: "s"}
SAME = 1.05  # factors closer to 1 than this are called equal


def copy_speed(result: Result, recorded: Result | None = None, prediction: float | None = None, *, direction: str = "h2d") -> Figure:
    """Copy speed by size, pageable and pinned, in one direction: "h2d" (host to device) or "d2h".

    `prediction` says how many times faster pinned memory copies 16 MiB; it is drawn above the pageable speed measured there.
    Raises ValueError for another direction.
    """
    if direction not in ("h2d", "d2h"):
        raise ValueError(f'direction={direction!r}: choose "h2d", host to device, or "d2h", device to host')
    with matplotlib.rc_context(STYLE):
        canvas, axes = new_canvas(_pinned_finding(pinned_gain(result, direction)))
        labels = []
        for source, dashes in sources(result, recorded):
            for memory, colour in (("pinned", BLUE), ("pageable", VERMILLION)):
                sizes = source.column("size", memory=memory, direction=direction)
                speeds = source.column("bytes_per_second", memory=memory, direction=direction)
                label = memory if source is result else f"{memory}, recorded"
                labels += line(axes, sizes, speeds, colour, dashes, label)
        sentence = _predicted_speed(axes, result, direction, prediction)
        way = "host to device" if direction == "h2d" else "device to host"
        binary_scale(axes, f"bytes copied, {way}", units.byte_text, most=7)
        decimal_scale(axes, "copy speed", units.rate_text)
        label_ends(axes, labels)
        add_badge(canvas, badges(result, recorded))
        return Figure(canvas, words(canvas, _speed_proof(result, direction), sentence, _speed_proof(recorded, direction), result.badge))


def host_and_device(result: Result, recorded: Result | None = None) -> Figure:
    """Seconds of one training step on CPU and GPU, by the width of the network."""
    with matplotlib.rc_context(STYLE):
        canvas, axes = new_canvas(_winner_finding(gpu_gain(result)))
        labels = []
        for source, dashes in sources(result, recorded):
            for device, name, colour in (("cpu", "CPU", VERMILLION), ("cuda", "GPU", BLUE)):
                label = name if source is result else f"{name}, recorded"
                widths, seconds = source.column("width", device=device), source.column("seconds", device=device)
                labels += line(axes, widths, seconds, colour, dashes, label)
        binary_scale(axes, "width of the network, in neurons", lambda width: f"{width:g}", most=10)
        decimal_scale(axes, "time of one training step", units.time_text)
        label_ends(axes, labels)
        add_badge(canvas, badges(result, recorded))
        return Figure(canvas, words(canvas, _step_proof(result), _step_proof(recorded), result.badge))


def memory_over_time(samples: Sequence[MemorySample], badge: str) -> Figure:
    """Bytes allocated, reserved and used on each GPU over time, one panel a GPU. Raises ValueError without samples."""
    if not samples:
        raise ValueError("no samples of memory to draw: nothing was recorded")
    devices = sorted({sample.device for sample in samples})
    peaks = {name: max(getattr(sample, name) for sample in samples) for name in ("allocated", "reserved", "used")}
    size, unit = units.byte_unit(peaks["used"])
    end = max(sample.seconds for sample in samples) or 1e-6  # the lines of a single moment need some length
    period, short = time_unit(end)
    finding = f"Allocated memory peaks at {units.byte_text(peaks['allocated'])}, reserved memory at {units.byte_text(peaks['reserved'])}"
    with matplotlib.rc_context(STYLE):
        canvas, *panels = new_canvas(finding, rows=len(devices))
        for axes, device in zip(panels, devices, strict=True):
            mine = [sample for sample in samples if sample.device == device]
            times = [sample.seconds / period for sample in mine] + [end / period]
            labels = []
            for name, colour, width in (("used", BLACK, 1.2), ("reserved", VERMILLION, 2), ("allocated", BLUE, 2)):
                heights = [getattr(sample, name) / size for sample in mine]
                axes.step(times, [*heights, heights[-1]], where="post", color=colour, linewidth=width)
                labels.append((times[-1], heights[-1], "used on the device" if name == "used" else name, colour))
            axes.set(ylim=(0, None), ylabel="memory" if len(devices) == 1 else f"cuda:{device}")
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g} {unit}")
            axes.yaxis.set_major_locator(MaxNLocator(max(2, 6 // len(devices))))
            axes.margins(x=0)
            label_ends(axes, labels)
        panels[-1].set_xlabel(f"time since the start, {short}")
        add_badge(canvas, badge)
        used = f"All processes together use at most {units.byte_text(peaks['used'])} of a device."
        return Figure(canvas, words(canvas, used, f"{len(devices)} GPU{'s' * (len(devices) > 1)}, {len(samples)} samples.", badge))


# What they find


def _pinned_finding(gain: dict[int, float]) -> str:
    """The size from which pinned memory is ahead, and by how much at least."""
    if not gain:
        return "Not measured yet: pageable and pinned at one size"
    sizes = sorted(gain)
    last = gain[sizes[-1]]
    if last < 1 / SAME:
        return f"Pinned memory copies {1 / last:.1f} times slower at {units.byte_text(sizes[-1])}"
    if last < SAME:
        return f"Pinned memory makes no difference at {units.byte_text(sizes[-1])}"
    start = sizes[-1]  # from here up the gain is at least four fifths of the largest copy's
    for size in reversed(sizes):
        if gain[size] < 0.8 * last:
            break
        start = size
    least = min(gain[size] for size in sizes if size >= start)
    if start == sizes[-1]:
        return f"Pinned memory copies {last:.1f} times faster at {units.byte_text(start)}"
    return f"Pinned memory copies at least {_floor(least)} times faster from {units.byte_text(start)} up"


def _floor(factor: float) -> str:
    """One digit after the point, never more than the factor itself."""
    return f"{math.floor(factor * 10 + 1e-9) / 10:.1f}"


def _winner_finding(gain: dict[int, float]) -> str:
    """The widths at which the CPU wins."""
    if not gain:
        return "Not measured yet: CPU and GPU at one width"
    widths = sorted(gain)
    lost = [width for width in widths if gain[width] < 1]
    if not lost:
        return f"The GPU wins at every width; at {widths[-1]} it is {gain[widths[-1]]:.3g} times faster"
    if len(lost) == len(widths):
        return f"The CPU wins at every width up to {widths[-1]}"
    return f"The CPU wins up to a width of {max(lost)}; at {widths[-1]} the GPU is {gain[widths[-1]]:.3g} times faster"


def _speed_proof(result: Result | None, direction: str) -> str:
    if result is None or not (gain := pinned_gain(result, direction)):
        return ""
    largest = max(gain)
    pinned, pageable = (
        result.column("bytes_per_second", size=largest, memory=memory, direction=direction)[0] for memory in ("pinned", "pageable")
    )
    word = "from" if direction == "h2d" else "to"
    speeds = f"{units.rate_text(pinned)} {word} pinned, {units.rate_text(pageable)} {word} pageable memory"
    return told(result, f"{units.byte_text(largest)} copies at {speeds}.")


def _step_proof(result: Result | None) -> str:
    if result is None or not (gain := gpu_gain(result)):
        return ""
    ends = []
    for width in (min(gain), max(gain)):
        cpu, gpu = (result.column("seconds", width=width, device=device)[0] for device in ("cpu", "cuda"))
        ends.append(f"at a width of {width} a step takes {units.time_text(cpu)} on the CPU, {units.time_text(gpu)} on the GPU")
    return told(result, f"{'; '.join(ends)}.")


def told(result: Result, numbers: str) -> str:
    """The numbers as a sentence; a recording says that it is one."""
    return f"{result.badge[0].upper()}{result.badge[1:]}: {numbers}" if result.origin else f"{numbers[0].upper()}{numbers[1:]}"


# How they are drawn


def sources(result: Result, recorded: Result | None) -> list[tuple[Result, str]]:
    """The results to draw and their line styles."""
    return [(result, "-")] if recorded is None else [(recorded, "--"), (result, "-")]


def line(axes: Axes, x: Sequence[float], y: Sequence[float], colour: str, dashes: str, label: str) -> list[tuple]:
    if not x:
        return []
    axes.plot(x, y, dashes, color=colour, marker=MARKERS[colour], linewidth=2 if dashes == "-" else 1.4)
    return [(x[-1], y[-1], label, colour)]


def _predicted_speed(axes: Axes, result: Result, direction: str, prediction: float | None) -> str:
    """Draw the predicted speed of pinned memory as a hollow marker, and say it."""
    pageable = result.column("bytes_per_second", size=PREDICTED_SIZE, memory="pageable", direction=direction)
    if prediction is None or not pageable:
        return ""
    speed = prediction * pageable[0]
    axes.plot(
        [PREDICTED_SIZE], [speed], linestyle="", marker="o", markersize=11, markerfacecolor="none", markeredgecolor=BLUE, markeredgewidth=2
    )
    words = f"predicted: {prediction:g} times"
    behind = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}
    axes.annotate(words, (PREDICTED_SIZE, speed), (-11, 0), **BESIDE, ha="right", color=darker(BLUE), bbox=behind)
    return f"Predicted at {units.byte_text(PREDICTED_SIZE)}: {prediction:g} times faster."


def badges(result: Result, recorded: Result | None) -> str:
    return result.badge if recorded is None else f"{result.badge}  ·  dashed: {recorded.badge}"
