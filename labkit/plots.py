"""Figures: one finding each, said in the title and in the alternative text. The only module that imports matplotlib.

Solid lines are this machine's (measured or virtual), dashed ones are recordings, hollow markers are predictions. The colours are
those of Okabe and Ito (https://jfly.uni-koeln.de/color/), which people with any form of colour blindness can tell apart.
"""

import base64
import io
import math
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from labkit.experiments import units
from labkit.experiments.copies import PREDICTED_SIZE, pinned_gain
from labkit.experiments.memory import MemorySample
from labkit.experiments.result import Result
from labkit.experiments.sizes import gpu_gain

BLACK, BLUE, VERMILLION = "#000000", "#0072B2", "#D55E00"
SIZE = (7.0, 4.0)  # inches, at most
DOTS_PER_INCH = 144
STYLE = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so figures look the same everywhere
    "font.size": 9.5,
    "figure.titlesize": 11,
    "figure.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "lines.linewidth": 2,
    "lines.markersize": 5,
}
MARKERS = {BLUE: "o", VERMILLION: "s"}
_TEXT = {"textcoords": "offset points", "va": "center", "annotation_clip": False}
SAME = 1.05  # factors closer to 1 than this are called equal


class Figure:
    """A finished picture: `png` holds its bytes, `alt` says in words what it shows, `title` is its finding.

    A notebook's output shows the picture, and under it the words, folded: JupyterLab gives pictures no alternative text.
    """

    def __init__(self, canvas: Canvas, alt: str) -> None:
        self.title = canvas.get_suptitle()
        self.alt = alt
        picture = io.BytesIO()
        canvas.savefig(picture, format="png", dpi=DOTS_PER_INCH, metadata={"Software": None, "Description": alt})
        self.png = picture.getvalue()
        self.width = round(canvas.get_figwidth() * 96)  # CSS pixels: 96 an inch

    @property
    def html(self) -> str:
        """An `<img>` element that holds picture and alternative text."""
        picture = base64.b64encode(self.png).decode()
        style = "max-width: 100%; height: auto; background: white"
        return f'<img src="data:image/png;base64,{picture}" alt="{escape(self.alt)}" width="{self.width}" style="{style}">'

    def __repr__(self) -> str:
        return self.alt

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict, dict]:
        picture = base64.b64encode(self.png).decode()
        return {"image/png": picture, "text/plain": self.alt}, {"image/png": {"alt": self.alt, "width": self.width}}

    def _ipython_display_(self) -> None:
        from IPython.display import display

        data, metadata = self._repr_mimebundle_()
        display(data, metadata=metadata, raw=True)
        words = f"<details><summary>The figure in words</summary>{escape(self.alt)}</details>"
        display({"text/html": words, "text/plain": "(the figure in words)"}, raw=True)


# The figures


def copy_speed(result: Result, recorded: Result | None = None, prediction: float | None = None, *, direction: str = "h2d") -> Figure:
    """Copy speed by size, pageable and pinned, in one direction: "h2d" (host to device) or "d2h".

    `prediction` says how many times faster pinned memory copies 16 MiB; it is drawn above the pageable speed measured there.
    """
    if direction not in ("h2d", "d2h"):
        raise ValueError(f'direction={direction!r}: choose "h2d", host to device, or "d2h", device to host')
    with matplotlib.rc_context(STYLE):
        canvas, axes = _canvas(_pinned_finding(pinned_gain(result, direction)))
        labels = []
        for source, dashes in _sources(result, recorded):
            for memory, colour in (("pinned", BLUE), ("pageable", VERMILLION)):
                sizes = source.column("size", memory=memory, direction=direction)
                speeds = source.column("bytes_per_second", memory=memory, direction=direction)
                label = memory if source is result else f"{memory}, recorded"
                labels += _line(axes, sizes, speeds, colour, dashes, label)
        sentence = _predicted_speed(axes, result, direction, prediction)
        way = "host to device" if direction == "h2d" else "device to host"
        _binary_scale(axes, f"bytes copied, {way}", units.byte_text, most=7)
        _decimal_scale(axes, "copy speed", units.rate_text)
        _label_ends(axes, labels)
        _badge(canvas, result, recorded)
        return Figure(canvas, _words(canvas, _speed_proof(result, direction), sentence, _speed_proof(recorded, direction), result.badge))


def host_and_device(result: Result, recorded: Result | None = None) -> Figure:
    """Seconds of one training step on CPU and GPU, by the width of the network."""
    with matplotlib.rc_context(STYLE):
        canvas, axes = _canvas(_winner_finding(gpu_gain(result)))
        labels = []
        for source, dashes in _sources(result, recorded):
            for device, name, colour in (("cpu", "CPU", VERMILLION), ("cuda", "GPU", BLUE)):
                label = name if source is result else f"{name}, recorded"
                widths, seconds = source.column("width", device=device), source.column("seconds", device=device)
                labels += _line(axes, widths, seconds, colour, dashes, label)
        _binary_scale(axes, "width of the network, in neurons", lambda width: f"{width:g}", most=10)
        _decimal_scale(axes, "time of one training step", units.time_text)
        _label_ends(axes, labels)
        _badge(canvas, result, recorded)
        return Figure(canvas, _words(canvas, _step_proof(result), _step_proof(recorded), result.badge))


