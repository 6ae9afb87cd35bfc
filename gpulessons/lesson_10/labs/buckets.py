"""Run and draw a training step under DistributedDataParallel on virtual H200s.

The figure shows when each rank computes and sends, by buckets, ranks and link.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matplotlib.patches import Patch

from gputrace import Trace, units
from gputrace.figures.figure import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    TEXT_POINTS,
    VERMILLION,
    Figure,
    new_canvas,
    time_ticks,
)
from labkit.labs.experiment import Result, Row, Run, recorded_result
from labkit.labs.figures import badged, hollow, in_style
from labkit.labs.panel import ExperimentPanel, choice, one_of
from labkit.labs.predictions import compared_as_factor, stays_open

PROGRAM = Path(__file__).parents[1] / "programs" / "ddp_lanes.py"
WIDTHS = (1024, 2048, 4096)
BUCKETS = {"1 MiB": 1, "25 MiB": 25, "100 MiB": 100, "one bucket": 1 << 20}
RANKS = (2, 4, 8)
LINKS = ("NVLink", "PCIe")
LIKE = "H200"
ALL_REDUCE = "all_reduce"
MOMENT = 1e-9  # seconds: less than this is how floats round
PHASES = ("forward", "backward", "optimizer")
COLUMNS = {
    "rank": "",
    "seconds": "seconds",
    "computing": "seconds",
    "sending": "seconds",
    "hidden": "seconds",
    "work": "",
}


def bucket_step(
    width: int = 4096, bucket: str = "25 MiB", ranks: int = 2, link: str = "NVLink"
) -> Run:
    """Run a training step under DistributedDataParallel. Each rank has a row.

    Every rank trains eight linear layers of `width` × `width` weights and AdamW on its own 512
    rows, on a virtual H200 that has memory, order and time without values. `bucket` is "1 MiB", "25
    MiB", "100 MiB" or "one bucket". Over the link "PCIe" everything goes through the host, as with
    NCCL_P2P_DISABLE=1.

    `seconds` is the time of the step. `computing` and `sending` are the seconds of kernels and of
    all_reduces in it, and `hidden` is the part of `sending` in which the rank also computed. `work`
    lists [kind, start, seconds], where `start` counts from the start of the step. The kind is
    "forward", "backward", "optimizer" or "all_reduce". Raises ValueError for other choices, and the
    errors of `labkit.torchrun`.
    """
    for value, allowed in ((width, WIDTHS), (bucket, BUCKETS), (ranks, RANKS), (link, LINKS)):
        one_of(value, allowed)
    parameters = {"width": width, "bucket": bucket, "ranks": ranks, "link": link}
    badge = f"virtual GPUs, modelled on NVIDIA {LIKE}"
    return Run(
        "bucket_step",
        parameters,
        COLUMNS,
        badge,
        ranks,
        _points(width, BUCKETS[bucket], ranks, link == "NVLink"),
    )


def recorded_seconds(result: Result) -> list[float]:
    """Return the seconds of the same step on two real H200s, one for each run.

    The list is empty if the step was not recorded.
    """
    recorded, asked = recorded_result("ddp_seconds", LIKE), result.parameters
    if recorded is None or any(
        recorded.parameters[name] != asked[name] for name in ("bucket", "link")
    ):
        return []
    return recorded.column("seconds", width=asked["width"], ranks=asked["ranks"])


def _points(width: int, mebibytes: int, ranks: int, nvlink: bool) -> Iterator[Row]:
    from labkit.ranks import torchrun

    arguments = width, mebibytes, int(nvlink)
    ran = torchrun(
        PROGRAM,
        *arguments,
        ranks=ranks,
        like=LIKE,
        values=False,
        trace=True,
        timeout=300,
        quiet=True,
    )
    assert ran.trace is not None
    ends = [max(end for _, _, end in _spans(ran.trace, rank, 0.0)) for rank in range(ranks)]
    start = min(end - marks[-1] for end, marks in zip(ends, ran.results, strict=True))
    for rank, marks in enumerate(ran.results):
        yield {"rank": rank, "seconds": marks[-1]} | _work(
            _spans(ran.trace, rank, start), marks, ends[rank] - marks[-1], start
        )


def _spans(trace: Trace, rank: int, start: float) -> list[tuple[str, float, float]]:
    """Return the name, start and end of everything that ran on a rank's GPU since `start`."""
    spans = trace.spans
    return [
        (spans.names[name], float(begin), float(begin + took))
        for name, begin, took, device in zip(
            spans.name, spans.start, spans.duration, spans.device, strict=True
        )
        if device == rank and begin >= start
    ]


