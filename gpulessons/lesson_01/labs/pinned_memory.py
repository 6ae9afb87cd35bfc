"""Measure and draw the speed of copies between host and device, from pageable and pinned memory."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from matplotlib.axes import Axes

from gputrace import units
from gputrace.figures.figure import (
    BESIDE,
    BLUE,
    VERMILLION,
    Figure,
    binary_scale,
    darker,
    decimal_scale,
    label_ends,
    new_canvas,
)
from labkit.labs.experiment import Result, Row, Run, badge, checked_count, checked_sizes
from labkit.labs.figures import SAME, add_line, finished, hollow, in_style, sources
from labkit.labs.panel import ExperimentPanel
from labkit.labs.predictions import compared_as_factor, stays_open

KIB, MIB = 1 << 10, 1 << 20
SIZES = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 128 * MIB)
LARGEST = 1 << 30
PREDICTED_SIZE = 16 * MIB  # the size for which learners predict the factor
COLUMNS = {
    "size": "bytes",
    "memory": "",
    "direction": "",
    "seconds": "seconds",
    "bytes_per_second": "bytes per second",
}


def copy_speed(sizes: Sequence[int] = SIZES, repeats: int = 5) -> Run:
    """Measure the time of copies between the host and the current GPU.

    `sizes` are in bytes. The seconds of a copy are the median of `repeats` copies after a warm-up.
    Each row has a `memory`, "pageable" or "pinned" (page-locked, copied with `non_blocking=True`),
    and a `direction`, "h2d" (host to device) or "d2h" (device to host). Host and device each need
    memory for the largest size.

    Raises ValueError for sizes outside 1 byte to 1 GiB, and RuntimeError if no GPU is in use.
    """
    sizes = checked_sizes("sizes", sizes, LARGEST)
    repeats = checked_count("repeats", repeats)
    parameters = {"sizes": sizes, "repeats": repeats}
    rows = _points(sizes, repeats)
    return Run("copy_speed", parameters, COLUMNS, badge(), 4 * len(sizes), rows)


def pinned_gain(result: Result, direction: str = "h2d") -> dict[int, float]:
    """Return, for each size, the factor by which pinned memory copies faster than pageable memory.

    Sizes are in bytes. A size for which only one of the two was measured is left out.
    """
    pinned, pageable = (
        result.by("size", "bytes_per_second", memory=memory, direction=direction)
        for memory in ("pinned", "pageable")
    )
    return {size: speed / pageable[size] for size, speed in pinned.items() if size in pageable}


def _points(sizes: Sequence[int], repeats: int) -> Iterator[Row]:
    for size in sizes:
        device = torch.empty(size, dtype=torch.uint8, device="cuda")
        for memory in ("pageable", "pinned"):
            pinned = memory == "pinned"
            # Write the tensor: the operating system provides its pages only when they are touched.
            host = torch.empty(size, dtype=torch.uint8, pin_memory=pinned).fill_(1)
            for direction, target, source in (("h2d", device, host), ("d2h", host, device)):
                copy = partial(target.copy_, source, non_blocking=pinned)
                seconds = _event_seconds(copy, repeats)
                yield {
                    "size": size,
                    "memory": memory,
                    "direction": direction,
                    "seconds": seconds,
                    "bytes_per_second": size / seconds,
                }
            del host, target, source  # Free this host memory before the next is allocated.


def _event_seconds(copy: Callable[[], object], repeats: int) -> float:
    """Return the median of the seconds between two CUDA events around a copy, after a warm-up."""
    times = []
    for _ in range(1 + repeats):
        before = torch.cuda.Event(enable_timing=True)
        after = torch.cuda.Event(enable_timing=True)
        before.record()
        copy()
        after.record()
        torch.cuda.synchronize()
        times.append(before.elapsed_time(after) / 1e3)
    return median(times[1:])


# The figure


@in_style
def plot_copy_speed(
    result: Result, recorded: Result | None = None, prediction: float | None = None
) -> Figure:
    """Draw the speed of copies from host to device by size, for pageable and pinned memory.

    `prediction` is the factor by which pinned memory copies 16 MiB faster. The figure has a marker
    at the speed that this factor predicts from the pageable speed.
    """
    largest = max(result.parameters.get("sizes", ()), default=0)
    canvas, axes = new_canvas(_finding(pinned_gain(result), largest))
    labels = []
    for source, dashes in sources(result, recorded):
        for memory, colour in (("pinned", BLUE), ("pageable", VERMILLION)):
            sizes = source.column("size", memory=memory, direction="h2d")
            speeds = source.column("bytes_per_second", memory=memory, direction="h2d")
            label = memory
            if source is not result:
                label = f"{memory}, recorded"
            labels += add_line(axes, sizes, speeds, colour, dashes, label)
    sentence = _predicted(axes, result, prediction)
    binary_scale(axes, "bytes copied, host to device", units.byte_text, most=7)
    decimal_scale(axes, "copy speed", units.rate_text)
    label_ends(axes, labels)
    return finished(canvas, result, recorded, _proof, sentence)


def _finding(gain: dict[int, float], largest: int) -> str:
    """Return a title that says from which size on pinned memory is faster, and by how much.

    `gain` has the factor for each size. `largest` is the largest size of the experiment, which a
    stopped run did not reach.
    """
    if not gain:
        return "Not measured yet: no size has both kinds of memory"
    sizes = sorted(gain)
    last = gain[sizes[-1]]
    if last < 1 / SAME:
        return f"Pinned memory copies {1 / last:.1f} times slower at {units.byte_text(sizes[-1])}"
    if last < SAME:
        return f"Pinned memory makes no difference at {units.byte_text(sizes[-1])}"
    start = sizes[-1]  # From this size up, the gain is at least 80% of the largest copy's gain.
    for size in reversed(sizes):
        if gain[size] < 0.8 * last:
            break
        start = size
    least = min(gain[size] for size in sizes if size >= start)
    if start == sizes[-1]:
        return f"Pinned memory copies {last:.1f} times faster at {units.byte_text(start)}"
    end = "up"
    if sizes[-1] < largest:
        end = f"to {units.byte_text(sizes[-1])}"
    return (
        f"Pinned memory copies at least {_floor(least)} times faster "
        f"from {units.byte_text(start)} {end}"
    )


def _floor(factor: float) -> str:
    """Round a factor down to one decimal place."""
    return f"{math.floor(factor * 10 + 1e-9) / 10:.1f}"


def _proof(result: Result) -> str:
    gain = pinned_gain(result)
    if not gain:
        return ""
    largest = max(gain)
    pinned, pageable = (
        result.column("bytes_per_second", size=largest, memory=memory, direction="h2d")[0]
        for memory in ("pinned", "pageable")
    )
    speeds = (
        f"{units.rate_text(pinned)} from pinned, {units.rate_text(pageable)} from pageable memory"
    )
    return f"{units.byte_text(largest)} copies at {speeds}."


def _predicted(axes: Axes, result: Result, prediction: float | None) -> str:
    """Draw the predicted speed of pinned memory as a hollow marker. Return a sentence about it.

    `prediction` is the factor between the pinned and the pageable speed, or None.
    """
    pageable = result.column(
        "bytes_per_second", size=PREDICTED_SIZE, memory="pageable", direction="h2d"
    )
    if prediction is None or not pageable:
        return ""
    speed = prediction * pageable[0]
    axes.plot([PREDICTED_SIZE], [speed], marker="o", **hollow(BLUE))
    words = f"predicted: {prediction:g} times"
    behind: Any = dict(boxstyle="round,pad=0.15", facecolor="white", edgecolor="none", alpha=0.85)
    style: Any = {**BESIDE, "ha": "right", "color": darker(BLUE), "bbox": behind}
    axes.annotate(words, (PREDICTED_SIZE, speed), (-11, 0), **style)
    return f"Predicted at {units.byte_text(PREDICTED_SIZE)}: {prediction:g} times faster."


# The widget


GOOD = 1.15  # A prediction within this factor is called good.


class CopySpeedLab(ExperimentPanel):
    """Lab in which learners predict, then measure how much faster pinned memory copies.

    `sizes` and `repeats` are those of `copy_speed`. The question is about a copy of 16 MiB, or, if
    that is not among the sizes, about the largest size. Raises ValueError without a size.
    """

    unit = "times"

    def __init__(self, sizes: Sequence[int] = SIZES, repeats: int = 5) -> None:
        if not sizes:
            raise ValueError(
                "expected at least one size in bytes, such as sizes=[1 << 20], got none"
            )
        self.sizes, self.repeats = sizes, repeats
        if PREDICTED_SIZE in sizes:
            self.asked = PREDICTED_SIZE
        else:
            self.asked = max(sizes)
        size = units.byte_text(self.asked)
        self.question = (
            f"How many times faster is it to copy {size} to the GPU "
            "from pinned than from pageable memory?"
        )
        super().__init__()

    def experiment(self) -> Run:
        return copy_speed(self.sizes, self.repeats)

    def point(self, row: dict[str, Any]) -> str:
        size, seconds = units.byte_text(row["size"]), units.time_text(row["seconds"])
        way = "to the GPU" if row["direction"] == "h2d" else "to the host"
        return f"{size}, {row['memory']}, {way}: {seconds}"

    def draw(self, result: Result, prediction: float | None) -> Figure:
        return plot_copy_speed(result, result.recorded(), prediction)

    def verdict(self, result: Result, prediction: float) -> str:
        gain = pinned_gain(result).get(self.asked)
        size = units.byte_text(self.asked)
        if gain is None:
            return stays_open(f"Copies of {size} were not measured", prediction)
        was = (
            f"From pinned memory {size} were copied {gain:.1f} times faster; "
            f"you predicted {prediction:g}"
        )
        return compared_as_factor(was, prediction, gain, GOOD)
