"""Lanes of a timeline, and the drawing of any number of spans in them."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection

from gputrace.figures.figure import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY_BLUE,
    TEXT_POINTS,
    VERMILLION,
    YELLOW,
    drawable,
    text_width,
)
from gputrace.spans import (
    COPIES,
    D2H,
    H2D,
    HOST,
    KERNEL,
    KINDS,
    LAUNCH,
    P2P,
    WAIT,
    is_collective,
)

if TYPE_CHECKING:
    from gputrace.trace_data import TraceData

BACKWARD = len(KINDS)  # a kernel that was launched in a backward pass
COLLECTIVE = BACKWARD + 1  # a kernel of NCCL
NAMES = {
    KERNEL: "kernel",
    BACKWARD: "kernel, backward",
    COLLECTIVE: "collective",
    H2D: "copy host to GPU",
    D2H: "copy GPU to host",
    P2P: "copy GPU to GPU",
    LAUNCH: "launch",
    WAIT: "host waits",
}
# Kinds also differ in their hatching, for readers who cannot tell colours apart.
LOOKS: dict[int, dict[str, Any]] = {
    KERNEL: {"facecolor": BLUE},
    BACKWARD: {"facecolor": SKY_BLUE},
    COLLECTIVE: {"facecolor": PURPLE},
    H2D: {"facecolor": ORANGE, "hatch": "////"},
    D2H: {"facecolor": GREEN, "hatch": "\\\\\\\\"},
    P2P: {"facecolor": YELLOW, "hatch": "xxxx"},
    LAUNCH: {"facecolor": "#666666"},
    WAIT: {"facecolor": "white", "hatch": "....", "edgecolor": "#666666"},
}
IN_GREY: dict[int, dict[str, Any]] = {
    kind: {**look, "facecolor": "white" if kind == WAIT else "#999999"}
    for kind, look in LOOKS.items()
}
RACE = VERMILLION
FILLED = 0.8  # of a lane's height
BORDERED = 5  # pixels. Wider boxes have a border.
WIDE = 3  # pixels. Narrower spans are drawn together with their neighbours.
APART = 2  # pixels to the next span from which narrow spans are drawn one by one
COLUMN = 4  # pixels. The height of a column is the covered share of its time.
LEAST = 0.15  # of the height of a column, so that it can be seen
MOST_TEXTS = 200  # names that are written into spans


@dataclass(frozen=True)
class Lane:
    """Row of the picture: the host, a stream of a device, or a copy engine.

    Attributes:
        device: the device, or HOST.
        stream: the stream, or None.
        kind: the kind of copies of a copy engine, or None.
        mask: which of the trace's spans are in this lane.
    """

    device: int
    stream: int | None
    kind: int | None
    name: str
    mask: np.ndarray

    @property
    def is_host(self) -> bool:
        """Whether this is the lane of the host."""
        return self.device == HOST

    def within(self, seen: np.ndarray) -> "Lane":
        """Return the lane for a recording that has only the spans in the mask `seen`."""
        return replace(self, mask=self.mask[seen])


def kinds_of(trace: "TraceData") -> np.ndarray:
    """Return the kind of each span in a trace.

    The kind is COLLECTIVE for a kernel of NCCL, and BACKWARD for other kernels of a backward pass.
    """
    spans = trace.spans
    kinds = np.where((spans.kind == KERNEL) & spans.backward, BACKWARD, spans.kind)
    return np.where(is_collective(spans), COLLECTIVE, kinds)


def lanes_of(trace: "TraceData", devices: list[int]) -> list[Lane]:
    """Return the lanes from top to bottom: the host, and the streams in use of each device.

    For a single device, also return its copy engines in use.
    """
    spans = trace.spans
    lanes = []
    if trace.tells_of_host:
        lanes.append(Lane(HOST, None, None, "host", spans.device == HOST))
    several = len(trace.devices) > 1
    for device in devices:
        prefix = f"cuda:{device} " if several else ""
        mine = spans.device == device
        for stream, name in trace.stream_names(device).items():
            mask = mine & (spans.stream == stream)
            if mask.any():
                if several:
                    name = prefix + name.replace(" stream", "")
                lanes.append(Lane(device, stream, None, name, mask))
        if len(devices) == 1:
            for kind in COPIES:
                mask = mine & (spans.kind == kind)
                if mask.any():
                    engine = KINDS[kind] if several else f"{KINDS[kind]} engine"
                    lanes.append(Lane(device, None, kind, prefix + engine, mask))
    return lanes


def fitting(lanes: list[Lane], seconds: list[float], most: int) -> list[Lane]:
    """Return at most `most` lanes in their order: the host, and those that were busy longest.

    `seconds` says how long each lane was busy.
    """
    if len(lanes) <= most:
        return lanes
    hosts = [number for number, lane in enumerate(lanes) if lane.is_host]
    others = [number for number, lane in enumerate(lanes) if not lane.is_host]
    others.sort(key=lambda number: -seconds[number])
    kept = {*hosts, *others[: most - len(hosts)]}
    return [lane for number, lane in enumerate(lanes) if number in kept]


def draw_lane(
    axes: Axes,
    trace: "TraceData",
    kinds: np.ndarray,
    lane: Lane,
    row: int,
    window: tuple[float, float],
    pixels: float,
    looks: dict[int, dict[str, Any]] = LOOKS,
) -> bool:
    """Draw the spans of a lane.

    Args:
        kinds: the result of `kinds_of`.
        row: the number of the lane, from the top.
        window: the interval to draw, in seconds.
        pixels: the width of the interval in the picture.
        looks: how each kind of spans is drawn.

    Returns:
        Whether some spans were too many to be drawn one by one.
    """
    spans, (low, high) = trace.spans, window
    seen = lane.mask & (spans.end >= low) & (spans.start <= high)
    pixel, crowded = (high - low) / pixels, False
    # Waits are drawn first, below the launches of other threads.
    shown = np.unique(kinds[seen]).tolist()
    if lane.is_host:
        shown = [WAIT, LAUNCH]
    for kind in shown:
        mask = seen & (kinds == kind)
        if mask.any():
            start, end = np.maximum(spans.start[mask], low), np.minimum(spans.end[mask], high)
            drawn = boxes(start, end, low, pixel)
            crowded |= bool((drawn[:, 2] < 1).any())
            _draw_boxes(axes, drawn, row, pixel, looks[kind], zorder=2 if kind == WAIT else 3)
    if not lane.is_host:
        for kind, colour in ((KERNEL, "white"), (BACKWARD, BLACK), (COLLECTIVE, BLACK)):
            which = np.flatnonzero(seen & (kinds == kind))
            _write_names(axes, trace, which, row, window, pixels, colour)
    return crowded


def boxes(start: np.ndarray, end: np.ndarray, low: float, pixel: float) -> np.ndarray:
    """Return boxes that show spans, as rows (x, width, height). The full height is 1.

    A wide span has a box of its own. A narrow span that is alone has a box of at least one pixel.
    Narrow spans close to each other become columns, whose height is the share of covered time.

    Args:
        start, end: when the spans began and ended, in order of `start`.
        low: the left edge of the picture, in seconds.
        pixel: the seconds per pixel.
    """
    wide = end - start >= WIDE * pixel
    drawn = [np.stack([start[wide], end[wide] - start[wide], np.ones(wide.sum())], axis=1)]
    start, end = _joined(start[~wide], end[~wide])
    if len(start):
        gap = np.concatenate([[np.inf], start[1:] - end[:-1], [np.inf]]) > APART * pixel
        alone = gap[:-1] & gap[1:]
        lengths = np.maximum(end[alone] - start[alone], pixel)
        drawn.append(np.stack([start[alone], lengths, np.ones(alone.sum())], axis=1))
        drawn.append(_columns(start[~alone], end[~alone], low, COLUMN * pixel))
    return np.concatenate(drawn)


def _joined(start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Join intervals that overlap."""
    if not len(start):
        return start, end
    latest = np.maximum.accumulate(end)
    begins = np.concatenate([[True], start[1:] > latest[:-1]])
    return start[begins], latest[np.concatenate([begins[1:], [True]])]


