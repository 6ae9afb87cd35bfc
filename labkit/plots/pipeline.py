"""The figures of pipelines: what each stage's GPU does when, and a step by the number of micro-batches."""

from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from gputrace import units
from gputrace.figures.figure import (
    BESIDE,
    BLACK,
    BLUE,
    ORANGE,
    SIZE,
    STYLE,
    TEXT_POINTS,
    VERMILLION,
    Figure,
    add_badge,
    binary_scale,
    decimal_scale,
    label_ends,
    new_canvas,
    text_width,
    time_ticks,
    words,
)
from labkit.experiments.pipeline import is_whole, peaks, stages, waiting_share
from labkit.experiments.result import Result
from labkit.experiments.schedules import BACKWARD, FORWARD, ONE_BATCH
from labkit.experiments.splits import COMPUTE_FIRST, COPY_FIRST, split_gain
from labkit.plots.experiments import SAME, badges, line, sources, told

COLOURS = {FORWARD: BLUE, BACKWARD: ORANGE}
INK = {FORWARD: "white", BACKWARD: "black"}
HEIGHT = 0.8  # of a bar, where the stages are 1 apart
ABOVE = -0.75  # where a prediction stands, above stage 0
FORMULA_COLOUR = "#767676"


def pipeline_step(result: Result, recorded: Result | None = None, prediction: float | None = None) -> Figure:
    """A bar for each forward and backward of each stage's GPU over time, a panel for each schedule, and each GPU's memory beside it.

    A number in a bar is that of the micro-batch. `prediction` is the percentage of the step in which the GPUs wait under the last of
    the schedules: a hollow marker shows where the step would end.
    """
    schedules = list(dict.fromkeys(result.column("schedule"))) or result.parameters["schedules"][:1]
    with matplotlib.rc_context(STYLE):
        canvas, *panels = new_canvas(_waiting_finding(result), rows=len(schedules))
        panels[0].get_gridspec().update(hspace=0.5, top=0.81, right=0.85, left=0.09)
        end = _end(result, prediction)
        for axes, schedule in zip(panels, schedules, strict=True):
            axes.set_position(axes.get_subplotspec().get_position(canvas))
            time_ticks(axes, end)
            axes.label_outer()
            axes.tick_params(axis="x", bottom=axes is panels[-1])
            axes.set_title(_heading(result, recorded, schedule), loc="left", fontsize=TEXT_POINTS)
            _draw_bars(axes, result, schedule)
            _draw_memory(axes, result, schedule)
        panels[0].set_title(" most memory", loc="right", fontsize=TEXT_POINTS, ha="left")
        sentence = _predicted_end(panels[-1], result, prediction)
        entries = [Patch(color=COLOURS[work], label=work) for work in (FORWARD, BACKWARD)]
        canvas.legend(handles=entries, loc="upper left", bbox_to_anchor=(0, 0.945), ncols=2, frameon=False, fontsize=TEXT_POINTS)
        badge = result.badge if recorded is None else f"{result.badge}  ·  {recorded.badge}"
        add_badge(canvas, badge)
        return Figure(canvas, words(canvas, _told_memory(result, schedules), sentence, _told_recorded(recorded), result.badge))


def pipeline_splits(result: Result, recorded: Result | None = None) -> Figure:
    """Seconds of a step by the number of micro-batches, a line for each order of launching, and what the formula gives."""
    with matplotlib.rc_context(STYLE):
        canvas, axes = new_canvas(_splits_finding(result))
        labels = []
        for source, dashes in sources(result, recorded):
            for program, colour in ((COPY_FIRST, VERMILLION), (COMPUTE_FIRST, BLUE)):
                splits, seconds = source.column("splits", program=program), source.column("seconds", program=program)
                labels += line(axes, splits, seconds, colour, dashes, program if source is result else f"{program}, recorded")
        labels += _draw_formula(axes, result)
        binary_scale(axes, "micro-batches", lambda splits: f"{splits:g}", most=8)
        decimal_scale(axes, "time of forward and backward", units.time_text)
        label_ends(axes, labels)
        add_badge(canvas, badges(result, recorded))
        return Figure(canvas, words(canvas, _splits_proof(result), _splits_proof(recorded), result.badge))


# What they find


def _waiting_finding(result: Result) -> str:
    shares = {schedule: share for schedule in result.parameters["schedules"] if (share := waiting_share(result, schedule)) is not None}
    if not shares:
        return "Not measured yet: a whole step"
    if len(shares) == 1:
        return f"The GPUs wait {_percent(*shares.values())} of the step"
    return "The GPUs wait: " + ", ".join(f"{_percent(share)} with {schedule}" for schedule, share in shares.items())


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%"


def _heading(result: Result, recorded: Result | None, schedule: str) -> str:
    count = 1 if schedule == ONE_BATCH else result.parameters["micro_batches"]
    name = schedule if count == 1 else f"{schedule}, {count} micro-batches"
    if len(result.parameters["schedules"]) == 1 and recorded is None:
        return name  # the figure's title says the rest
    share, before = waiting_share(result, schedule), None if recorded is None else waiting_share(recorded, schedule)
    waits = "not measured to its end" if share is None else f"GPUs wait {_percent(share)}"
    return f"{name}: {waits}" + ("" if before is None else f" (recorded: {_percent(before)})")


