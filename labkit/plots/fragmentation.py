"""The figure of fragmentation: the largest request that still succeeds, by the size of the blocks between which memory is free."""

import matplotlib
from matplotlib.axes import Axes

from gputrace import units
from gputrace.figures.figure import BLACK, BLUE, GREEN, STYLE, VERMILLION, Figure, add_badge, binary_scale, label_ends, new_canvas, words
from labkit.experiments.fragmentation import largest_share
from labkit.experiments.result import Result
from labkit.plots.experiments import badges, sources, told

LOOKS = ((VERMILLION, "s"), (BLUE, "o"), (GREEN, "^"))  # a colour and a marker for each setting
ENOUGH = 0.95  # a request of this share of what is free counts as served whole


def fragmentation(result: Result, recorded: Result | None = None) -> Figure:
    """The largest request by the size of the blocks, a line for each setting (three at most), below what was free."""
    settings = list(result.parameters["settings"])
    with matplotlib.rc_context(STYLE):
        canvas, axes = new_canvas(_finding(result, settings))
        labels = []
        for source, dashes in sources(result, recorded):
            for setting, (colour, marker) in zip(settings, LOOKS, strict=False):
                labels += _line(axes, source, setting, colour, marker, dashes, named=source is result)
        labels += _free(axes, result, settings[0])
        binary_scale(axes, f"size of the blocks, of which {_kept(result)} stays", units.byte_text, most=8)
        axes.set_yscale("log", base=2)
        low, high = axes.get_ylim()
        ticks = [2.0**power for power in range(20, 40, 2) if low <= 2.0**power <= high]
        axes.set_yticks(ticks, [units.byte_text(tick) for tick in ticks])
        axes.set_ylabel("largest request that succeeds")
        label_ends(axes, labels)
        add_badge(canvas, badges(result, recorded))
        return Figure(canvas, words(canvas, _proof(result, settings), _proof(recorded, settings), result.badge))


def _kept(result: Result) -> str:
    return {"every second": "every second one", "every fourth": "every fourth one"}.get(
        result.parameters["kept"], result.parameters["kept"]
    )


def _finding(result: Result, settings: list[str]) -> str:
    rows = [row for row in result.rows if row["setting"] == settings[0]]
    if not rows:
        return "Not measured yet: the largest request that succeeds"
    worst = min(rows, key=lambda row: row["largest"] / row["free"])
    if worst["largest"] / worst["free"] >= ENOUGH:
        return f"All {units.byte_text(worst['free'])} that are free serve one request"
    return f"{units.byte_text(worst['free'])} are free, and a request for more than {units.byte_text(worst['largest'])} fails"


def _line(axes: Axes, source: Result, setting: str, colour: str, marker: str, dashes: str, named: bool) -> list[tuple]:
    blocks, largest = source.column("block", setting=setting), source.column("largest", setting=setting)
    if not blocks:
        return []
    axes.plot(blocks, largest, dashes, color=colour, marker=marker, linewidth=2 if dashes == "-" else 1.4)
    return [(blocks[-1], largest[-1], setting.partition(":")[0], colour)] if named else []


def _free(axes: Axes, result: Result, setting: str) -> list[tuple]:
    """What is free in all, a dotted line above the others."""
    blocks, free = result.column("block", setting=setting), result.column("free", setting=setting)
    if not blocks:
        return []
    axes.plot(blocks, free, ":", color=BLACK, linewidth=1.2)
    return [(blocks[-1], free[-1], "free", BLACK)]


def _proof(result: Result | None, settings: list[str]) -> str:
    if result is None or not result.rows:
        return ""
    block = result.rows[-1]["block"]
    parts = [
        f"{units.byte_text(result.column('largest', setting=setting, block=block)[0])} with {setting} ({share[block]:.0%} of what is free)"
        for setting in settings
        if block in (share := largest_share(result, setting))
    ]
    return told(result, f"between blocks of {units.byte_text(block)} the largest request that succeeds is {', '.join(parts)}.")
