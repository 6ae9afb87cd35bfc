"""Does a training fit a GPU, and what should be changed first? The formula of the budget, asked again and again."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import ipywidgets as widgets
from matplotlib.axes import Axes

from gputrace import units
from gputrace.figures.figure import (
    BLACK,
    BLUE,
    CATEGORY_COLOURS,
    CATEGORY_HATCHES,
    GREY,
    TEXT_POINTS,
    VERMILLION,
    Figure,
    darker,
    new_canvas,
    shortened,
)
from labkit.lab_parts.budget import (
    BF16_SINCE,
    IN_USE,
    MOST_GPUS,
    MOST_ROWS,
    SPREADS,
    Budget,
    GpuMemory,
    Setting,
    budget,
    gpu_models,
    gpu_of,
)
from labkit.lab_parts.experiment import Result, Row, Run, badge
from labkit.lab_parts.figures import badged, hollow, in_style
from labkit.lab_parts.measured_memory import NOT_MEASURED, RAN_OUT, describe, measured_peak, obstacle
from labkit.lab_parts.networks import GPT, MLP, OPTIMIZERS, PRECISIONS, Network, ResNet
from labkit.lab_parts.panel import Lab, choice
from labkit.lab_parts.predictions import stays_open

WORTH = 0.98  # a change that leaves more than this is none


class PlanStep(NamedTuple):
    """One step of a plan: what is changed, the setting that comes of it, and its budget."""

    change: str
    setting: Setting
    budget: Budget


def plan(setting: Setting, on: GpuMemory) -> Iterator[PlanStep]:
    """The setting as it is, and then change after change until it fits, or nothing helps any more.

    Changes are tried in order of their price. The first that makes it fit is taken; if none does, the one that saves most.
    """
    here = PlanStep("as chosen", setting, budget(setting, on.chip))
    yield here
    while not on.holds(here.budget):
        steps = [PlanStep(name, other, budget(other, on.chip)) for name, other in changes(here.setting, on)]
        steps = [step for step in steps if step.budget.peak < WORTH * here.budget.peak]
        if not steps:
            return
        here = next((step for step in steps if on.holds(step.budget)), min(steps, key=lambda step: step.budget.peak))
        yield here


def changes(setting: Setting, on: GpuMemory) -> Iterator[tuple[str, Setting]]:
    """What may be changed, in order of the price. The network stays, and the rows of a step.

    Half precision and a fused optimizer cost nothing, micro-batches time for smaller kernels, checkpointing a second forward; momentum
    in place of Adam is another training, and more GPUs cost money.
    """
    half = "bfloat16" if on.chip.major >= BF16_SINCE else "float16"
    if not setting.mixed:
        yield f"autocast to {half}", replace(setting, precision=f"autocast {half}")
    if setting.optimizer == "Adam":
        yield "a fused Adam", replace(setting, optimizer="Adam fused")
    more = [2**power for power in range(1, 21) if setting.micro_batches < 2**power <= setting.batch // setting.gpus]
    if more:
        tried = (replace(setting, micro_batches=count) for count in more)
        fitting = next((other for other in tried if on.holds(budget(other, on.chip))), replace(setting, micro_batches=more[-1]))
        yield f"{fitting.micro_batches} micro-batches", fitting
    if not setting.checkpointing:
        yield "checkpointing", replace(setting, checkpointing=True)
    if setting.optimizer.startswith("Adam"):
        yield "momentum instead of Adam", replace(setting, optimizer="SGD momentum")
    gpus = 2 * setting.gpus
    if gpus <= MOST_GPUS and gpus * setting.micro_batches <= setting.batch:
        yield f"{gpus} GPUs", replace(setting, gpus=gpus)


def answer(steps: list[PlanStep], on: GpuMemory) -> str:
    """Whether it fits and what to change first, in a sentence or two."""
    first, last = steps[0], steps[-1]
    if on.holds(first.budget):
        return "It fits."
    if len(steps) == 1:
        return "It does not fit, and none of these changes helps: cut the network in pieces, or give each GPU a share of its weights."
    told = "It does not fit. " if first.budget.peak > on.memory else "It hardly fits. "
    told += f"First change: {steps[1].change}"
    then = [step.change for step in steps[2:]]
    told += f"; then {', '.join(then)}." if then else "."
    return told if on.holds(last.budget) else f"{told} Even so it does not fit."


TERMS = ("parameters", "optimizer state", "gradients", "activations", "in flight", "buckets", "batch", "workspace")
COLUMNS = {"change": "", "moment": "", **dict.fromkeys(TERMS, "bytes"), "peak": "bytes", "room": "bytes", "measured": "bytes"}


def memory_plan(setting: Setting, on: str = IN_USE) -> Run:
    """Whether a training fits a GPU, and what to change first: the setting as it is, then change after change until it fits.

    `on` is one of `gpu_models()`. Each row has the terms of the formula, the name of the fullest `moment`, the `room` that PyTorch has on
    that GPU, and the peak as `measured`, where `on` is the GPU in use and the setting one that can be measured there; 0 elsewhere, and -1
    where memory ran out.

    Raises ValueError for an unknown GPU and for what has no formula, RuntimeError when no GPU is in use.
    """
    name, chosen = badge(), gpu_of(on)
    if on != IN_USE:
        name = f"by formula, for {chosen.name}"
    steps = list(plan(setting, chosen))
    changes = [step.change for step in steps]
    parameters = {"setting": describe(setting), "gpu": chosen.name, "answer": answer(steps, chosen), "changes": changes}
    return Run("memory_plan", parameters, COLUMNS, name, len(steps), _points(steps, chosen, on == IN_USE))


def _points(steps: list[PlanStep], on: GpuMemory, here: bool) -> Iterator[Row]:
    for step in steps:
        measured = measured_peak(step.setting, step.budget) if here and obstacle(step.setting) is None else NOT_MEASURED
        known = {"change": step.change, "moment": step.budget.moment, "peak": step.budget.peak, "room": on.memory}
        yield {**known, **step.budget.terms, "measured": measured}


# The figure


GIB = 1 << 30
COLOURS = CATEGORY_COLOURS | {"buckets": "white", "batch": GREY}
HATCHES = CATEGORY_HATCHES | {"buckets": "////"}


@in_style
def plot_memory_plan(result: Result, prediction: float | None = None) -> Figure:
    """The terms of each step's peak beside the room that there is. `prediction` says in GiB what the first takes."""
    canvas, axes = new_canvas(_answer(result))
    axes.set_position((0.27, 0.36, 0.69, 0.48))
    if result.rows:
        _draw_plan(axes, result, prediction)
    said = "" if prediction is None else f"Predicted: {prediction:g} GiB."
    told = [f"{row['change']}: {_told(row)}" for row in result.rows]
    return badged(canvas, result.badge, result.parameters["setting"], *told, said)


