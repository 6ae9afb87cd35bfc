"""Map of the allocator's segments and blocks at one moment, which shows what is free and where."""

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Patch

from gputrace import units
from gputrace.events import CATEGORIES, OOM
from gputrace.figures.figure import (
    BESIDE,
    BLACK,
    CATEGORY_COLOURS,
    CATEGORY_HATCHES,
    SIZE,
    STYLE,
    TEXT_POINTS,
    YELLOW,
    Figure,
    add_badge,
    add_title,
    binary_ticks,
    text_width,
    words,
)
from gputrace.figures.layout import GAP, Page, Piece, lay_out
from gputrace.replay import RecordedBlock, RecordedSegment

if TYPE_CHECKING:
    from gputrace.trace_data import Device, TraceData

# Heights in inches: the title, the ticks below the lines of each panel, the label of the axis, the
# legend, and the badge.
TITLE, TICKS, AXIS_LABEL, LEGEND, BADGE = 0.5, 0.3, 0.2, 0.42, 0.25
LEFT, RIGHT = 0.285, 0.955  # the sides of the axes, as shares of the figure's width
THICK, THIN = 0.3, 0.13  # the highest and the lowest height of a line, in inches
FILLED = 0.8  # of a line's height
MOST_SIZES, MOST_LISTED = 100, 8  # sizes written into a picture, groups listed in its words
WIDE = 3  # points. Narrower blocks have no edges, which would hide them.
FREE, PENDING = "free", "freed, but another stream may use it"
_EDGE = {"edgecolor": "white", "linewidth": 0.4}
LOOKS: dict[str, dict[str, Any]] = {
    **{
        name: {"facecolor": colour, "hatch": CATEGORY_HATCHES.get(name), **_EDGE}
        for name, colour in CATEGORY_COLOURS.items()
    },
    PENDING: {"facecolor": YELLOW, "hatch": "xxxx", **_EDGE, "edgecolor": BLACK},
    FREE: {"facecolor": "white", "edgecolor": "#999999", "linewidth": 0.6},
}

# Left and right in bytes, the top in lines, and the bytes of the whole block.
Box = tuple[float, float, float, int]
Group = tuple[str, list[RecordedSegment]]  # the name and the segments


def segment_map(
    trace: "TraceData", at: str | float | int = "peak", device: "Device | None" = None
) -> Figure:
    """Draw a device's segments and their blocks at one moment, by what the blocks are for.

    Small and large segments have their own scales. `at` is a moment as for `Trace.segments`.

    Raises:
        ValueError: there is no such moment or device, or events were lost.
    """
    segments = trace.segments(at, device)
    device = trace.device_index(device)
    finding, proof = _finding(trace, at, device, segments), _proof(trace, device, segments)
    pools = []
    for small in (False, True):
        groups = _groups(trace, device, segments, small)
        if groups:
            pools.append(groups)
    with matplotlib.rc_context(STYLE):
        pages = _pages(pools)
        lines = [page.height for page in pages]
        room = SIZE[1] - TITLE - AXIS_LABEL - LEGEND - BADGE - TICKS * len(pages)
        thickness = min(THICK, room / max(sum(lines), 1))
        height = SIZE[1] - room + thickness * sum(lines) if pages else TITLE + BADGE
        canvas = Canvas(figsize=(SIZE[0], height), facecolor="white")
        add_title(canvas, finding)
        top = height - TITLE
        for groups, page, count in zip(pools, pages, lines, strict=True):
            box = LEFT, (top - count * thickness) / height, RIGHT - LEFT, count * thickness / height
            axes = canvas.add_axes(box)
            _draw_pool(axes, groups, page, thickness)
            top -= count * thickness + TICKS
        if pages:
            axes.set_xlabel(_caption(pages))
            _add_legend(canvas, segments, (LEGEND + BADGE) / height)
        add_badge(canvas, trace.badge)
        return Figure(canvas, words(canvas, *proof, trace.badge))


# The words of the figure


def _finding(trace: "TraceData", at: Any, device: int, segments: list[RecordedSegment]) -> str:
    """Return the figure's title, which says how much memory is free, and in how many blocks.

    `at` is the moment, and `segments` are the device's segments at that moment.
    """
    where = f" on cuda:{device}" if len(trace.devices) > 1 else ""
    moment = _moment(at)
    if not segments:
        return f"{moment} nothing is reserved on cuda:{device}"
    free = _sizes(segments, "free")
    if not free:
        reserved = units.byte_text(sum(segment.size for segment in segments))
        return f"{moment} all {reserved} reserved{where} are in use"
    largest = units.byte_text(max(free))
    pieces = f"{units.byte_text(sum(free))} free in {len(free)} pieces, the largest {largest}"
    if len(free) == 1:
        pieces = f"{units.byte_text(free[0])} free in one piece"
    refused = _just_refused(trace, trace.events_before(at, device), device)
    if refused:
        return f"{units.byte_text(refused)} refused{where}: {pieces}"
    return f"{moment}{where}: {pieces}"


