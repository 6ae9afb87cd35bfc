"""What all figures share: paper, colours, scales, badge and words.

The colours are those of Okabe and Ito (https://jfly.uni-koeln.de/color/). People with any form of
colour blindness can tell them apart.
"""

import base64
import io
import math
from collections.abc import Callable
from functools import cached_property, lru_cache
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure as Canvas
from matplotlib.font_manager import FontProperties, findfont
from matplotlib.ft2font import FT2Font
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from gputrace import units

BLACK, BLUE, VERMILLION = "#000000", "#0072B2", "#D55E00"
SKY_BLUE, ORANGE, GREEN, YELLOW, GREY = "#56B4E9", "#E69F00", "#009E73", "#F0E442", "#C8C8C8"
PURPLE = "#CC79A7"
# The order is that of a stack, from bottom to top: first what stays during a step, then what comes
# and goes. Neighbours also differ in lightness or in hatching.
CATEGORY_COLOURS = {
    "parameters": BLUE,
    "optimizer state": SKY_BLUE,
    "workspace": GREEN,
    "gradients": VERMILLION,
    "in flight": YELLOW,
    "activations": ORANGE,
    "other": GREY,
}
CATEGORY_HATCHES = {"optimizer state": "....", "gradients": "////", "in flight": "\\\\\\\\"}
SIZE = (7.0, 4.0)  # inches, at most
DOTS_PER_INCH = 144
FONT = "DejaVu Sans"
TITLE_POINTS, TEXT_POINTS = 11, 9
APART = 5  # points. A name that is farther from the end of its line gets a leader line.
STYLE: dict[Any, Any] = {
    "font.family": FONT,  # it comes with matplotlib, so figures look the same everywhere
    "font.size": 9.5,
    "figure.titlesize": TITLE_POINTS,
    "figure.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "hatch.linewidth": 0.5,
    "text.parse_math": False,  # so that a dollar sign remains one
    "lines.linewidth": 2,
    "lines.markersize": 5,
}
BESIDE: dict[str, Any] = {"textcoords": "offset points", "va": "center", "annotation_clip": False}
# JupyterLab shows a picture without its alternative text
# (https://github.com/jupyter/enhancement-proposals/issues/120), so a screen reader would find an
# image without a name. This script gives each such picture the words that are folded below it.
# Where scripts do not run, the words are still there.
NAME_PICTURES = """<script>
for (const words of document.querySelectorAll("details.labkit-words")) {
  const before = node => words.compareDocumentPosition(node) & Node.DOCUMENT_POSITION_PRECEDING;
  const picture = [...document.images].filter(before).at(-1);
  if (picture && !picture.alt) picture.alt = words.lastChild.textContent;
}
</script>"""
# In JupyterLab's dark theme, pictures are inverted and their hues are kept, as on a trace's page.
IN_THE_DARK = "{ filter: invert(.91) hue-rotate(180deg) }"
DARKEN_PICTURES = (
    "<style>[data-jp-theme-light=false] "
    f".jp-OutputArea-child:has(+ .jp-OutputArea-child .labkit-words) img {IN_THE_DARK}</style>"
)


class Figure:
    """Picture with a description in words. A notebook shows the picture and the folded description.

    Attributes:
        title: the finding of the figure, which is its first line.
        alt: a description of what the figure shows, which is also its alternative text.
        width: the width in CSS pixels.
    """

    def __init__(self, canvas: Canvas, alt: str) -> None:
        self.title = _finding(canvas)
        self.alt = alt
        self.width = round(canvas.get_figwidth() * 96)  # 96 CSS pixels per inch
        self._canvas = canvas

    @cached_property
    def png(self) -> bytes:
        """The bytes of the PNG picture, which is drawn when this is first read."""
        picture = io.BytesIO()
        metadata = {"Software": None, "Description": self.alt}
        with matplotlib.rc_context(STYLE):
            self._canvas.savefig(picture, format="png", dpi=DOTS_PER_INCH, metadata=metadata)
        return picture.getvalue()

    @property
    def html(self) -> str:
        """An `<img>` element with the picture and its alternative text."""
        picture = base64.b64encode(self.png).decode()
        style = "max-width: 100%; height: auto; background: white"
        source = f'src="data:image/png;base64,{picture}"'
        return f'<img {source} alt="{escape(self.alt)}" width="{self.width}" style="{style}">'

    def save(self, path: str | Path) -> None:
        """Write the picture to a PNG file.

        Raises:
            ValueError: the name does not end in .png.
            OSError: the file cannot be written.
        """
        if Path(path).suffix.lower() != ".png":
            raise ValueError(
                f"path={str(path)!r}: expected a name that ends in .png, such as 'memory.png', "
                "because figures are saved as PNG"
            )
        Path(path).write_bytes(self.png)

    def __repr__(self) -> str:
        return self.alt

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict, dict]:
        picture = base64.b64encode(self.png).decode()
        metadata = {"image/png": {"alt": self.alt, "width": self.width}}
        return {"image/png": picture, "text/plain": self.alt}, metadata

    def _ipython_display_(self) -> None:
        from IPython.display import display

        data, metadata = self._repr_mimebundle_()
        display(data, metadata=metadata, raw=True)
        folded = f"<summary>The figure in words</summary>{escape(self.alt)}"
        words = f'<details class="labkit-words">{folded}</details>'
        html = words + NAME_PICTURES + DARKEN_PICTURES
        display({"text/html": html, "text/plain": "(the figure in words)"}, raw=True)