def _columns(start: np.ndarray, end: np.ndarray, low: float, width: float) -> np.ndarray:
    """Return a box (x, width, height) for each column that contains spans.

    The spans must not overlap. `low` is the left edge of the picture, and `width` the width of a
    column, both in seconds.
    """
    if not len(start):
        return np.zeros((0, 3))
    first, last = int((start[0] - low) / width), int((end[-1] - low) / width) + 1
    edges = low + width * np.arange(first, last + 1)
    moments = np.stack([start, end], axis=1).ravel()
    # The seconds that are covered before each of the moments.
    done = np.repeat(np.concatenate([[0.0], np.cumsum(end - start)]), 2)[1:-1]
    share = np.diff(np.interp(edges, moments, done)) / width
    there = share > 0
    there[((start - low) / width).astype(int) - first] = True  # also for spans that take no time
    heights = np.clip(share[there], LEAST, 1.0)
    return np.stack([edges[:-1][there], np.full(there.sum(), width), heights], axis=1)


def _draw_boxes(
    axes: Axes, drawn: np.ndarray, row: int, pixel: float, look: dict, zorder: int
) -> None:
    """Draw boxes (x, width, height) in the lane with number `row`.

    `pixel` is the number of seconds per pixel, and `look` the style of the boxes.
    """
    x, width, height = drawn.T
    bottom = row + (1 + FILLED) / 2
    top = bottom - FILLED * height
    bottoms = np.full(len(x), bottom)
    flat = np.stack([x, x + width, x + width, x, bottoms, bottoms, top, top], axis=1)
    corners = flat.reshape(-1, 2, 4).swapaxes(1, 2)
    # A border separates wide boxes, but would hide narrow ones.
    is_wide = width >= BORDERED * pixel
    for shown, border in ((is_wide, 0.4), (~is_wide, 0.0)):
        if shown.any():
            style = {"edgecolor": "white", "linewidth": border, **look}
            collection = PolyCollection(corners[shown], **style, zorder=zorder)
            axes.add_collection(collection, autolim=False)


