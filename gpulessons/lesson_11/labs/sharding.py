"""What each rank holds of a model in training: by formula, and as measured under DDP, ZeRO and FSDP."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from matplotlib.patches import Patch
from matplotlib.ticker import MultipleLocator

from gpulessons import rank_programs
from gputrace.figures.figure import BLACK, CATEGORY_COLOURS, CATEGORY_HATCHES, TEXT_POINTS, Figure, new_canvas
from labkit.labs.experiment import Result, Row, Run, checked_count
from labkit.labs.figures import badged, in_style

KINDS = ("parameters", "gradients", "optimizer state")
# Which kinds each way cuts into as many parts as there are ranks. ZeRO's stages are those of Rajbhandari et al., 2020; FSDP is the third.
CUT_BY_WAY = {
    "DDP": (),
    "ZeRO-1": ("optimizer state",),
    "ZeRO-2": ("gradients", "optimizer state"),
    "FSDP": KINDS,
    "tensor parallel": KINDS,
}
MEASURED = ("DDP", "DDP, views", "ZeRO-1, views", "FSDP, no reshard", "FSDP")
FLOAT = 4  # bytes
PARTS = (*KINDS, "other", "peak")
COLUMNS = {"way": "", "part": "", "bytes": "bytes"}
LARGEST = 1 << 30  # parameters


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


def held_by_ranks(ranks: int = 4, width: int = 1024, layers: int = 16) -> Run:
    """Bytes that each of so many ranks holds after a training step with Adam, its gradients included, and at the peak of a step.

    The model has `layers` linear layers of `width` × `width` float32 weights, and meets so few rows that activations do not count. The
    ways: DistributedDataParallel with its defaults, and with `gradient_as_bucket_view=True` ("views"); the latter with
    ZeroRedundancyOptimizer; `fully_shard` of each layer that keeps parameters whole from forward to backward ("no reshard": as in ZeRO-2
    during a step, but only their shares between steps), and that does not. "other" is what the allocator has given out besides parameters,
    gradients and the optimizer's state; "peak" is the most of all. All ranks hold the same. Without resharding the peak depends on PyTorch:
    2.15 frees a gathered layer a little earlier. Ranks get virtual GPUs where there are too few real ones.

    Raises ValueError for what is out of bounds; the width must divide by the ranks. Raises as `labkit.torchrun` does, besides.
    """
    for name, value in (("ranks", ranks), ("width", width), ("layers", layers)):
        checked_count(name, value)
    if ranks > 8 or width % ranks or layers * width**2 > LARGEST:
        raise ValueError(
            f"ranks={ranks}, width={width}, layers={layers}: give at most 8 ranks, a width that divides by them, "
            f"and at most {LARGEST:,} parameters"
        )
    parameters = {"ways": list(MEASURED), "ranks": ranks, "width": width, "layers": layers}
    total = len(MEASURED) * len(PARTS)
    return Run("held_by_ranks", parameters, COLUMNS, rank_programs.gpu_badge(ranks), total, _points(ranks, width, layers))


def _points(ranks: int, width: int, layers: int) -> Iterator[Row]:
    for found in rank_programs.gpu_run("shards", ranks, width, layers).results[0]:
        for part in PARTS:
            yield {"way": found["way"], "part": part, "bytes": found[part]}


@in_style
def plot_held_by_ranks(result: Result) -> Figure:
    """The bytes for each parameter that a rank holds under each way after a step, in the colours of their kinds; hollow, the peak."""
    ways = [way for way in MEASURED if way in result.column("way")]
    canvas, axes = new_canvas(_finding(result))
    for x, way in enumerate(ways):
        held, bottom = _by_parameter(result, way), 0.0
        axes.bar(x, held["peak"], WIDE, fill=False, edgecolor=BLACK, linestyle="--", linewidth=1)
        for kind in COLOURED:
            axes.bar(x, held[kind], WIDE, bottom, color=CATEGORY_COLOURS[kind], hatch=CATEGORY_HATCHES.get(kind), edgecolor="white")
            bottom += held[kind]
        told = f"{bottom:.0f}\npeak {held['peak']:.0f}"
        axes.annotate(told, (x, max(bottom, held["peak"])), (0, 3), textcoords="offset points", ha="center", va="bottom")
    axes.set_xticks(range(len(ways)), [way.replace(", ", ",\n") for way in ways])
    axes.yaxis.set_major_locator(MultipleLocator(4))
    axes.margins(y=0.15)
    axes.set_ylabel("bytes per parameter, on each rank")
    axes.set_xlabel(f"{result.parameters['ranks']} ranks, float32, Adam", loc="left")
    axes.grid(axis="x", visible=False)
    looks: dict[str, dict[str, Any]] = {
        kind: {"facecolor": CATEGORY_COLOURS[kind], "hatch": CATEGORY_HATCHES.get(kind)} for kind in COLOURED
    }
    patches = [Patch(**look, edgecolor="white", label=NAMES.get(kind, kind)) for kind, look in looks.items()]
    patches.append(Patch(fill=False, edgecolor=BLACK, linestyle="--", label="peak of a step"))
    axes.legend(handles=patches[::-1], frameon=False, loc="upper right", fontsize=TEXT_POINTS)
    return badged(canvas, result.badge, *(_told(result, way) for way in ways))


WIDE = 0.7  # of a bar, its place being 1
COLOURED = (*KINDS, "other")
NAMES = {"other": "DDP's buckets"}  # what the allocator has given out besides: nothing else in these ways


def _by_parameter(result: Result, way: str) -> dict[str, float]:
    """Bytes for each parameter, by part."""
    count = result.parameters["layers"] * result.parameters["width"] ** 2
    return {part: nbytes / count for part, nbytes in result.by("part", "bytes", way=way).items()}


def _finding(result: Result) -> str:
    held = {way: sum(_by_parameter(result, way)[kind] for kind in COLOURED) for way in result.column("way", part="peak")}
    if "DDP" not in held or "FSDP" not in held:
        return "Not measured yet: what a rank holds"
    return f"Of {held['DDP']:.0f} bytes a parameter under DDP, a rank holds {held['FSDP']:.0f} under FSDP"


def _told(result: Result, way: str) -> str:
    held = _by_parameter(result, way)
    kinds = ", ".join(f"{held[kind]:.0f} of {NAMES.get(kind, kind)}" for kind in COLOURED if held[kind] >= 0.5)
    return f"{way}: bytes a parameter on each rank, {kinds}; at the peak {held['peak']:.0f}."
