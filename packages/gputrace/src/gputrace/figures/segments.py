"""The allocator's segments and blocks at one moment: what is free, in how many pieces, and what lies between them."""

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

# Inches, from the top down: the title; for each panel its lines and the ticks below them; the legend; the badge.
TITLE, TICKS, AXIS_LABEL, LEGEND, BADGE = 0.5, 0.3, 0.2, 0.42, 0.25
LEFT, RIGHT = 0.285, 0.955  # where the axes lie, as shares of the figure's width
THICK, THIN = 0.3, 0.13  # inches of a line
FILLED = 0.8  # of a line; the rest is space
MOST_SIZES, MOST_LISTED = 100, 8  # texts in one picture, groups listed in its words
WIDE = 3  # points: blocks that are narrower have no edges, which would hide them
FREE, PENDING = "free", "freed, but another stream may use it"
_EDGE = {"edgecolor": "white", "linewidth": 0.4}
LOOKS: dict[str, dict[str, Any]] = {
    **{name: {"facecolor": colour, "hatch": CATEGORY_HATCHES.get(name), **_EDGE} for name, colour in CATEGORY_COLOURS.items()},
    PENDING: {"facecolor": YELLOW, "hatch": "xxxx", **_EDGE, "edgecolor": BLACK},
    FREE: {"facecolor": "white", "edgecolor": "#999999", "linewidth": 0.6},
}

Box = tuple[float, float, float, int]  # left and right in bytes, top in lines, and the bytes of the whole
Group = tuple[str, list[RecordedSegment]]  # its name and its segments


def segment_map(trace: "TraceData", at: str | float | int = "peak", device: "Device | None" = None) -> Figure:
    """A device's segments and their blocks, by what the blocks are for, at one moment; `at` as for `Trace.segments`.

    Small and large segments have scales of their own. Raises ValueError for another moment or device, and where events were lost.
    """
    segments = trace.segments(at, device)
    device = trace.device_index(device)
    finding, proof = _finding(trace, at, device, segments), _proof(trace, device, segments)
    pools = [groups for small in (False, True) if (groups := _groups(trace, device, segments, small))]
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
            axes = canvas.add_axes((LEFT, (top - count * thickness) / height, RIGHT - LEFT, count * thickness / height))
            _draw_pool(axes, groups, page, thickness)
            top -= count * thickness + TICKS
        if pages:
            axes.set_xlabel(_caption(pages))
            _add_legend(canvas, segments, (LEGEND + BADGE) / height)
        add_badge(canvas, trace.badge)
        return Figure(canvas, words(canvas, *proof, trace.badge))


# What it finds


def _finding(trace: "TraceData", at: Any, device: int, segments: list[RecordedSegment]) -> str:
    where = f" on cuda:{device}" if len(trace.devices) > 1 else ""
    moment = _moment(at)
    if not segments:
        return f"{moment} nothing is reserved on cuda:{device}"
    free = _sizes(segments, "free")
    if not free:
        return f"{moment} all {units.byte_text(sum(s.size for s in segments))} reserved{where} are in use"
    pieces = f"{units.byte_text(sum(free))} free in {len(free)} pieces, the largest {units.byte_text(max(free))}"
    if len(free) == 1:
        pieces = f"{units.byte_text(free[0])} free in one piece"
    refused = _just_refused(trace, trace.events_before(at, device), device)
    return f"{units.byte_text(refused)} refused{where}: {pieces}" if refused else f"{moment}{where}: {pieces}"


def _moment(at: str | float | int) -> str:
    if isinstance(at, str):
        return "When memory ran out" if at == "oom" else f"At the {at}"
    return f"After {units.time_text(at)}" if isinstance(at, float) else f"After {at} event{'s' * (at != 1)}"


def _just_refused(trace: "TraceData", count: int, device: int) -> int:
    """The bytes of the allocation that was refused on the device at this moment; 0 if none was."""
    mine = trace.events.device == device
    neighbours = [*np.flatnonzero(mine[:count])[-1:], *(np.flatnonzero(mine[count:])[:1] + count)]
    return next((int(trace.events.requested[event]) for event in neighbours if trace.events.action[event] == OOM), 0)


def _sizes(segments: list[RecordedSegment], state: str) -> list[int]:
    return [block.size for segment in segments for block in segment.blocks if block.state == state]


def _proof(trace: "TraceData", device: int, segments: list[RecordedSegment]) -> list[str]:
    """The numbers as sentences."""
    if not segments:
        return []
    groups = [group for small in (False, True) for group in _groups(trace, device, segments, small)]
    sentences = []
    for name, group in groups[:MOST_LISTED]:
        held, free = sum(segment.size for segment in group), sum(_sizes(group, "free"))
        sentences.append(f"{name}: {_counted(group)}, {units.byte_text(held)}, of which {units.byte_text(free)} free")
    if rest := [segment for _, group in groups[MOST_LISTED:] for segment in group]:
        sentences.append(f"on other streams {_counted(rest)}, {units.byte_text(sum(segment.size for segment in rest))}")
    bytes_of: dict[str, int] = defaultdict(int)
    for segment in segments:
        for block in segment.blocks:
            bytes_of[_kind(block)] += block.size
    kinds = ", ".join(f"{units.byte_text(bytes_of[kind])} {kind}" for kind in LOOKS if bytes_of[kind] and kind not in (FREE, PENDING))
    pending = f"; {units.byte_text(bytes_of[PENDING])} {PENDING}" if bytes_of[PENDING] else ""
    return [*sentences, f"In use: {kinds or 'nothing'}{pending}"]


