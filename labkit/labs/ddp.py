"""DistributedDataParallel beside DataParallel: the same training step in one process with threads, and in a process for each GPU."""

import json
from collections.abc import Iterator, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D

from gputrace import units
from gputrace.figures.figure import BLUE, SIZE, TEXT_POINTS, VERMILLION, Figure, add_title, binary_scale, decimal_scale
from labkit import machine
from labkit.lab_parts import programs
from labkit.lab_parts.experiment import Result, Row, Run, badge, checked_count, checked_sizes
from labkit.lab_parts.figures import finished, in_style
from labkit.labs import data_parallel

DATA_PARALLEL, DDP = "DataParallel", "DistributedDataParallel"
WAYS = (DATA_PARALLEL, DDP)
MODELS = data_parallel.MODELS
TINY, ON_CPU = "tiny", (256, 256)  # a step that a laptop's processor makes in milliseconds, with little memory for each rank
CPU_RANKS = 2
COLUMNS = {"gpus": "", "model": "", "way": "", "device": "", "width": "neurons", "batch": "rows", "seconds": "seconds"}


def ddp_beside_data_parallel(
    gpus: Sequence[int] = (1, 2, 4), models: Mapping[str, Sequence[int]] = MODELS, repeats: int = 5, on_cpu: Sequence[int] = ON_CPU
) -> Run:
    """Seconds of one training step of each of the `models`, given as (width, batch), on so many GPUs, under either way.

    The step is that of `data_parallel_step`. DistributedDataParallel runs in ranks that torchrun starts, one for each GPU, and each has
    its share of the batch there already. Where there are too few real GPUs, the `device` of its rows is "CPU": its ranks, two at most,
    exchange tensors of the CPU through gloo, by the real clock, and train the model "tiny" of the size `on_cpu`, which DataParallel
    then trains too, on the virtual GPUs. Rows of different devices are times of different clocks.

    Raises as `data_parallel_step` and `labkit.torchrun` do.
    """
    used = badge()
    gpus = checked_sizes("gpus", gpus, machine.in_use().count)
    repeats = checked_count("repeats", repeats)
    real = programs.on_gpus(max(gpus))
    sizes = {model: list(size) for model, size in models.items()}
    parameters = {"gpus": gpus, "models": sizes, "repeats": repeats, "on_cpu": list(on_cpu)}
    trained = sizes if real else {TINY: list(on_cpu)} | sizes
    ranks = gpus if real else [count for count in gpus if count <= CPU_RANKS]
    by_ranks = trained if real else {TINY: list(on_cpu)}
    where = used if real else f"{used}; DistributedDataParallel: {programs.badge(CPU_RANKS)}"
    total = len(gpus) * len(trained) + len(ranks) * len(by_ranks)
    return Run("ddp_beside_data_parallel", parameters, COLUMNS, where, total, _points(gpus, trained, ranks, by_ranks, repeats))


def ddp_gain(result: Result, gpus: int) -> dict[str, float]:
    """How many times faster DistributedDataParallel's step is than DataParallel's on so many GPUs, by model; of rows of the same device."""
    gains = {}
    for model in dict.fromkeys(result.column("model")):
        threads, processes = (result.column("seconds", model=model, way=way, gpus=gpus, device="GPU") for way in WAYS)
        if threads and processes:
            gains[model] = threads[0] / processes[0]
    return gains


def _points(
    gpus: Sequence[int], trained: Mapping[str, list[int]], ranks: Sequence[int], by_ranks: Mapping[str, list[int]], repeats: int
) -> Iterator[Row]:
    for row in data_parallel.data_parallel_step(gpus, trained, repeats):
        yield row | {"way": DATA_PARALLEL, "device": "GPU"}
    if ranks:
        asked = {"gpus": list(ranks), "models": by_ranks, "layers": data_parallel.LAYERS, "repeats": repeats}
        device = "GPU" if programs.on_gpus(max(gpus)) else "CPU"
        for row in programs.results("step_seconds", max(ranks), json.dumps(asked))[0]:
            yield row | {"way": DDP, "device": device}