def _write_names(
    axes: Axes,
    trace: "TraceData",
    which: np.ndarray,
    row: int,
    window: tuple[float, float],
    pixels: float,
    colour: str,
) -> None:
    """Write names into kernels that are wide enough. If there are many, name only the widest.

    `which` are the kernels' indices among the trace's spans.
    """
    spans, (low, high) = trace.spans, window
    start, end = np.maximum(spans.start[which], low), np.minimum(spans.end[which], high)
    points = (end - start) * (pixels / 2) / (high - low)  # a picture has two pixels per point
    for index in np.argsort(-points, kind="stable")[:MOST_TEXTS].tolist():
        name = drawable(short_name(spans.names[spans.name[which[index]]]))
        if text_width(name) + 4 <= points[index]:
            middle = (start[index] + end[index]) / 2
            look: dict[str, Any] = {"ha": "center", "va": "center_baseline", "color": colour}
            look |= {"fontsize": TEXT_POINTS, "parse_math": False, "clip_on": True}
            axes.text(middle, row + 0.5, name, **look, zorder=5)


def short_name(name: str) -> str:
    """Return a kernel's name without its result, namespaces, template arguments and parameters."""
    name_and_more = name.removeprefix("void ").partition("<")[0].partition("(")[0]
    return name_and_more.rpartition("::")[2].strip() or name


def shade(axes: Axes, count: int) -> None:
    """Draw a faint background for each of `count` lanes."""
    for row in range(count):
        low, high = row + (1 - FILLED) / 2, row + (1 + FILLED) / 2
        axes.axhspan(low, high, color=GREY, alpha=0.22, linewidth=0, zorder=1)