def _counted(segments: list[RecordedSegment]) -> str:
    return f"{len(segments)} segment{'s' * (len(segments) != 1)}"


# How it is drawn


def _groups(trace: "TraceData", device: int, segments: list[RecordedSegment], small: bool) -> list[Group]:
    """The small or the other segments, stream by stream."""
    names = trace.stream_names(device)
    found: dict[tuple, list[RecordedSegment]] = defaultdict(list)
    for segment in segments:
        kind = "expandable" if segment.expandable else "small" if segment.small else "large"
        if (kind == "small") == small:
            found[kind, list(names).index(segment.stream), segment.stream].append(segment)
    return [(f"{kind}, {names[stream]}", found[kind, order, stream]) for kind, order, stream in sorted(found)]


def _pages(pools: list[list[Group]]) -> list[Page]:
    """The lines of each pool; the small segments have no more than a third of them if there are others."""
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
    return {"free": FREE, "pending": PENDING}.get(block.state, CATEGORIES[block.category])


def _draw_pool(axes: Axes, groups: list[Group], page: Page, thickness: float) -> None:
    """The lines of one pool from the top down, the names of its groups on the left."""
    axes.set(xlim=(0, page.width), ylim=(page.height, 0), yticks=[])
    binary_ticks(axes, page.width, most=6)
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)
    points = 72 * SIZE[0] * (RIGHT - LEFT) / page.width  # a byte
    boxes: dict[str, list[Box]] = defaultdict(list)
    frames: list[list[tuple[float, float]]] = []
    y = 0.0
    for (name, group), lines in zip(groups, page.groups, strict=True):
        if not lines:
            continue
        label = f"{name}\n{_counted(group)}, {units.byte_text(sum(segment.size for segment in group))}"
        two = 2.6 * TEXT_POINTS / 72 / thickness  # lines that two lines of text take
        text, high = (label, two) if len(lines) >= two else (name, 1)
        axes.annotate(text, (0, y + min(high, FILLED * len(lines)) / 2), (-8, 0), **BESIDE, ha="right", fontsize=TEXT_POINTS)
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
    axes.add_collection(LineCollection(frames, colors=BLACK, linewidths=0.7, capstyle="projecting", clip_on=False))
    if thickness * FILLED * 72 > TEXT_POINTS:
        _write_sizes(axes, boxes[FREE], points)


def _place(piece: Piece, y: float, boxes: dict[str, list[Box]]) -> None:
    """Put the blocks of a piece of a segment among the boxes of their kinds."""
    at, shift = piece.segment.address, piece.x - piece.begin
    for block in piece.segment.blocks:
        begin, end = max(block.address - at, piece.begin), min(block.address - at + block.size, piece.end)
        if begin < end:
            boxes[_kind(block)].append((shift + begin, shift + end, y, block.size))


def _frame(piece: Piece, y: float) -> list[list[tuple[float, float]]]:
    """The sides of a piece; open where its segment comes from another line or goes on in the next."""
    left, right, bottom = piece.x, piece.x + piece.end - piece.begin, y + FILLED
    sides: list[list[tuple[float, float]]] = [[(left, y), (right, y)], [(left, bottom), (right, bottom)]]
    if piece.begin == 0:
        sides.append([(left, y), (left, bottom)])
    if piece.end == piece.segment.size:
        sides.append([(right, y), (right, bottom)])
    return sides


def _corners(box: Box) -> list[tuple[float, float]]:
    left, right, top, _ = box
    return [(left, top), (right, top), (right, top + FILLED), (left, top + FILLED)]


def _write_sizes(axes: Axes, boxes: list[Box], points: float) -> None:
    """The sizes of free blocks where there is room for them, at so many points a byte."""
    for left, right, top, nbytes in sorted(boxes, key=lambda box: box[0] - box[1])[:MOST_SIZES]:
        text = units.byte_text(nbytes)
        if text_width(text) + 6 <= (right - left) * points:
            axes.text((left + right) / 2, top + FILLED / 2, text, ha="center", va="center_baseline", fontsize=TEXT_POINTS, color="#444444")


def _caption(pages: list[Page]) -> str:
    """What stands below the axes: how to read them, and what there was no room for."""
    hidden = [segment for page in pages for segment in page.left_out]
    if hidden:
        return f"bytes; and {len(hidden)} more segments, {units.byte_text(sum(segment.size for segment in hidden))}"
    wraps = any(piece.begin for page in pages for lines in page.groups for line in lines for piece in line)
    return "bytes; a segment goes on in the next line" if wraps else "bytes"


def _add_legend(canvas: Canvas, segments: list[RecordedSegment], y: float) -> None:
    """Two rows below the axes, with what occurs."""
    there = {_kind(block) for segment in segments for block in segment.blocks}
    entries = [Patch(**LOOKS[kind], label=kind) for kind in LOOKS if kind in there]
    canvas.legend(handles=entries, loc="upper left", bbox_to_anchor=(0.01, y), ncols=5, frameon=False, fontsize=TEXT_POINTS)