# The figure


COLOURS = {DATA_PARALLEL: BLUE, DDP: VERMILLION}
MARKERS = {DATA_PARALLEL: "o", DDP: "s"}


@in_style
def plot_ddp_beside_data_parallel(result: Result, recorded: Result | None = None) -> Figure:
    """Seconds of one training step by the number of GPUs, a panel for each model: solid measured here, dashed recorded."""
    models = list(dict.fromkeys([*result.column("model"), *(recorded.column("model") if recorded else [])]))
    canvas = Canvas(figsize=SIZE, facecolor="white")
    margins = {"left": 0.115, "right": 0.98, "bottom": 0.21, "top": 0.74, "wspace": 0.42}
    panels = canvas.subplots(1, max(len(models), 1), squeeze=False, gridspec_kw=margins)[0]
    add_title(canvas, _finding(result, recorded))
    for axes, model in zip(panels, models, strict=False):
        _draw_model(axes, model, result, recorded)
    panels[0].set_ylabel("time of one training step")
    _add_legend(canvas, result, recorded)
    shown = result.badge.replace("; ", "\n") if recorded is None else f"{result.badge}\ndashed: {recorded.badge}"
    return finished(canvas, result, recorded, _proof, shown=shown)


def _draw_model(axes: Axes, model: str, result: Result, recorded: Result | None) -> None:
    for source, dashes in ((recorded, "--"), (result, "-")):
        if source is None:
            continue
        for way in WAYS:
            gpus, seconds = source.column("gpus", model=model, way=way), source.column("seconds", model=model, way=way)
            axes.plot(gpus, seconds, dashes, color=COLOURS[way], marker=MARKERS[way])
    binary_scale(axes, "GPUs or ranks", lambda gpus: f"{gpus:g}", most=5)
    decimal_scale(axes, "", units.time_text)
    axes.margins(0.12)
    axes.set_title(f"{model} model", fontsize=TEXT_POINTS)


def _add_legend(canvas: Canvas, result: Result, recorded: Result | None) -> None:
    """The ways by colour, and what solid and dashed mean."""
    ways = [Line2D([], [], color=COLOURS[way], marker=MARKERS[way], label=_named(result, way)) for way in WAYS]
    kinds = [Line2D([], [], color="black", linestyle="--", label="recorded")] if recorded else []
    look = {"frameon": False, "fontsize": TEXT_POINTS, "borderaxespad": 0}
    canvas.legend(handles=[*ways, *kinds], loc="upper left", bbox_to_anchor=(0.02, 0.9), ncols=3, **look)


def _named(result: Result, way: str) -> str:
    """The way, and on what it was measured here."""
    name, devices = {DDP: "DDP"}.get(way, way), result.column("device", way=way)
    if "CPU" in devices:
        return f"{name} (here: ranks on the CPU)"
    return f"{name} (here: virtual GPUs)" if devices and result.badge.startswith("virtual") else name


def _finding(result: Result, recorded: Result | None) -> str:
    """By how much a process for each GPU is faster on the most of them: as measured here, or else as recorded."""
    for source in filter(None, (result, recorded)):
        most = max(source.column("gpus"), default=0)
        if gains := ddp_gain(source, most):
            parts = ", ".join(f"{model} model {gain:.1f}×" for model, gain in gains.items())
            return f"DDP on {most} GPUs: {parts} as fast as DataParallel"
    return "Not measured yet: both ways on the same GPUs"


def _proof(result: Result) -> str:
    parts = []
    for model in dict.fromkeys(result.column("model")):
        for way in WAYS:
            if seconds := result.by("gpus", "seconds", model=model, way=way):
                times = ", ".join(f"{units.time_text(value)} on {count}" for count, value in seconds.items())
                parts.append(f"{model} model, {way}: {times}")
    return f"{'; '.join(parts)}."