def _work(
    spans: list[tuple[str, float, float]], marks: list[float], own_start: float, start: float
) -> Row:
    """Return the columns `computing`, `sending`, `hidden` and `work` of a rank's row.

    `spans` are the rank's (name, start, end), and `marks` the ends of its passes. Kernels that
    follow each other without a gap count as one.
    """
    sends = [(ALL_REDUCE, begin, end) for name, begin, end in spans if name.startswith("nccl")]
    kernels: list[tuple[str, float, float]] = []
    for name, begin, end in spans:
        if name.startswith("nccl"):
            continue
        phase = _phase(begin - own_start, marks)
        if kernels and kernels[-1][0] == phase and begin - kernels[-1][2] < MOMENT:
            begin = kernels.pop()[1]
        kernels.append((phase, begin, end))
    return {
        "computing": sum(end - begin for _, begin, end in kernels),
        "sending": sum(end - begin for _, begin, end in sends),
        "hidden": sum(
            max(0.0, min(end, until) - max(begin, since))
            for _, begin, end in sends
            for _, since, until in kernels
        ),
        "work": [[what, begin - start, end - begin] for what, begin, end in kernels + sends],
    }


def _phase(seconds: float, marks: list[float]) -> str:
    return next(
        (phase for phase, end in zip(PHASES, marks, strict=True) if seconds < end - MOMENT),
        PHASES[-1],
    )


# The figure


LOOKS: dict[str, dict[str, Any]] = {
    "forward": {"color": BLUE},
    "backward": {"color": ORANGE},
    "optimizer": {"color": GREEN},
    ALL_REDUCE: {
        "facecolor": "white",
        "edgecolor": VERMILLION,
        "hatch": "//////",
        "linewidth": 0.8,
    },
}


@in_style
def plot_bucket_step(result: Result, prediction: float | None = None) -> Figure:
    """Draw two lanes for each rank over time: its computing above, its all_reduces below.

    `prediction` is the step's milliseconds, drawn as a hollow marker. A grey band is where the step
    ended on two real H200s, in twelve runs.
    """
    recorded = recorded_seconds(result)
    canvas, axes = new_canvas(_finding(result))
    axes.set_position([0.12, 0.19, 0.84, 0.6])
    ends = [start + took for work in result.column("work") for _, start, took in work]
    predicted = []
    if prediction is not None:
        predicted = [prediction / 1e3]
    time_ticks(axes, 1.04 * max([*ends, *recorded, *predicted], default=1e-3))
    for rank, work in result.by("rank", "work").items():
        for what, start, took in work:
            shift, height = -0.18, 0.4
            if what == ALL_REDUCE:
                shift, height = 0.22, 0.3
            axes.barh(rank + shift, took, height, start, **LOOKS[what])
    ranks = result.parameters["ranks"]
    top = -0.5
    if recorded or predicted:
        top -= 0.1 * (ranks + 1)
    axes.set_ylim(ranks - 0.5, top)
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.grid(axis="y", visible=False)
    entries = [Patch(label=what, **look) for what, look in LOOKS.items()]
    if recorded:
        axes.axvspan(min(recorded), max(recorded), color=GREY, alpha=0.7, zorder=0)
        entries.append(Patch(color=GREY, label="recorded end"))
    if predicted:
        [marker] = axes.plot(
            predicted, [-0.5 - 0.05 * (ranks + 1)], marker="s", label="predicted", **hollow(BLACK)
        )
        entries.append(marker)
    canvas.legend(
        handles=entries,
        loc="upper left",
        bbox_to_anchor=(0, 0.94),
        ncols=6,
        frameon=False,
        fontsize=TEXT_POINTS,
        columnspacing=1,
    )
    sentence = ""
    if prediction is not None:
        sentence = f"Predicted: {prediction:g} ms."
    shown = None
    if recorded:
        shown = f"{result.badge}  ·  grey: recorded on 2× NVIDIA {LIKE}"
    return badged(
        canvas, result.badge, *_told(result), sentence, _told_recorded(recorded), shown=shown
    )


