"""The segments of the allocator by hand: a line a segment, its blocks with the letters of the requests that hold them."""

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from gputrace import units
from gputrace.figures.figure import (
    BESIDE,
    BLACK,
    SIZE,
    SKY_BLUE,
    STYLE,
    TEXT_POINTS,
    Figure,
    add_badge,
    add_title,
    binary_ticks,
    text_width,
    words,
)
from labkit.experiments.allocator_by_hand import AllocatorByHand, HandSegment

LEFT, RIGHT = 0.24, 0.94  # where the axes lie, as shares of the figure's width
TITLE, AXIS, BADGE, LINE = 0.5, 0.5, 0.3, 0.36  # inches, from the top down; LINE for each segment
MOST = int((SIZE[1] - TITLE - AXIS - BADGE) / LINE)  # segments that are drawn
FILLED = 0.75  # of a line
LEAST_WIDTH = 20 << 20  # bytes on the axis


def allocator_by_hand(hand: AllocatorByHand) -> Figure:
    """The segments as they are now; the largest where there are more than fit."""
    segments = hand.segments()
    shown = sorted(sorted(segments, key=lambda segment: -segment.size)[:MOST], key=lambda segment: segment.stream)
    with matplotlib.rc_context(STYLE):
        lines = max(len(shown), 1)
        height = TITLE + lines * LINE + AXIS + BADGE
        canvas = Canvas(figsize=(SIZE[0], height), facecolor="white")
        add_title(canvas, _finding(hand, segments))
        axes = canvas.add_axes((LEFT, (AXIS + BADGE) / height, RIGHT - LEFT, lines * LINE / height))
        end = max([LEAST_WIDTH, *(segment.size for segment in shown)])
        axes.set(xlim=(0, end), ylim=(lines, 0), yticks=[], xlabel=_caption(segments, shown))
        axes.spines["left"].set_visible(False)
        axes.grid(visible=False)
        binary_ticks(axes, end, most=6)
        for y, segment in enumerate(shown):
            name = f"stream {segment.stream}: {units.byte_text(segment.size)}"
            axes.annotate(name, (0, y + FILLED / 2), (-8, 0), **BESIDE, ha="right", fontsize=TEXT_POINTS)
            _draw(axes, segment, y, 72 * SIZE[0] * (RIGHT - LEFT) / end)
        add_badge(canvas, hand.badge)
        return Figure(canvas, words(canvas, *map(_told, shown), hand.badge))


def _finding(hand: AllocatorByHand, segments: list[HandSegment]) -> str:
    if not segments:
        return "Nothing is reserved"
    held = sum(segment.size for segment in segments)
    count = f"{len(segments)} segment{'s' * (len(segments) != 1)}"
    return f"{units.byte_text(hand.allocated)} allocated, {units.byte_text(held)} reserved in {count}"


def _caption(segments: list[HandSegment], shown: list[HandSegment]) -> str:
    hidden = len(segments) - len(shown)
    return f"bytes of a segment; and {hidden} smaller segment{'s' * (hidden != 1)}" if hidden else "bytes of a segment"


def _told(segment: HandSegment) -> str:
    blocks = ", ".join(f"{block.name or 'free'} {units.byte_text(block.size)}" for block in segment.blocks)
    return f"Segment of stream {segment.stream}, {units.byte_text(segment.size)}: {blocks}"


def _draw(axes: Axes, segment: HandSegment, y: int, points: float) -> None:
    """The blocks of a segment, at so many points a byte: coloured with its letter where a request holds it, white where it is free."""
    for block in segment.blocks:
        colour = SKY_BLUE if block.name else "white"
        axes.broken_barh([(block.offset, block.size)], (y, FILLED), facecolor=colour, edgecolor=BLACK, linewidth=0.7)
        size = units.byte_text(block.size)
        texts = (f"{block.name}  {size}", block.name) if block.name else (f"free  {size}", size, "")
        text = next((text for text in texts if text_width(text) + 6 <= block.size * points), "")
        middle = block.offset + block.size / 2
        axes.text(middle, y + FILLED / 2, text, ha="center", va="center_baseline", fontsize=TEXT_POINTS, color=BLACK)