def _answer(result: Result) -> str:
    if not result.rows:
        return f"Not worked out yet: {result.parameters['gpu']}"
    first, gpu = result.rows[0], result.parameters["gpu"]
    sizes = f"Needs {units.byte_text(first['peak'])}, {gpu} has {units.byte_text(first['room'])}"
    changes, last = result.parameters["changes"], result.rows[-1]
    if len(changes) == 2 and last["change"] == changes[1] and last["peak"] <= last["room"]:
        return f"{sizes}: enough with {changes[1]}"
    return f"{sizes}: {f'first change {changes[1]}' if len(changes) > 1 else result.parameters['answer'].split(',')[0].rstrip('.').lower()}"


def _told(row: Row) -> str:
    terms = ", ".join(f"{name} {units.byte_text(row[name])}" for name in TERMS if row[name])
    told = f"{units.byte_text(row['peak'])} at {row['moment']}: {terms}"
    if row["measured"] == RAN_OUT:
        return f"{told}; memory ran out"
    return f"{told}; measured {units.byte_text(row['measured'])}" if row["measured"] else told


def _draw_plan(axes: Axes, result: Result, prediction: float | None) -> None:
    rows = result.rows
    left = [0.0] * len(rows)
    for name in TERMS:
        sizes = [row[name] / GIB for row in rows]
        if any(sizes):
            look: dict[str, Any] = {"color": COLOURS[name], "hatch": HATCHES.get(name), "edgecolor": BLACK, "linewidth": 0.6}
            axes.barh(range(len(rows)), sizes, 0.55, left, label=name, **look)
            left = [start + size for start, size in zip(left, sizes, strict=True)]
    measured = {place: row["measured"] / GIB for place, row in enumerate(rows) if row["measured"] > 0}
    if measured:
        axes.plot(list(measured.values()), list(measured), "D", color=BLACK, markersize=6, label="measured")
    for place, row in enumerate(rows):
        if row["measured"] == RAN_OUT:
            axes.annotate("ran out", (left[place], place), (6, 0), textcoords="offset points", va="center", color=darker(VERMILLION))
    if prediction is not None:
        axes.plot(prediction, 0, marker="o", **hollow(BLUE, 12), label="your prediction")
    room = rows[0]["room"] / GIB
    axes.axvline(room, color=BLACK, linestyle=":", linewidth=1.6)
    most = max(room, prediction or 0, *left)
    side: dict[str, Any] = {"ha": "right", "xytext": (4, 2)} if room > most / 2 else {"ha": "left", "xytext": (-4, 2)}
    axes.annotate(f"room: {room:.3g} GiB", (room, -0.6), textcoords="offset points", va="bottom", annotation_clip=False, **side)
    axes.set(xlim=(0, 1.12 * most), ylim=(max(len(rows), 2) - 0.4, -0.6), xlabel="GiB at the fullest moment")
    axes.set_yticks(range(len(rows)), [shortened(row["change"], 122) for row in rows], fontsize=TEXT_POINTS)
    axes.grid(axis="y", visible=False)
    axes.figure.legend(loc="lower left", bbox_to_anchor=(0.01, 0.06), ncols=5, frameon=False, fontsize=TEXT_POINTS, columnspacing=1.2)


