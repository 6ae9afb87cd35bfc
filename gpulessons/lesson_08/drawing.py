"""A drawing of a block of GPU memory that two processes share, at several moments."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.patches import FancyArrowPatch, Rectangle

from gputrace import units
from gputrace.figures.figure import BLACK, BLUE, TEXT_POINTS, VERMILLION, Figure, add_title
from labkit import machine
from labkit.labs.figures import badged, in_style

WIDTH, TOP, ROW, BOTTOM = 504, 66, 52, 26  # points
MOMENT, PRODUCER, BLOCK, COUNT, CONSUMER = 12, 150, 215, 335, 450  # where the columns begin
BLOCK_WIDTH, BLOCK_HEIGHT = 90, 26
IN_USE, STUCK = "cannot be freed", "not freed yet"


@dataclass(frozen=True)
class Moment:
    """One moment of the story: which process has a tensor in the block, and P1's allocated bytes.

    P1 is the producer. The reference count is 1 if P2 has a tensor, and 0 otherwise.
    """

    name: str
    held_here: bool
    held_there: bool
    allocated: int

    @property
    def stuck(self) -> bool:
        """Whether the block is allocated although neither process has a tensor in it."""
        return self.allocated > 0 and not self.held_here and not self.held_there


@in_style
def plot_block(moments: Sequence[Moment]) -> Figure:
    """Draw the block, its reference count and who has a tensor in it, with a row for each moment.

    Raises ValueError if there is no moment.
    """
    if not moments:
        raise ValueError("There is nothing to draw. Give at least one moment.")
    height = TOP + ROW * len(moments) + BOTTOM
    canvas = Canvas(figsize=(WIDTH / 72, height / 72), facecolor="white")
    span: dict[str, Any] = {"xlim": (0, WIDTH), "ylim": (height, 0)}
    axes = canvas.add_axes((0, 0, 1, 1), frame_on=False, xticks=[], yticks=[], **span)
    axes.grid(False)
    add_title(canvas, _finding(moments))
    headings = {PRODUCER: "P1", BLOCK: "block", COUNT: "count", CONSUMER: "P2"}
    for place, heading in headings.items():
        axes.text(place, TOP - 12, heading, fontweight="bold", fontsize=TEXT_POINTS)
    for index, moment in enumerate(moments):
        _draw(axes, moment, TOP + index * ROW)
    return badged(canvas, machine.in_use().badge, *(_in_words(moment) for moment in moments))


def _finding(moments: Sequence[Moment]) -> str:
    stuck = [moment for moment in moments if moment.stuck]
    if not stuck:
        return "The block is free as soon as nobody uses it"
    size = units.byte_text(stuck[0].allocated)
    return f"{stuck[0].name}: nobody uses the block, and {size} stay allocated"


def _draw(axes: Axes, moment: Moment, top: float) -> None:
    middle = top + BLOCK_HEIGHT / 2
    beside: dict[str, Any] = {"va": "center", "fontsize": TEXT_POINTS}
    axes.text(MOMENT, middle, moment.name, **beside)
    if moment.held_here:
        axes.text(PRODUCER, middle, "data", **beside)
        _draw_arrow(axes, PRODUCER + 30, BLOCK, middle)
    if not moment.allocated:
        axes.text(BLOCK + BLOCK_WIDTH / 2, middle, "free", ha="center", **beside)
        return
    colour = VERMILLION if moment.stuck else BLUE
    look: dict[str, Any] = {"facecolor": colour, "edgecolor": BLACK, "linewidth": 0.8}
    axes.add_patch(Rectangle((BLOCK, top), BLOCK_WIDTH, BLOCK_HEIGHT, **look))
    size = units.byte_text(moment.allocated)
    axes.text(BLOCK + BLOCK_WIDTH / 2, middle, size, ha="center", color="white", **beside)
    if not moment.held_here:
        below: dict[str, Any] = {"va": "top", "ha": "center", "fontsize": TEXT_POINTS}
        why = STUCK if moment.stuck else IN_USE
        axes.text(BLOCK + BLOCK_WIDTH / 2, top + BLOCK_HEIGHT + 3, why, **below)
    axes.text(COUNT + 12, middle - 8, str(int(moment.held_there)), ha="center", **beside)
    if moment.held_there:
        axes.text(CONSUMER, middle, "kept", **beside)
        _draw_arrow(axes, CONSUMER - 4, BLOCK + BLOCK_WIDTH, middle)
        axes.text(COUNT + 42, middle + 8, "handle", ha="center", **beside)


def _draw_arrow(axes: Axes, start: float, end: float, height: float) -> None:
    """Draw an arrow from a name to the block."""
    look: dict[str, Any] = {"arrowstyle": "-|>", "mutation_scale": 12, "color": BLACK}
    axes.add_patch(FancyArrowPatch((start, height), (end, height), shrinkA=0, shrinkB=0, **look))


def _in_words(moment: Moment) -> str:
    """Return a sentence that describes a moment."""
    if not moment.allocated:
        return f"{moment.name}: the block is free."
    holders = [name for name, held in (("P1", moment.held_here), ("P2", moment.held_there)) if held]
    who = " and ".join(holders) or "nobody"
    verb = "have" if len(holders) == 2 else "has"
    size, count = units.byte_text(moment.allocated), int(moment.held_there)
    return f"{moment.name}: {size} allocated, the count is {count}, {who} {verb} a tensor in it."
