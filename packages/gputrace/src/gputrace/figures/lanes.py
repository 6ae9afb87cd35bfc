"""The lanes of a timeline, and how any number of spans becomes a picture of them."""

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
from gputrace.spans import COPIES, D2H, H2D, HOST, KERNEL, KINDS, LAUNCH, P2P, WAIT, is_collective

if TYPE_CHECKING:
    from gputrace.trace_data import TraceData

BACKWARD = len(KINDS)  # a kernel that was launched in a backward pass
COLLECTIVE = BACKWARD + 1  # a kernel of NCCL's
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
# Each kind has a hatching too, so that it is known without its colour.
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
RACE = VERMILLION
FILLED = 0.8  # of a lane's height
BORDERED = 5  # pixels: wider ones have a border
WIDE = 3  # pixels: spans that are narrower are drawn together with their neighbours
APART = 2  # pixels to the next: narrow spans are drawn one by one
COLUMN = 4  # pixels: what is drawn together is a column as high as the share of its time that is covered
LEAST = 0.15  # of the height: what is there is seen
MOST_TEXTS = 200  # names that are written into spans


@dataclass(frozen=True)
class Lane:
    """A row of the picture: the host (device HOST), a stream of a device, or a copy engine, which is the `kind` of its copies."""

    device: int
    stream: int | None
    kind: int | None
    name: str
    mask: np.ndarray  # of the trace's spans

    @property
    def is_host(self) -> bool:
        return self.device == HOST

    def within(self, seen: np.ndarray) -> "Lane":
        """The same lane of a recording that has only the spans marked in `seen`."""
        return replace(self, mask=self.mask[seen])


def kinds_of(trace: "TraceData") -> np.ndarray:
    """The kind of each span: COLLECTIVE for a kernel of NCCL's, BACKWARD for another that a backward pass launched."""
    spans = trace.spans
    kinds = np.where((spans.kind == KERNEL) & spans.backward, BACKWARD, spans.kind)
    return np.where(is_collective(spans), COLLECTIVE, kinds)


def lanes_of(trace: "TraceData", devices: list[int]) -> list[Lane]:
    """From the top down: the host, and of each device its streams in use; of a single one its copy engines in use, too."""
    spans = trace.spans
    lanes = [Lane(HOST, None, None, "host", spans.device == HOST)] if trace.tells_of_host else []
    for device in devices:
        prefix = f"cuda:{device} " if len(trace.devices) > 1 else ""
        mine = spans.device == device
        for stream, name in trace.stream_names(device).items():
            mask = mine & (spans.stream == stream)
            if mask.any():
                lanes.append(Lane(device, stream, None, f"{prefix}{name.replace(' stream', '') if prefix else name}", mask))
        for kind in COPIES if len(devices) == 1 else ():
            mask = mine & (spans.kind == kind)
            if mask.any():
                lanes.append(Lane(device, None, kind, f"{prefix}{KINDS[kind]}{'' if prefix else ' engine'}", mask))
    return lanes


def fitting(lanes: list[Lane], seconds: list[float], most: int) -> list[Lane]:
    """Return at most `most` lanes in their order: the host, and the lanes that were busy longest. `seconds` says how long each was."""
    if len(lanes) <= most:
        return lanes
    hosts = [number for number, lane in enumerate(lanes) if lane.is_host]
    others = sorted((number for number, lane in enumerate(lanes) if not lane.is_host), key=lambda number: -seconds[number])
    kept = {*hosts, *others[: most - len(hosts)]}
    return [lane for number, lane in enumerate(lanes) if number in kept]


def draw_lane(axes: Axes, trace: "TraceData", kinds: np.ndarray, lane: Lane, row: int, window: tuple[float, float], pixels: float) -> bool:
    """The spans of a lane that lie in a window of seconds, which is drawn so many pixels wide; `row` counts from the top.

    `kinds` is what `kinds_of` says of all spans. Returns whether some were too many to be drawn one by one.
    """
    spans, (low, high) = trace.spans, window
    seen = lane.mask & (spans.end >= low) & (spans.start <= high)
    pixel, crowded = (high - low) / pixels, False
    # What the host waits for lies under what other threads launch meanwhile.
    for kind in (WAIT, LAUNCH) if lane.is_host else np.unique(kinds[seen]).tolist():
        mask = seen & (kinds == kind)
        if mask.any():
            start, end = np.maximum(spans.start[mask], low), np.minimum(spans.end[mask], high)
            drawn = boxes(start, end, low, pixel)
            crowded |= bool((drawn[:, 2] < 1).any())
            _draw_boxes(axes, drawn, row, pixel, LOOKS[kind], zorder=2 if kind == WAIT else 3)
    if not lane.is_host:
        for kind, colour in ((KERNEL, "white"), (BACKWARD, BLACK), (COLLECTIVE, BLACK)):
            _write_names(axes, trace, np.flatnonzero(seen & (kinds == kind)), row, window, pixels, colour)
    return crowded