def _finding(result: Result) -> str:
    if not result.rows:
        return "Not measured yet: a step under DistributedDataParallel"
    sending, hidden = sum(result.column("sending")), sum(result.column("hidden"))
    step = units.time_text(max(result.column("seconds")))
    return (
        f"The step takes {step}: {hidden / sending:.0%} of the sending is hidden behind computing"
    )


def _told(result: Result) -> list[str]:
    parts = []
    for row in result.rows:
        sent = sum(what == ALL_REDUCE for what, *_ in row["work"])
        messages = "1 message"
        if sent != 1:
            messages = f"{sent} messages"
        parts.append(
            f"computes for {units.time_text(row['computing'])}; of "
            f"{units.time_text(row['sending'])} in which it sends {messages}, "
            f"it computes {units.time_text(row['hidden'])} too"
        )
    if len(set(parts)) == 1 < len(parts):
        return [f"Each rank {parts[0]}."]
    return [f"Rank {rank} {part}." for rank, part in enumerate(parts)]


def _told_recorded(recorded: list[float]) -> str:
    if not recorded:
        return "This was not recorded on real GPUs."
    fastest, slowest = (f"{1e3 * seconds:.3g}" for seconds in (min(recorded), max(recorded)))
    return f"Recorded on two H200s, {len(recorded)} runs: {fastest} to {slowest} ms."


# The widget


GOOD = 1.1  # A prediction within this factor is called good.


class BucketsLab(ExperimentPanel):
    """Lab in which learners choose width, bucket size, ranks and link, and predict a step's time.

    Then the figure shows all ranks. `width`, `bucket`, `ranks` and `link` are the choices at first.
    Raises ValueError for other choices.
    """

    question = (
        "Eight linear layers, 512 rows a rank, AdamW, on H200s under DistributedDataParallel: "
        "how many ms does a training step take?"
    )
    unit = "ms"

    def __init__(
        self, width: int = 4096, bucket: str = "25 MiB", ranks: int = 2, link: str = "NVLink"
    ) -> None:
        self.width = choice("Width:", WIDTHS, width, "9em")
        self.bucket = choice("Buckets:", list(BUCKETS), bucket, "12em")
        self.ranks = choice("Ranks:", RANKS, ranks, "8em")
        self.link = choice("Link:", LINKS, link, "9em")
        super().__init__([self.width, self.bucket, self.ranks, self.link])

    def experiment(self) -> Run:
        return bucket_step(self.width.value, self.bucket.value, self.ranks.value, self.link.value)

    def point(self, row: dict[str, Any]) -> str:
        return f"rank {row['rank']} computes for {units.time_text(row['computing'])}"

    def draw(self, result: Result, prediction: float | None) -> Figure:
        return plot_bucket_step(result, prediction)

    def verdict(self, result: Result, prediction: float) -> str:
        if not result.rows:
            return stays_open("No rank was measured", prediction, unit=" ms")
        milliseconds = 1e3 * max(result.column("seconds"))
        told = compared_as_factor(
            f"The step takes {milliseconds:.3g} ms; you predicted {prediction:g}",
            prediction,
            milliseconds,
            GOOD,
        )
        return " ".join([told, *_told(result)[:1], _told_recorded(recorded_seconds(result))])