def words(canvas: Canvas, *sentences: str) -> str:
    """Return a figure's alternative text: its title, then sentences with its numbers."""
    parts = []
    for part in (_finding(canvas), *sentences):
        if part:
            capitalized = part[0].upper() + part[1:]
            parts.append(capitalized if part.endswith(".") else f"{capitalized}.")
    return " ".join(parts)


def _finding(canvas: Canvas) -> str:
    """Return a figure's title as it was given, with the characters that the font lacks."""
    return str(canvas.get_label() or canvas.get_suptitle())


def new_canvas(title: str, rows: int = 1) -> list[Any]:
    """Return a white figure with a title, and a list of its axes.

    There are `rows` axes, one below the other.
    """
    canvas = Canvas(figsize=SIZE, facecolor="white")
    # Space for ticks with units on the left, names of lines on the right, and the badge below.
    margins = {"left": 0.14, "right": 0.78, "bottom": 0.19, "top": 0.89, "hspace": 0.25}
    axes = canvas.subplots(rows, 1, sharex=True, squeeze=False, gridspec_kw=margins)[:, 0]
    add_title(canvas, title)
    return [canvas, *axes]


def add_title(canvas: Canvas, title: str) -> None:
    """Write the title, in smaller letters if it is long, and cut it if even those do not fit."""
    canvas.set_label(title)
    room = 0.94 * 72 * canvas.get_figwidth()  # not 0.98, because drawn text may be 3% wider
    width = text_width(title, TITLE_POINTS, bold=True)
    points = min(max(TITLE_POINTS * room / width, TEXT_POINTS), TITLE_POINTS)
    text = shortened(title, 1.0001 * room, points, bold=True)
    look: dict[str, Any] = {"ha": "left", "va": "top", "fontsize": points, "parse_math": False}
    canvas.suptitle(text, x=0.02, y=0.975, **look)


def binary_scale(axes: Axes, label: str, text: Callable[[float], str], most: int) -> None:
    """Make the x axis logarithmic, with at most `most` ticks at powers of two.

    `label` is the label of the axis, and `text` writes the value at a tick.
    """
    axes.set_xscale("log", base=2)
    low, high = (math.log2(limit) for limit in axes.get_xlim())
    for every in (1, 2, 4, 8, 16):
        powers = range(every * math.ceil(low / every), math.floor(high) + 1, every)
        if len(powers) <= most:
            break
    axes.set_xticks([2**power for power in powers], [text(2**power) for power in powers])
    axes.set_xlabel(label)


def decimal_scale(axes: Axes, label: str, text: Callable[[float], str]) -> None:
    """Make the y axis logarithmic, with ticks at powers of ten.

    If it spans fewer than three powers, there are also ticks at 2 and 5 times them. `label` is the
    label of the axis, and `text` writes the value at a tick.
    """
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    subs = (1.0,) if high / low > 1000 else (1.0, 2.0, 5.0)
    axes.yaxis.set_major_locator(LogLocator(subs=subs))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(lambda value, _: text(value))
    axes.set_ylabel(label)


def label_ends(axes: Axes, labels: list[tuple[float, float, str, str]]) -> None:
    """Write names at the right ends of lines, each as (x, y, name, colour of the line).

    Names that would overlap are moved apart. A thin line leads to a name that was moved.
    """
    ends = sorted(labels, key=lambda label: label[1])
    pixels = [axes.transData.transform((x, y)) for x, y, _, _ in ends]
    heights = _apart([height for _, height in pixels], axes)
    point = axes.figure.dpi / 72
    for (x, y, text, colour), (left, pixel), height in zip(ends, pixels, heights, strict=True):
        shift = (height - pixel) / point
        axes.annotate(text, (x, y), (9, shift), **BESIDE, color=darker(colour))
        if abs(shift) > APART:
            whole = axes.figure.transFigure
            ends_of_leader = [(left + 2 * point, pixel), (left + 8 * point, height)]
            places = whole.inverted().transform(ends_of_leader)
            axes.figure.add_artist(Line2D(*places.T, color=colour, linewidth=0.8, transform=whole))