def _moment(at: str | float | int) -> str:
    """Return the moment as the first words of a title, such as "At the peak"."""
    if at == "oom":
        return "When memory ran out"
    if isinstance(at, str):
        return f"At the {at}"
    if isinstance(at, float):
        return f"After {units.time_text(at)}"
    return f"After {units.counted(at, 'event')}"


def _just_refused(trace: "TraceData", count: int, device: int) -> int:
    """Return the bytes of an allocation that failed just before or after `count` events, or 0."""
    mine = trace.events.device == device
    before, after = np.flatnonzero(mine[:count])[-1:], np.flatnonzero(mine[count:])[:1] + count
    for event in [*before, *after]:
        if trace.events.action[event] == OOM:
            return int(trace.events.requested[event])
    return 0


def _sizes(segments: list[RecordedSegment], state: str) -> list[int]:
    """Return the sizes of all blocks of these segments that are in a state, such as "free"."""
    blocks = [block for segment in segments for block in segment.blocks]
    return [block.size for block in blocks if block.state == state]


def _proof(trace: "TraceData", device: int, segments: list[RecordedSegment]) -> list[str]:
    """Return sentences with the numbers that the segment map shows."""
    if not segments:
        return []
    groups = _groups(trace, device, segments, False) + _groups(trace, device, segments, True)
    sentences = []
    for name, group in groups[:MOST_LISTED]:
        held = units.byte_text(sum(segment.size for segment in group))
        free = units.byte_text(sum(_sizes(group, "free")))
        sentences.append(
            f"{name}: {units.counted(len(group), 'segment')}, {held}, of which {free} free"
        )
    rest = [segment for _, group in groups[MOST_LISTED:] for segment in group]
    if rest:
        held = units.byte_text(sum(segment.size for segment in rest))
        sentences.append(f"on other streams {units.counted(len(rest), 'segment')}, {held}")
    bytes_of: dict[str, int] = defaultdict(int)
    for segment in segments:
        for block in segment.blocks:
            bytes_of[_kind(block)] += block.size
    kinds = []
    for kind in LOOKS:
        if bytes_of[kind] and kind not in (FREE, PENDING):
            kinds.append(f"{units.byte_text(bytes_of[kind])} {kind}")
    in_use = f"In use: {', '.join(kinds) or 'nothing'}"
    if bytes_of[PENDING]:
        in_use += f"; {units.byte_text(bytes_of[PENDING])} {PENDING}"
    return [*sentences, in_use]


# The drawing


def _groups(
    trace: "TraceData", device: int, segments: list[RecordedSegment], small: bool
) -> list[Group]:
    """Return the small segments, or the large ones with `small=False`, grouped by stream."""
    names = trace.stream_names(device)
    found: dict[tuple, list[RecordedSegment]] = defaultdict(list)
    for segment in segments:
        kind = "large"
        if segment.expandable:
            kind = "expandable"
        elif segment.small:
            kind = "small"
        if (kind == "small") == small:
            order = list(names).index(segment.stream)
            found[kind, order, segment.stream].append(segment)
    return [(f"{key[0]}, {names[key[2]]}", found[key]) for key in sorted(found)]


def _pages(pools: list[list[Group]]) -> list[Page]:
    """Lay out each pool of segments. Small segments get at most a third of the lines.

    If there are only small segments, they may use all lines.
    """
    pages: list[Page] = []
    room = SIZE[1] - TITLE - AXIS_LABEL - LEGEND - BADGE - TICKS * len(pools)
    left = room / THIN
    for index, groups in reversed(list(enumerate(pools))):
        most = left / 3 if index else left
        page = lay_out([group for _, group in groups], most)
        left -= page.height
        pages.insert(0, page)
    return pages


def _kind(block: RecordedBlock) -> str:
    """Return the kind of a block, which decides how it is drawn. It is a key of `LOOKS`."""
    return {"free": FREE, "pending": PENDING}.get(block.state, CATEGORIES[block.category])


