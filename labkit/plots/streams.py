"""The figures of streams: copies beside kernels, and two chains of kernels on one stream and on two."""

import matplotlib
from matplotlib.axes import Axes

from gputrace import units
from gputrace.figures.figure import (
    BESIDE,
    BLACK,
    BLUE,
    GREY,
    ORANGE,
    SKY_BLUE,
    STYLE,
    Figure,
    add_badge,
    binary_scale,
    label_ends,
    new_canvas,
    time_unit,
    words,
)
from labkit.experiments.overlap import ALONE, TOGETHER, hidden_share
from labkit.experiments.result import Result
from labkit.experiments.two_streams import stream_gain
from labkit.plots.experiments import SAME, badges, line, sources, told

COLOURS = dict(zip((*ALONE, *TOGETHER), (ORANGE, SKY_BLUE, GREY, GREY, BLUE), strict=True))
LINES = {TOGETHER[-1]: "pinned, on a\nstream of its own"}  # as they are written beside the bars
FILLED, THIN = 0.62, 0.2  # of a bar's place: this machine's bar, and the recorded one below it


def copy_overlap(result: Result, recorded: Result | None = None) -> Figure:
    """Seconds of copies and kernels alone, and of both together in each way, a bar each; recorded ones are thin and dashed."""
    with matplotlib.rc_context(STYLE):
        canvas, axes = new_canvas(_overlap_finding(result))
        axes.set_position((0.22, 0.19, 0.64, 0.70))
        ways = [way for way in COLOURS if way in result.column("way")]
        _bars(axes, result, ways)
        if recorded is not None:
            _thin_bars(axes, recorded, ways)
        axes.set_yticks(range(len(ways)), [LINES.get(way, way) for way in ways])
        axes.set(ylim=(len(ways) - 0.4, -0.6), xlim=(0, None))
        axes.grid(axis="y", visible=False)
        axes.tick_params(axis="y", length=0)
        size, unit = time_unit(max(result.column("seconds"), default=1.0))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value / size:g}")
        axes.set_xlabel(f"time until all batches are done, {unit}")
        add_badge(canvas, badges(result, recorded))
        return Figure(canvas, words(canvas, _overlap_proof(result), _overlap_proof(recorded), result.badge))


def _bars(axes: Axes, result: Result, ways: list[str]) -> None:
    for row, way in enumerate(ways):
        (seconds,) = result.column("seconds", way=way)
        axes.barh(row, seconds, FILLED, color=COLOURS[way])
        axes.annotate(units.time_text(seconds), (seconds, row), (6, 0), **BESIDE)


def _thin_bars(axes: Axes, recorded: Result, ways: list[str]) -> None:
    for row, way in enumerate(ways):
        for seconds in recorded.column("seconds", way=way):
            axes.barh(row + (FILLED + THIN) / 2, seconds, THIN, facecolor="none", edgecolor=BLACK, linestyle="--")


def _overlap_finding(result: Result) -> str:
    share = hidden_share(result)
    if share is None:
        return "Not measured yet: copies, kernels, and both on two streams"
    seconds = dict(zip(result.column("way"), result.column("seconds"), strict=True))
    shorter = "copying" if seconds[ALONE[0]] <= seconds[ALONE[1]] else "computing"
    return f"A stream of its own for the copies hides {share:.0%} of the {shorter}"


def _overlap_proof(result: Result | None) -> str:
    if result is None or not result.rows:
        return ""
    times = [f"{way} {units.time_text(seconds)}" for way, seconds in zip(result.column("way"), result.column("seconds"), strict=True)]
    return told(result, f"{'; '.join(times)}.")


def two_streams(result: Result, recorded: Result | None = None) -> Figure:
    """How many times faster two chains of kernels are on two streams than on one, by the width of the matrices."""
    with matplotlib.rc_context(STYLE):
        canvas, axes = new_canvas(_gain_finding(stream_gain(result)))
        labels = []
        for source, dashes in sources(result, recorded):
            gain = stream_gain(source)
            labels += line(axes, list(gain), list(gain.values()), BLUE, dashes, "two streams" if source is result else "recorded")
        widths = result.parameters["widths"]
        axes.hlines(1, widths[0], widths[-1], color=BLACK, linewidth=1)
        axes.set_ylim(min(0.8, axes.get_ylim()[0]), max(2.1, axes.get_ylim()[1]))
        axes.set_ylabel("times faster than on one stream")
        binary_scale(axes, "width of the matrices that a kernel multiplies", lambda width: f"{width:g}", most=10)
        label_ends(axes, labels)
        add_badge(canvas, badges(result, recorded))
        return Figure(canvas, words(canvas, _gain_proof(result), _gain_proof(recorded), result.badge))


def _gain_finding(gain: dict[int, float]) -> str:
    if not gain:
        return "Not measured yet: one stream and two at one width"
    best = max(gain, key=lambda width: gain[width])
    if gain[best] < SAME:
        return "Two streams are no faster than one at any width"
    same = [width for width in sorted(gain) if gain[width] < SAME]
    helps = f"Two streams are {gain[best]:.1f} times faster at width {best}"
    if not same:
        return helps
    ends = f"{same[0]} and {same[-1]}" if len(same) > 1 else f"{same[0]}"
    return f"{helps}, no faster at {ends}"


def _gain_proof(result: Result | None) -> str:
    if result is None or not (gain := stream_gain(result)):
        return ""
    parts = [f"width {width}: {value:.2f} times" for width, value in gain.items()]
    return told(result, f"faster on two streams, {', '.join(parts)}.")
