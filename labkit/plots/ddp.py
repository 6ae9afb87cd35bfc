"""The figure of DistributedDataParallel beside DataParallel: a panel for each model, a line for each way."""

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D

from gputrace import units
from gputrace.figures.figure import (
    BLUE,
    SIZE,
    STYLE,
    TEXT_POINTS,
    VERMILLION,
    Figure,
    add_badge,
    add_title,
    binary_scale,
    decimal_scale,
    words,
)
from labkit.experiments.ddp import DATA_PARALLEL, DDP, WAYS, ddp_gain
from labkit.experiments.result import Result
from labkit.plots.experiments import told

COLOURS = {DATA_PARALLEL: BLUE, DDP: VERMILLION}
MARKERS = {DATA_PARALLEL: "o", DDP: "s"}


def ddp_beside_data_parallel(result: Result, recorded: Result | None = None) -> Figure:
    """Seconds of one training step by the number of GPUs, a panel for each model: solid measured here, dashed recorded."""
    models = list(dict.fromkeys([*result.column("model"), *(recorded.column("model") if recorded else [])]))
    with matplotlib.rc_context(STYLE):
        canvas = Canvas(figsize=SIZE, facecolor="white")
        margins = {"left": 0.115, "right": 0.98, "bottom": 0.21, "top": 0.74, "wspace": 0.42}
        panels = canvas.subplots(1, max(len(models), 1), squeeze=False, gridspec_kw=margins)[0]
        add_title(canvas, _finding(result, recorded))
        for axes, model in zip(panels, models, strict=False):
            _draw_model(axes, model, result, recorded)
        panels[0].set_ylabel("time of one training step")
        _add_legend(canvas, result, recorded)
        add_badge(canvas, result.badge.replace("; ", "\n") if recorded is None else f"{result.badge}\ndashed: {recorded.badge}")
        return Figure(canvas, words(canvas, _proof(result), _proof(recorded), result.badge))


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
            return f"DDP on {most} GPUs: {parts} as fast"
    return "Not measured yet: both ways on the same GPUs"


def _proof(result: Result | None) -> str:
    if result is None or not result.rows:
        return ""
    parts = []
    for model in dict.fromkeys(result.column("model")):
        for way in WAYS:
            gpus, seconds = result.column("gpus", model=model, way=way), result.column("seconds", model=model, way=way)
            if gpus:
                times = ", ".join(f"{units.time_text(value)} on {count}" for count, value in zip(gpus, seconds, strict=True))
                parts.append(f"{model} model, {way}: {times}")
    return told(result, f"{'; '.join(parts)}.")