def _draw_pool(axes: Axes, groups: list[Group], page: Page, thickness: float) -> None:
    """Draw the lines of one pool from top to bottom, with the names of the groups on the left.

    `thickness` is the height of a line.
    """
    axes.set(xlim=(0, page.width), ylim=(page.height, 0), yticks=[])
    binary_ticks(axes, page.width, most=6)
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)
    points = 72 * SIZE[0] * (RIGHT - LEFT) / page.width  # per byte
    boxes: dict[str, list[Box]] = defaultdict(list)
    frames: list[list[tuple[float, float]]] = []
    y = 0.0
    for (name, group), lines in zip(groups, page.groups, strict=True):
        if not lines:
            continue
        held = units.byte_text(sum(segment.size for segment in group))
        two = 2.6 * TEXT_POINTS / 72 / thickness  # the lines that a text of two lines needs
        text, high = name, 1.0
        if len(lines) >= two:
            text, high = f"{name}\n{units.counted(len(group), 'segment')}, {held}", two
        middle = y + min(high, FILLED * len(lines)) / 2
        axes.annotate(text, (0, middle), (-8, 0), **BESIDE, ha="right", fontsize=TEXT_POINTS)
        for line in lines:
            for piece in line:
                _place(piece, y, boxes)
                frames += _frame(piece, y)
            y += 1
        y += GAP
    for kind, placed in boxes.items():
        wide = [_corners(box) for box in placed if (box[1] - box[0]) * points >= WIDE]
        narrow = [_corners(box) for box in placed if (box[1] - box[0]) * points < WIDE]
        axes.add_collection(PolyCollection(wide, **LOOKS[kind]))
        axes.add_collection(PolyCollection(narrow, **{**LOOKS[kind], "linewidth": 0}))
    look: dict[str, Any] = {"colors": BLACK, "linewidths": 0.7, "capstyle": "projecting"}
    axes.add_collection(LineCollection(frames, **look, clip_on=False))
    if thickness * FILLED * 72 > TEXT_POINTS:
        _write_sizes(axes, boxes[FREE], points)


def _place(piece: Piece, y: float, boxes: dict[str, list[Box]]) -> None:
    """Add the blocks in a part of a segment to `boxes`, which has a list for each kind of block.

    `y` is the height of the line in which the part is drawn.
    """
    at, shift = piece.segment.address, piece.x - piece.begin
    for block in piece.segment.blocks:
        start = block.address - at
        begin, end = max(start, piece.begin), min(start + block.size, piece.end)
        if begin < end:
            boxes[_kind(block)].append((shift + begin, shift + end, y, block.size))


def _frame(piece: Piece, y: float) -> list[list[tuple[float, float]]]:
    """Return the lines of the frame around a part of a segment, drawn at the height `y`.

    The frame is open on a side where the segment continues in another line.
    """
    left, right, bottom = piece.x, piece.x + piece.end - piece.begin, y + FILLED
    sides: list[list[tuple[float, float]]] = [
        [(left, y), (right, y)],
        [(left, bottom), (right, bottom)],
    ]
    if piece.begin == 0:
        sides.append([(left, y), (left, bottom)])
    if piece.end == piece.segment.size:
        sides.append([(right, y), (right, bottom)])
    return sides


def _corners(box: Box) -> list[tuple[float, float]]:
    """Return the corners of a box."""
    left, right, top, _ = box
    return [(left, top), (right, top), (right, top + FILLED), (left, top + FILLED)]


def _write_sizes(axes: Axes, boxes: list[Box], points: float) -> None:
    """Write the sizes of free blocks that are wide enough. `points` is the width of a byte."""
    look: dict[str, Any] = {"ha": "center", "va": "center_baseline", "color": "#444444"}
    for left, right, top, nbytes in sorted(boxes, key=lambda box: box[0] - box[1])[:MOST_SIZES]:
        text = units.byte_text(nbytes)
        if text_width(text) + 6 <= (right - left) * points:
            middle = (left + right) / 2, top + FILLED / 2
            axes.text(*middle, text, **look, fontsize=TEXT_POINTS)


def _caption(pages: list[Page]) -> str:
    """Return the text below the axes, which explains the lines and says what is left out.

    `pages` are the layouts of the pools.
    """
    hidden = [segment for page in pages for segment in page.left_out]
    if hidden:
        held = units.byte_text(sum(segment.size for segment in hidden))
        return f"bytes; and {len(hidden)} more segments, {held}"
    for page in pages:
        for lines in page.groups:
            if any(piece.begin for line in lines for piece in line):
                return "bytes; a segment goes on in the next line"
    return "bytes"


def _add_legend(canvas: Canvas, segments: list[RecordedSegment], y: float) -> None:
    """Draw a legend of the kinds of blocks that occur, in two rows at the height `y`."""
    there = {_kind(block) for segment in segments for block in segment.blocks}
    entries = [Patch(**LOOKS[kind], label=kind) for kind in LOOKS if kind in there]
    look: dict[str, Any] = {"frameon": False, "fontsize": TEXT_POINTS, "ncols": 5}
    canvas.legend(handles=entries, loc="upper left", bbox_to_anchor=(0.01, y), **look)