def _apart(pixels: list[float], axes: Axes) -> list[float]:
    """Return heights for texts in rising order, in pixels, so that the texts do not overlap.

    `pixels` are the preferred heights. If the highest text would be above the axes, the texts are
    moved down.
    """
    # In some versions of matplotlib, the boxes of text are 19 pixels high.
    least = 14 * axes.figure.dpi / 72
    heights: list[float] = []
    for pixel in pixels:
        heights.append(max(pixel, heights[-1] + least) if heights else pixel)
    highest = max([axes.bbox.y1, *pixels])
    for index in reversed(range(len(heights))):
        heights[index] = min(heights[index], highest)
        highest = heights[index] - least
    return heights


def darker(colour: str) -> tuple[float, float, float]:
    """Return a darker variant of a colour, for text on white."""
    red, green, blue = to_rgb(colour)
    return 0.75 * red, 0.75 * green, 0.75 * blue


def add_badge(canvas: Canvas, badge: str) -> None:
    """Write the origin of the numbers, such as the GPU, in the lower right corner."""
    badge = shortened(badge, 0.95 * 72 * canvas.get_figwidth())
    canvas.text(0.98, 0.03, badge, ha="right", fontsize=9, color="#444444", style="italic")


def byte_ticks(axes: Axes, top: float, most: int, zero: bool = True) -> None:
    """Set ticks on a linear y axis from 0 to `top` bytes, at round numbers of a binary unit.

    There are at most `most` ticks. With `zero=False`, there is no tick at 0.
    """
    size, unit = units.byte_unit(top)
    axes.set_ylim(0, top)
    ticks = []
    for tick in MaxNLocator(most, integer=size == 1).tick_values(0, top / size):
        if 0 <= tick <= top / size and (tick or zero):
            ticks.append(tick)
    labels = ["0" if tick == 0 else f"{tick:g} {unit}" for tick in ticks]
    axes.set_yticks([tick * size for tick in ticks], labels)


def binary_ticks(axes: Axes, end: float, most: int = 8) -> None:
    """Set ticks on a linear x axis from 0 to `end` bytes, at multiples of a power of two.

    There are at most `most` ticks.
    """
    step = 2 ** math.ceil(math.log2(end / most))
    ticks = [step * index for index in range(int(end / step) + 1)]
    axes.set_xticks(ticks, [units.byte_text(tick) if tick else "0" for tick in ticks])


def time_ticks(axes: Axes, end: float, start: float = 0.0) -> None:
    """Set ticks on a linear x axis from `start` to `end` seconds, at round numbers of a unit."""
    period, short = units.time_unit(end)
    axes.set_xlim(start, end)
    ticks = []
    for tick in MaxNLocator(6).tick_values(start / period, end / period):
        if start <= tick * period <= end:
            ticks.append(tick)
    axes.set_xticks([tick * period for tick in ticks], [f"{tick:g}" for tick in ticks])
    axes.set_xlabel(f"time since the start, {short}")


# Text that a learner has written

_UNIT = 100  # points, the size at which characters are measured


def text_width(text: str, points: float = TEXT_POINTS, bold: bool = False) -> float:
    """Return the width of a text in points (1/72 inch)."""
    return points * sum(_width(char, bold) for char in drawable(text))


@lru_cache(maxsize=4096)
def _width(char: str, bold: bool) -> float:
    """Return the width of a character, relative to the font size."""
    return float(_font(bold).load_char(ord(char)).linearHoriAdvance) / 65536 / _UNIT


@lru_cache
def _font(bold: bool) -> FT2Font:
    """Load the font of the figures, in its regular or its bold weight."""
    weight = "bold" if bold else "normal"
    font = FT2Font(findfont(FontProperties(family=FONT, weight=weight)))
    font.set_size(_UNIT, 72)
    return font


def shortened(text: str, width: float, points: float = TEXT_POINTS, bold: bool = False) -> str:
    """Cut a text so that it fits a width in points. An ellipsis replaces the rest."""
    text = drawable(text)
    if text_width(text, points, bold) <= width:
        return text
    fits, too_long = 0, len(text)
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if text_width(text[:middle] + "…", points, bold) <= width:
            fits = middle
        else:
            too_long = middle
    return text[:fits].rstrip() + "…"


def drawable(text: str) -> str:
    """Return a text on one line, with a box for each character that the font does not have."""
    line = " ".join(text.splitlines()).replace("\t", " ")
    return "".join(char if _has_glyph(char) else "□" for char in line)


@lru_cache(maxsize=4096)
def _has_glyph(char: str) -> bool:
    """Return whether both the regular and the bold font have a character."""
    return all(_font(bold).get_char_index(ord(char)) for bold in (False, True))
