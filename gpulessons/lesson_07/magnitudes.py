"""A histogram of the sizes of gradients, with the range of float16."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes

from gputrace.figures.figure import BLUE, GREY, TEXT_POINTS, VERMILLION, Figure, new_canvas
from labkit import machine
from labkit.labs.figures import badged, in_style

ROUNDED_TO_ZERO = -25  # float16 rounds 2**-25, and what is smaller, to 0
NORMAL = -14  # smaller numbers have fewer digits
INFINITE = 16  # 2**16 is infinite in float16
NOTE = "#444444"
RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
TICKS = (-40, -32, ROUNDED_TO_ZERO, NORMAL, -8, 0, 8, INFINITE)


@in_style
def plot_magnitudes(numbers: Mapping[str, torch.Tensor]) -> Figure:
    """Draw a histogram of the sizes of each tensor's numbers, in powers of two.

    `numbers` has a tensor for each panel, by the panel's name. Zeros are left out. A red area marks
    sizes outside float16's range, and a grey area sizes that float16 holds with fewer digits.

    Raises ValueError for a tensor without a number other than 0.
    """
    found = {name: _nonzero(name, tensor) for name, tensor in numbers.items()}
    lost = {name: _lost(sizes) for name, sizes in found.items()}
    parts = [f"{lost[name]} {name}" for name in found]
    canvas, *panels = new_canvas(f"Become 0 in float16: {', '.join(parts)}", rows=len(found))
    panels[0].get_gridspec().update(top=0.81, right=0.97, hspace=0.45, left=0.1)
    powers = {name: _powers(sizes) for name, sizes in found.items()}
    low = min([ROUNDED_TO_ZERO, *(int(each.min()) for each in powers.values())]) - 3
    high = max([INFINITE, *(int(each.max()) for each in powers.values())]) + 5
    for axes, (name, each) in zip(panels, powers.items(), strict=True):
        axes.set_position(axes.get_subplotspec().get_position(canvas))
        axes.set_title(name, loc="left", fontsize=TEXT_POINTS)
        _draw(axes, each, low, high)
    panels[-1].set_xlabel("size of a gradient (a power of two)")
    sentences = [f"{name}: {_in_words(each)}" for name, each in powers.items()]
    return badged(canvas, machine.in_use().badge, *sentences)


def _nonzero(name: str, tensor: torch.Tensor) -> torch.Tensor:
    sizes = tensor.detach().flatten().float().abs()
    sizes = sizes[sizes > 0]
    if not len(sizes):
        raise ValueError(f"All numbers of {name!r} are 0. Give a tensor with other numbers.")
    return sizes


def _lost(sizes: torch.Tensor) -> str:
    """Return text with the share of the numbers that become 0 in float16."""
    share = (sizes.half() == 0).double().mean().item()
    if 0 < share < 0.01:
        return "less than 1%"
    return f"{share:.0%}"


def power_text(power: int) -> str:
    """Return a power of two with a raised exponent, such as 2⁻²⁵."""
    return f"2{str(power).translate(RAISED)}"


def _powers(sizes: torch.Tensor) -> np.ndarray:
    """Return the exponent of each number: p for sizes from 2**p to below 2**(p + 1)."""
    exponents = torch.frexp(sizes.cpu()).exponent
    return np.asarray(exponents.numpy()) - 1


def _draw(axes: Axes, powers: np.ndarray, low: int, high: int) -> None:
    places, counts = np.unique(powers, return_counts=True)
    look: dict[str, Any] = {"color": BLUE, "edgecolor": "white", "linewidth": 0.4}
    axes.bar(places, counts / len(powers), width=1.0, align="edge", **look)
    for left, right, colour, text in (
        (low, ROUNDED_TO_ZERO, VERMILLION, "becomes 0"),
        (ROUNDED_TO_ZERO, NORMAL, GREY, "fewer digits"),
        (INFINITE, high, VERMILLION, "infinite"),
    ):
        axes.axvspan(left, right, color=colour, alpha=0.18, linewidth=0, zorder=0)
        middle, above = (left + right) / 2, axes.get_xaxis_transform()
        place: dict[str, Any] = {"ha": "center", "va": "top", "transform": above}
        axes.text(middle, 0.97, text, fontsize=TEXT_POINTS, color=NOTE, **place)
    axes.set_xlim(low, high)
    axes.set_ylim(0, 1.35 * max(counts) / len(powers))
    ticks = [power for power in TICKS if low <= power <= high]
    axes.set_xticks(ticks, [power_text(power) for power in ticks])
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")


def _in_words(powers: np.ndarray) -> str:
    """Return a text with the smallest, the middle and the largest of these powers of two."""
    low, middle, high = (int(power) for power in np.percentile(powers, [0, 50, 100]))
    span = f"sizes from {power_text(low)} to {power_text(high + 1)}"
    return f"{span}, half of them below {power_text(middle + 1)}."