def memory_over_time(samples: Sequence[MemorySample], badge: str) -> Figure:
    """Bytes allocated, reserved and used on each GPU over time, one panel a GPU. Raises ValueError without samples."""
    if not samples:
        raise ValueError("no samples of memory to draw: nothing was recorded")
    devices = sorted({sample.device for sample in samples})
    peaks = {name: max(getattr(sample, name) for sample in samples) for name in ("allocated", "reserved", "used")}
    size, unit = units.byte_unit(peaks["used"])
    end = max(sample.seconds for sample in samples)
    period, short = next(((p, s) for p, s in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")) if end >= p), (1e-6, "µs"))
    finding = f"Allocated memory peaks at {units.byte_text(peaks['allocated'])}, reserved memory at {units.byte_text(peaks['reserved'])}"
    with matplotlib.rc_context(STYLE):
        canvas, *panels = _canvas(finding, rows=len(devices))
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
            _label_ends(axes, labels)
        panels[-1].set_xlabel(f"time since the start, {short}")
        _badge(canvas, None, None, badge)
        used = f"All processes together use at most {units.byte_text(peaks['used'])} of a device."
        return Figure(canvas, _words(canvas, used, f"{len(devices)} GPU{'s' * (len(devices) > 1)}, {len(samples)} samples.", badge))


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
    return _told(result, f"{units.byte_text(largest)} copies at {speeds}.")


def _step_proof(result: Result | None) -> str:
    if result is None or not (gain := gpu_gain(result)):
        return ""
    ends = []
    for width in (min(gain), max(gain)):
        cpu, gpu = (result.column("seconds", width=width, device=device)[0] for device in ("cpu", "cuda"))
        ends.append(f"at a width of {width} a step takes {units.time_text(cpu)} on the CPU, {units.time_text(gpu)} on the GPU")
    return _told(result, f"{'; '.join(ends)}.")


def _told(result: Result, numbers: str) -> str:
    """The numbers as a sentence; a recording says that it is one."""
    return f"{result.badge[0].upper()}{result.badge[1:]}: {numbers}" if result.origin else f"{numbers[0].upper()}{numbers[1:]}"


def _words(canvas: Canvas, *sentences: str) -> str:
    """The alternative text: the finding, then the numbers that prove it."""
    parts = [canvas.get_suptitle(), *(sentence for sentence in sentences if sentence)]
    return " ".join(part if part.endswith(".") else f"{part}." for part in (p[0].upper() + p[1:] for p in parts))


# How they are drawn


def _canvas(title: str, rows: int = 1) -> list[Any]:
    """A white figure with the finding above its axes, and the axes, one below the other."""
    canvas = Canvas(figsize=SIZE, facecolor="white")
    # Room for ticks with units on the left, for the names of the lines on the right, for the badge below.
    margins = {"left": 0.14, "right": 0.78, "bottom": 0.19, "top": 0.89, "hspace": 0.25}
    axes = canvas.subplots(rows, 1, sharex=True, squeeze=False, gridspec_kw=margins)[:, 0]
    canvas.suptitle(title, x=0.02, y=0.975, ha="left", va="top")
    return [canvas, *axes]


def _sources(result: Result, recorded: Result | None) -> list[tuple[Result, str]]:
    """The results to draw and their line styles."""
    return [(result, "-")] if recorded is None else [(recorded, "--"), (result, "-")]


def _line(axes: Axes, x: Sequence[float], y: Sequence[float], colour: str, dashes: str, label: str) -> list[tuple]:
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
    axes.annotate(words, (PREDICTED_SIZE, speed), (-11, 0), **_TEXT, ha="right", color=_darker(BLUE), bbox=behind)
    return f"Predicted at {units.byte_text(PREDICTED_SIZE)}: {prediction:g} times faster."


def _binary_scale(axes: Axes, label: str, text: Callable[[float], str], most: int) -> None:
    """A logarithmic x axis with ticks at powers of two, at most `most` of them: 4 KiB, 64 KiB, 1 MiB."""
    axes.set_xscale("log", base=2)
    low, high = (math.log2(limit) for limit in axes.get_xlim())
    for every in (1, 2, 4, 8, 16):
        powers = range(every * math.ceil(low / every), math.floor(high) + 1, every)
        if len(powers) <= most:
            break
    axes.set_xticks([2**power for power in powers], [text(2**power) for power in powers])
    axes.set_xlabel(label)


def _decimal_scale(axes: Axes, label: str, text: Callable[[float], str]) -> None:
    """A logarithmic y axis with ticks at powers of ten, and at 2 and 5 times them where it spans fewer than three."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    subs = (1.0,) if high / low > 1000 else (1.0, 2.0, 5.0)
    axes.yaxis.set_major_locator(LogLocator(subs=subs))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(lambda value, _: text(value))
    axes.set_ylabel(label)


def _label_ends(axes: Axes, labels: list[tuple[float, float, str, str]]) -> None:
    """Names at the right ends of the lines, moved apart where they would overlap."""
    least = 13 * axes.figure.dpi / 72  # pixels between two lines of text
    placed: list[float] = []
    for x, y, text, colour in sorted(labels, key=lambda label: label[1]):
        pixel = axes.transData.transform((x, y))[1]
        height = max(pixel, placed[-1] + least) if placed else pixel
        placed.append(height)
        shift = (height - pixel) * 72 / axes.figure.dpi
        axes.annotate(text, (x, y), (9, shift), **_TEXT, color=_darker(colour))


def _darker(colour: str) -> tuple[float, float, float]:
    """The colour for text: dark enough on white."""
    red, green, blue = to_rgb(colour)
    return 0.75 * red, 0.75 * green, 0.75 * blue


def _badge(canvas: Canvas, result: Result | None, recorded: Result | None, badge: str = "") -> None:
    """Where the numbers come from, in the lower right corner."""
    text = badge or result.badge
    if recorded is not None:
        text += f"  ·  dashed: {recorded.badge}"
    canvas.text(0.98, 0.03, text, ha="right", fontsize=9, color="#444444", style="italic")
