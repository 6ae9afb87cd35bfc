"""What each rank holds of a model in training: by formula, and as measured under DDP, ZeRO, FSDP and tensor parallelism."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from gputrace import units
from gputrace.figures.figure import BLACK, CATEGORY_COLOURS, CATEGORY_HATCHES, TEXT_POINTS, Figure, byte_ticks, new_canvas
from labkit.lab_parts import programs
from labkit.lab_parts.experiment import Result, Row, Run, checked_count
from labkit.lab_parts.figures import badged, in_style

KINDS = ("parameters", "gradients", "optimizer state")
# Which kinds each way cuts into as many parts as there are ranks. ZeRO's stages are those of Rajbhandari et al., 2020; FSDP is the third.
CUT_BY_WAY = {
    "DDP": (),
    "ZeRO-1": ("optimizer state",),
    "ZeRO-2": ("gradients", "optimizer state"),
    "FSDP": KINDS,
    "tensor parallel": KINDS,
}
MEASURED = ("DDP", "ZeRO-1", "FSDP", "tensor parallel")  # torch.distributed has no ZeRO-2 of its own
FLOAT = 4  # bytes
COLUMNS = {"way": "", "rank": "", "kind": "", "bytes": "bytes", "formula": "bytes", "whole": "bytes"}
LARGEST = 1024  # neurons


@dataclass(frozen=True)
class RankMemory:
    """Bytes that one rank holds."""

    parameters: int
    gradients: int
    optimizer_state: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer_state


def rank_memory(way: str, parameters: int, ranks: int) -> RankMemory:
    """Bytes on each rank for so many float32 parameters and Adam, which keeps two numbers for each. Without activations.

    Raises ValueError for an unknown way.
    """
    if way not in CUT_BY_WAY:
        raise ValueError(f"way={way!r}: choose one of {', '.join(map(repr, CUT_BY_WAY))}")
    numbers = {"parameters": 1, "gradients": 1, "optimizer state": 2}
    return RankMemory(*(FLOAT * numbers[kind] * parameters // (ranks if kind in CUT_BY_WAY[way] else 1) for kind in KINDS))


def held_by_ranks(ranks: int = 2, width: int = 256, layers: int = 4) -> Run:
    """Bytes that each of so many ranks holds after a training step with Adam, by way and kind, beside those of the formula.

    The model has `layers` linear layers of `width` × `width` weights. `whole` is how many bytes of parameters lie there in one piece
    while a layer computes. Counted are the tensors' own bytes; Adam's step numbers, four bytes a tensor, are among them.

    Raises ValueError for what is out of bounds; width and the number of layers must divide by the ranks and by two. Raises as
    `labkit.torchrun` does, besides.
    """
    for name, value, most in (("ranks", ranks, 8), ("width", width, LARGEST), ("layers", layers, 16)):
        if checked_count(name, value) > most:
            raise ValueError(f"{name}={value}: give at most {most}")
    if width % ranks or layers % 2:
        raise ValueError(f"width={width}, layers={layers}: the width must divide by {ranks} ranks, and the layers come in pairs")
    parameters = {"ways": list(MEASURED), "ranks": ranks, "width": width, "layers": layers}
    total = len(MEASURED) * ranks * len(KINDS)
    return Run("held_by_ranks", parameters, COLUMNS, programs.badge(ranks), total, _points(ranks, width, layers))


def _points(ranks: int, width: int, layers: int) -> Iterator[Row]:
    told = programs.results("shards", ranks, width, layers)
    for way in MEASURED:
        formula = rank_memory(way, layers * width * width, ranks)
        by_formula = dict(zip(KINDS, (formula.parameters, formula.gradients, formula.optimizer_state), strict=True))
        for rank, rows in enumerate(told):
            [found] = [row for row in rows if row["way"] == way]
            for kind in KINDS:
                yield {
                    "way": way,
                    "rank": rank,
                    "kind": kind,
                    "bytes": found[kind],
                    "formula": by_formula[kind],
                    "whole": found["whole"],
                }


# The figure


WIDEST, BAR = 0.8, 0.92  # of a way's bars together, and of each of them its own place


@in_style
def plot_held_by_ranks(result: Result) -> Figure:
    """The bytes that each rank holds under each way, one bar a rank, in the colours of their kinds; hollow, what the formula says."""
    ranks = result.parameters["ranks"]
    ways = [way for way in CUT_BY_WAY if result.rows and (way not in MEASURED or way in result.column("way"))]
    canvas, axes = new_canvas(_finding(result))
    top = max((_held(result, way, rank, "formula") for way in ways for rank in range(ranks)), default=1)
    for place, way in enumerate(ways):
        for rank in range(ranks):
            _draw(axes, result, way, rank, place - WIDEST / 2 + WIDEST * (rank + 0.5) / ranks, WIDEST / ranks)
    byte_ticks(axes, 1.12 * top, most=5)
    axes.set_xticks(range(len(ways)), ways)
    axes.set(ylabel="held by a rank", xlabel=f"one bar for each of {ranks} ranks")
    axes.grid(axis="x", visible=False)
    patches = [Patch(facecolor=CATEGORY_COLOURS[kind], hatch=CATEGORY_HATCHES.get(kind), edgecolor="white", label=kind) for kind in KINDS]
    axes.legend(handles=patches[::-1], frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.6), fontsize=TEXT_POINTS)
    axes.annotate("hollow:\nby the formula", (1.03, 0.3), xycoords="axes fraction", va="center", fontsize=TEXT_POINTS)
    return badged(canvas, result.badge, *(_told(result, way) for way in ways))


def _draw(axes: Axes, result: Result, way: str, rank: int, x: float, width: float) -> None:
    bottom = 0
    if not result.column("way", way=way):  # torch.distributed cannot do it: the formula alone
        axes.bar(x, _by_formula(result, way).total, BAR * width, fill=False, edgecolor=BLACK, linestyle="--", linewidth=1)
    for kind in KINDS:
        for nbytes in result.column("bytes", way=way, rank=rank, kind=kind):
            look: dict[str, Any] = {"color": CATEGORY_COLOURS[kind], "hatch": CATEGORY_HATCHES.get(kind), "edgecolor": "white"}
            axes.bar(x, nbytes, BAR * width, bottom, **look)
            bottom += nbytes
    if bottom:
        axes.plot([x], [_held(result, way, rank, "formula")], "D", markerfacecolor="white", markeredgecolor=BLACK, markersize=6)


def _by_formula(result: Result, way: str) -> RankMemory:
    return rank_memory(way, result.parameters["layers"] * result.parameters["width"] ** 2, result.parameters["ranks"])


def _held(result: Result, way: str, rank: int, column: str) -> int:
    return sum(result.column(column, way=way, rank=rank))


def _finding(result: Result) -> str:
    whole, cut = _held(result, "DDP", 0, "bytes"), _held(result, "FSDP", 0, "bytes")
    if not whole or not cut:
        return "Not measured yet: what a rank holds"
    return f"A rank holds {units.byte_text(_round_down(whole))} under DDP, {units.byte_text(_round_down(cut))} under FSDP"


def _round_down(nbytes: int) -> int:
    """Without Adam's step numbers, some bytes a tensor, which would make 4 MiB to 4.00002 MiB."""
    return nbytes >> 10 << 10


def _told(result: Result, way: str) -> str:
    if not result.column("way", way=way):
        return f"{way}, by the formula alone: each rank {units.byte_text(_by_formula(result, way).total)}."
    parts = []
    for rank in range(result.parameters["ranks"]):
        kinds = ", ".join(
            f"{units.byte_text(_round_down(nbytes))} of {kind}"
            for kind in KINDS
            for nbytes in result.column("bytes", way=way, rank=rank, kind=kind)
        )
        parts.append(f"rank {rank} {kinds}")
    alike = len({part.split(" ", 2)[2] for part in parts}) == 1
    return f"{way}: {'each rank ' + parts[0].split(' ', 2)[2] if alike else '; '.join(parts)}."