def boxes(start: np.ndarray, end: np.ndarray, low: float, pixel: float) -> np.ndarray:
    """Rows (x, width, height) that show spans, given in order of start, at `pixel` seconds a pixel, from `low` on; height 1 is full.

    A span that is wide enough is a box of its own. Of the others, those that lie alone are as wide as a pixel at least; where they lie
    close, the height of columns is the share of the time that was covered.
    """
    wide = end - start >= WIDE * pixel
    drawn = [np.stack([start[wide], end[wide] - start[wide], np.ones(wide.sum())], axis=1)]
    start, end = _joined(start[~wide], end[~wide])
    if len(start):
        gap = np.concatenate([[np.inf], start[1:] - end[:-1], [np.inf]]) > APART * pixel
        alone = gap[:-1] & gap[1:]
        drawn.append(np.stack([start[alone], np.maximum(end[alone] - start[alone], pixel), np.ones(alone.sum())], axis=1))
        drawn.append(_columns(start[~alone], end[~alone], low, COLUMN * pixel))
    return np.concatenate(drawn)


def _joined(start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same stretches of time, none of which overlap."""
    if not len(start):
        return start, end
    latest = np.maximum.accumulate(end)
    begins = np.concatenate([[True], start[1:] > latest[:-1]])
    return start[begins], latest[np.concatenate([begins[1:], [True]])]


def _columns(start: np.ndarray, end: np.ndarray, low: float, width: float) -> np.ndarray:
    """A row (x, width, height) for each column in which something lies; the spans, in order, do not overlap."""
    if not len(start):
        return np.zeros((0, 3))
    first, last = int((start[0] - low) / width), int((end[-1] - low) / width) + 1
    edges = low + width * np.arange(first, last + 1)
    moments = np.stack([start, end], axis=1).ravel()
    done = np.repeat(np.concatenate([[0.0], np.cumsum(end - start)]), 2)[1:-1]  # seconds covered before each of the moments
    share = np.diff(np.interp(edges, moments, done)) / width
    there = share > 0
    there[((start - low) / width).astype(int) - first] = True  # also where a span takes no time
    return np.stack([edges[:-1][there], np.full(there.sum(), width), np.clip(share[there], LEAST, 1.0)], axis=1)


def _draw_boxes(axes: Axes, drawn: np.ndarray, row: int, pixel: float, look: dict, zorder: int) -> None:
    x, width, height = drawn.T
    bottom = row + (1 + FILLED) / 2
    top = bottom - FILLED * height
    corners = np.stack([x, x + width, x + width, x, *[np.full(len(x), bottom)] * 2, top, top], axis=1).reshape(-1, 2, 4).swapaxes(1, 2)
    # A border would hide a narrow box; between wide ones it shows where one ends.
    for shown, border in ((width >= BORDERED * pixel, 0.4), (width < BORDERED * pixel, 0.0)):
        if shown.any():
            collection = PolyCollection(corners[shown], **{"edgecolor": "white", "linewidth": border, **look}, zorder=zorder)
            axes.add_collection(collection, autolim=False)


def _write_names(
    axes: Axes, trace: "TraceData", which: np.ndarray, row: int, window: tuple[float, float], pixels: float, colour: str
) -> None:
    """The names of the kernels that are wide enough for them; of the widest, where there are very many."""
    spans, (low, high) = trace.spans, window
    start, end = np.maximum(spans.start[which], low), np.minimum(spans.end[which], high)
    points = (end - start) * (pixels / 2) / (high - low)  # a picture has two pixels a point
    for index in np.argsort(-points, kind="stable")[:MOST_TEXTS].tolist():
        name = drawable(short_name(spans.names[spans.name[which[index]]]))
        if text_width(name) + 4 <= points[index]:
            middle = (start[index] + end[index]) / 2
            look: dict[str, Any] = {"ha": "center", "va": "center_baseline", "fontsize": TEXT_POINTS, "color": colour}
            axes.text(middle, row + 0.5, name, **look, parse_math=False, zorder=5, clip_on=True)


def short_name(name: str) -> str:
    """A kernel's name without what C++ puts around it: no result, namespaces, template arguments or parameters."""
    return name.removeprefix("void ").partition("<")[0].partition("(")[0].rpartition("::")[2].strip() or name


def shade(axes: Axes, count: int) -> None:
    """A faint ground under each lane."""
    for row in range(count):
        axes.axhspan(row + (1 - FILLED) / 2, row + (1 + FILLED) / 2, color=GREY, alpha=0.22, linewidth=0, zorder=1)