def _splits_finding(result: Result) -> str:
    gain = {1: 1.0} | split_gain(result)
    if len(gain) == 1:
        return "Not measured yet: a batch whole and cut"
    best = max(gain, key=lambda splits: (gain[splits], -splits))
    if best == 1:
        return "The batch in one piece is fastest"
    most = max(gain)
    rest = f"; {most} are slower again" if gain[best] > SAME * gain[most] else ""
    return f"{best} micro-batches are {gain[best]:.1f} times as fast as one{rest}"


def _told_memory(result: Result, schedules: list[str]) -> str:
    parts = []
    for schedule in schedules:
        taken = ", ".join(f"{units.byte_text(nbytes)} on cuda:{stage}" for stage, nbytes in sorted(peaks(result, schedule).items()))
        if taken:
            parts.append(f"{schedule} takes {taken}")
    return f"Memory of the step: {'; '.join(parts)}." if parts else ""


def _told_recorded(recorded: Result | None) -> str:
    if recorded is None:
        return ""
    shares = [
        f"{_percent(share)} with {name}"
        for name in recorded.parameters["schedules"]
        if (share := waiting_share(recorded, name)) is not None
    ]
    return told(recorded, f"the GPUs wait {', '.join(shares)}.")


def _splits_proof(result: Result | None) -> str:
    if result is None or not result.rows:
        return ""
    parts = []
    for program in dict.fromkeys(result.column("program")):
        splits, seconds = result.column("splits", program=program), result.column("seconds", program=program)
        times = ", ".join(f"{units.time_text(value)} with {count}" for count, value in zip(splits, seconds, strict=True))
        parts.append(f"{program} takes {times}")
    return told(result, f"{'; '.join(parts)}.")


# How they are drawn


def _draw_bars(axes: Axes, result: Result, schedule: str) -> None:
    count = stages(result)
    axes.set_ylim(count - 0.5, -0.5)
    axes.set_yticks(range(count), [f"cuda:{stage}" for stage in range(count)])
    axes.grid(axis="y", visible=False)
    points = axes.get_position().width * SIZE[0] * 72 / axes.get_xlim()[1]  # a second
    for row in result.rows:
        if row["schedule"] != schedule:
            continue
        bar: dict[str, Any] = {"color": COLOURS[row["work"]], "edgecolor": "white", "linewidth": 0.5}
        axes.barh(row["stage"], row["seconds"], HEIGHT, row["start"], **bar)
        number = str(row["micro_batch"] + 1)
        if text_width(number) + 2 <= points * row["seconds"]:
            middle = row["start"] + row["seconds"] / 2
            axes.text(middle, row["stage"], number, ha="center", va="center_baseline", fontsize=TEXT_POINTS, color=INK[row["work"]])


def _draw_memory(axes: Axes, result: Result, schedule: str) -> None:
    for stage, nbytes in peaks(result, schedule).items():
        axes.annotate(units.byte_text(nbytes), (1, stage), (9, 0), xycoords=("axes fraction", "data"), **BESIDE, fontsize=TEXT_POINTS)


def _end(result: Result, prediction: float | None) -> float:
    """Where the axis ends: a little behind the last work, and behind the predicted end."""
    last = max((row["start"] + row["seconds"] for row in result.rows), default=1e-3)
    return 1.03 * max(last, _predicted_seconds(result, prediction) or 0.0)


def _predicted_seconds(result: Result, prediction: float | None) -> float | None:
    """The end of the last schedule's step if its GPUs waited as predicted."""
    schedule = result.parameters["schedules"][-1]
    if prediction is None or prediction >= 100 or not is_whole(result, schedule):
        return None
    return sum(result.column("seconds", schedule=schedule)) / (stages(result) * (1 - prediction / 100))


def _predicted_end(axes: Axes, result: Result, prediction: float | None) -> str:
    """Draw the predicted end of the last schedule's step as a hollow marker, and say it."""
    seconds = _predicted_seconds(result, prediction)
    if seconds is None:
        return ""
    hollow: dict[str, Any] = {"markerfacecolor": "none", "markeredgecolor": BLACK, "markeredgewidth": 2}
    axes.set_ylim(axes.get_ylim()[0], -1.1)  # room above the bars
    axes.plot([seconds], [ABOVE], linestyle="", marker="s", markersize=11, clip_on=False, zorder=4, **hollow)
    side = "right" if seconds > axes.get_xlim()[1] / 2 else "left"
    axes.annotate(f"predicted: {prediction:g}%", (seconds, ABOVE), (-11 if side == "right" else 11, 0), **BESIDE, ha=side)
    return f"Predicted for {result.parameters['schedules'][-1]}: the GPUs wait {prediction:g}%."


def _draw_formula(axes: Axes, result: Result) -> list[tuple]:
    """What (m + 1) / 2m of the whole batch's time is, the formula's for two stages, from the step in one piece."""
    whole = result.column("seconds", program=COMPUTE_FIRST, splits=1)
    splits = sorted(set(result.column("splits")))
    if not whole or len(splits) < 2:
        return []
    seconds = [whole[0] * (count + 1) / (2 * count) for count in splits]
    axes.plot(splits, seconds, ":", color=FORMULA_COLOUR, linewidth=1.4)
    return [(splits[-1], seconds[-1], "formula", FORMULA_COLOUR)]
