"""The figure of one model for several processes: what each process holds of the GPU, by way."""

import matplotlib
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from gputrace import units
from gputrace.figures.figure import BESIDE, BLACK, BLUE, GREY, ORANGE, STYLE, Figure, add_badge, binary_ticks, darker, new_canvas, words
from labkit.experiments.result import Result
from labkit.experiments.shared_model import HELD, WAYS, held
from labkit.plots.experiments import badges, told

COLOURS = dict(zip(HELD, (GREY, BLUE, ORANGE), strict=True))
FILLED, THIN = 0.56, 0.16  # of a bar's place: this machine's bar, and the recorded one below it
ROW, MARGIN = 0.83, 0.75  # inches: a bar's place, and what stands above and below the bars
MIB, GIB = 1 << 20, 1 << 30


def shared_model(result: Result, recorded: Result | None = None, prediction: float | None = None) -> Figure:
    """A bar for each way, of one piece a process and kind of memory. `prediction` is in GiB, of the first way."""
    with matplotlib.rc_context(STYLE):
        canvas, axes = new_canvas(_finding(result))
        ways = [way for way in WAYS if way in result.column("way")]
        height = 2 * MARGIN + ROW * max(len(ways), 1)
        canvas.set_figheight(height)
        axes.set_position((0.16, MARGIN / height, 0.72, 1 - 2 * MARGIN / height))
        for row, way in enumerate(ways):
            _bar(axes, result, way, row)
            if recorded is not None and way in held(recorded):
                recorded_bar = {"facecolor": "none", "edgecolor": BLACK, "linestyle": "--"}
                axes.barh(row + (FILLED + THIN) / 2, held(recorded)[way], THIN, **recorded_bar)
        if prediction is not None and ways:
            above = prediction * GIB, -FILLED / 2 - 0.12
            axes.plot(*([value] for value in above), "o", markersize=9, markerfacecolor="none", markeredgecolor=BLUE, markeredgewidth=2)
            beside = ((9, 0), "left") if prediction * GIB < max(held(result).values()) / 2 else ((-9, 0), "right")
            axes.annotate(f"predicted: {prediction:g} GiB", above, beside[0], **BESIDE, ha=beside[1], color=darker(BLUE))
        highest = [*held(result).values(), *(held(recorded).values() if recorded else []), (prediction or 0) * GIB, MIB]
        binary_ticks(axes, 1.02 * max(highest))
        axes.set_yticks(range(len(ways)), [_on_two_lines(way) for way in ways])
        axes.set(ylim=(max(len(ways), 1) - 0.4, -0.6), xlabel="memory of the GPU")
        axes.grid(axis="y", visible=False)
        axes.tick_params(axis="y", length=0)
        kinds = [Patch(facecolor=colour, edgecolor=BLACK, linewidth=0.6, label=kind) for kind, colour in COLOURS.items()]
        axes.legend(handles=kinds, ncols=len(kinds), loc="lower left", bbox_to_anchor=(0, 1), frameon=False, borderaxespad=0.2)
        add_badge(canvas, badges(result, recorded))
        said = "" if prediction is None else f"Predicted: {prediction:g} GiB."
        return Figure(canvas, words(canvas, _proof(result), said, _proof(recorded), result.badge))


def _bar(axes: Axes, result: Result, way: str, row: int) -> None:
    """The processes one after the other, each with a number where there is room, and the sum at the end."""
    end = 0
    for *sizes, _ in zip(*(result.column(name, way=way) for name in (*HELD, "process")), strict=True):
        start = end
        for kind, size in zip(HELD, sizes, strict=True):
            axes.barh(row, size, FILLED, left=end, color=COLOURS[kind])
            end += size
        axes.barh(row, end - start, FILLED, left=start, facecolor="none", edgecolor=BLACK, linewidth=1.2)
    axes.annotate(units.byte_text(end), (end, row), (6, 0), **BESIDE)


def _on_two_lines(way: str) -> str:
    return "\n".join(way.rsplit(" ", 1))


def _finding(result: Result) -> str:
    sums = held(result)
    processes = result.parameters["processes"]
    if not result.rows:
        return "Not measured yet: not even one process"
    if len(sums) == 1:
        (way,) = sums
        count = len(result.rows)
        some = f"{count} process{'es' * (count > 1)}"
        return f"{some}, {way}: {units.byte_text(sums[way])} of the GPU"
    least, most = min(sums, key=lambda way: sums[way]), max(sums, key=lambda way: sums[way])
    return f"For {processes} processes, {least} takes {units.byte_text(sums[least])}, {most} {units.byte_text(sums[most])}"


def _proof(result: Result | None) -> str:
    if result is None or not result.rows:
        return ""
    parts = []
    for way, total in held(result).items():
        kinds = ", ".join(f"{kind} {units.byte_text(sum(result.column(kind, way=way)))}" for kind in HELD)
        parts.append(f"{way} {units.byte_text(total)} ({kinds})")
    return told(result, f"{'; '.join(parts)}.")