# The widget


GOOD = 0.2  # a prediction this near, relative to the result, is called good
NETWORKS = {
    "MLP, 8 × 2048": MLP(),
    "GPT, 6 × 512": GPT(width=512, layers=6, heads=8, tokens=512, vocabulary=8192),
    "GPT-2 small": GPT(),
    "GPT-2 medium": GPT(width=1024, layers=24, heads=16),
    "GPT-2 XL": GPT(width=1600, layers=48, heads=25),
    "ResNet-18": ResNet(),
    "ResNet, 4 × 3 blocks of 128": ResNet(width=128, blocks=3),
}
OWN = "your own"
_WIDE = {"description_width": "initial"}


class BudgetLab(Lab):
    """Choose a network and how it is trained, predict what a step takes, and see whether it fits a GPU and what to change first.

    `network` adds one of your own sizes: `BudgetLab(labkit.labs.GPT(width=256, layers=4, heads=4))`. Where the GPU in use is
    chosen, each step of the plan is measured too, if it can be.
    """

    question = "How many GiB does this training step take at its fullest moment?"
    unit = "GiB"

    def __init__(self, network: Network | None = None, batch: int = 8) -> None:
        self.networks = ({OWN: network} if network else {}) | NETWORKS
        self.network = choice("Network:", list(self.networks), OWN if network else "GPT-2 small", "17em")
        self.batch = widgets.Text(value=str(batch), description="Batch, rows:", style=_WIDE, layout=widgets.Layout(width="10em"))
        self.precision = choice("Precision:", list(PRECISIONS), "float32", "16em")
        self.optimizer = choice("Optimizer:", list(OPTIMIZERS), "Adam", "15em")
        self.checkpointing = widgets.Checkbox(value=False, description="checkpointing", indent=False, layout=widgets.Layout(width="9em"))
        self.micro_batches = choice("Micro-batches:", [2**power for power in range(8)], 1, "11em")
        self.gpus = choice("GPUs:", [1, 2, 4, 8, 16], 1, "8em")
        self.spread = choice("by", list(SPREADS), "DDP", "10em")
        self.gpu = choice("Each is:", list(gpu_models()), IN_USE, "16em")
        rows = [
            [self.network, self.batch, self.micro_batches],
            [self.precision, self.optimizer, self.checkpointing],
            [self.gpus, self.spread, self.gpu],
        ]
        super().__init__(*rows)

    def setting(self) -> Setting:
        """What is chosen. Raises ValueError for a batch that is none."""
        typed = self.batch.value.strip()
        if not (typed.isascii() and typed.isdigit() and 1 <= int(typed[:9]) <= MOST_ROWS):
            raise ValueError(f"“{typed}” is no batch: type a whole number of rows from 1 to {MOST_ROWS}.")
        return Setting(
            network=self.networks[self.network.value],
            batch=int(typed),
            precision=self.precision.value,
            optimizer=self.optimizer.value,
            checkpointing=self.checkpointing.value,
            gpus=self.gpus.value,
            spread=self.spread.value,
            micro_batches=self.micro_batches.value,
        )

    def experiment(self) -> Run:
        return memory_plan(self.setting(), self.gpu.value)

    def point(self, row: dict[str, Any]) -> str:
        return f"{row['change']}: {units.byte_text(row['peak'])}"

    def draw(self, result: Result, prediction: float | None) -> Figure:
        return plot_memory_plan(result, prediction)

    def verdict(self, result: Result, prediction: float) -> str:
        if not result.rows:
            return stays_open("Nothing was worked out", prediction)
        first = result.rows[0]
        peak = first["peak"] / GIB
        told = f"The formula says {peak:.3g} GiB, at its fullest in {first['moment']}; you predicted {prediction:g}"
        told += ". A good prediction! " if abs(prediction - peak) <= GOOD * peak else ". "
        if first["measured"] == RAN_OUT:
            told += "When it was tried, memory ran out. "
        elif first["measured"]:
            told += f"When it was tried: {first['measured'] / GIB:.3g} GiB. "
        return f"{told}Of {first['room'] / GIB:.3g} GiB on {result.parameters['gpu']}: {result.parameters['answer']}"
