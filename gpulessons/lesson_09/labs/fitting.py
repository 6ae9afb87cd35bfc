"""Does a training fit a GPU, and what should be changed first? The memory of a step, measured."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import ipywidgets as widgets
from matplotlib.axes import Axes

from gpulessons.lesson_09 import training
from gpulessons.lesson_09.training import MOST_GPUS, MOST_ROWS, Setting, StepMemory, fits, measured
from gpulessons.networks import GPT, MLP, OPTIMIZERS, PRECISIONS, Network, ResNet
from gputrace import units
from gputrace.figures.figure import (
    BLACK,
    BLUE,
    CATEGORY_COLOURS,
    CATEGORY_HATCHES,
    TEXT_POINTS,
    Figure,
    new_canvas,
    shortened,
)
from labkit.labs.experiment import Result, Row, Run
from labkit.labs.figures import badged, hollow, in_style
from labkit.labs.panel import ExperimentPanel, choice
from labkit.labs.predictions import stays_open
from virtualgpu import profiles
from virtualgpu.machines import DEFAULT_MODEL, with_maker

WORTH = 0.98  # ignore a change that leaves more of the peak than this
AMPERE = 8  # the first major compute capability with fast bfloat16


class PlanStep(NamedTuple):
    """One step of a plan: what is changed, the changed setting, and its memory."""

    change: str
    setting: Setting
    memory: StepMemory


def plan(setting: Setting, model: str) -> Iterator[PlanStep]:
    """Yield the setting unchanged, and then change after change until it fits or nothing helps.

    Changes are tried in order of their price. The first that makes it fit is taken. If none does, the
    plan takes the one that saves most, unless a cheaper one saves nearly as much.
    """
    here = PlanStep("as chosen", setting, measured(setting, model))
    yield here
    while not fits(here.memory, model):
        best = here
        for change, other in changes(here.setting, model):
            step = PlanStep(change, other, measured(other, model))
            if step.memory.peak < WORTH * best.memory.peak:
                best = step
            if fits(best.memory, model):
                break
        if best is here:
            return
        here = best
        yield here


def changes(setting: Setting, model: str) -> Iterator[tuple[str, Setting]]:
    """Yield what may be changed, in order of the price. The network stays, and the rows of a step.

    Half precision and a fused optimizer cost nothing. Micro-batches cost time for smaller kernels, and
    checkpointing costs a second forward pass. Momentum instead of Adam trains differently. More GPUs
    cost money.
    """
    if not PRECISIONS[setting.precision]:
        half = "bfloat16" if profiles.load(model).major >= AMPERE else "float16"
        yield f"autocast to {half}", replace(setting, precision=f"autocast {half}")
    if setting.optimizer == "Adam":
        yield "a fused Adam", replace(setting, optimizer="Adam fused")
    more = [2**power for power in range(1, 21) if setting.micro_batches < 2**power <= setting.batch // setting.gpus]
    if more:
        fewest = _fewest_that_fit(setting, more, model)
        yield f"{fewest} micro-batches", replace(setting, micro_batches=fewest)
    if not setting.checkpointing:
        yield "checkpointing", replace(setting, checkpointing=True)
    if setting.optimizer.startswith("Adam"):
        yield "momentum instead of Adam", replace(setting, optimizer="SGD momentum")
    gpus = 2 * setting.gpus
    if gpus <= MOST_GPUS and gpus * setting.micro_batches <= setting.batch:
        yield f"{gpus} GPUs", replace(setting, gpus=gpus)


def _fewest_that_fit(setting: Setting, counts: list[int], model: str) -> int:
    """Search the fewest micro-batches with which a step fits; the most where none fits."""
    first, last = 0, len(counts) - 1
    while first < last:
        middle = (first + last) // 2
        if fits(measured(replace(setting, micro_batches=counts[middle]), model), model):
            last = middle
        else:
            first = middle + 1
    return counts[first]


TERMS = (
    "parameters",
    "optimizer state",
    "gradients",
    "activations",
    "in flight",
    "workspace",
    "other",
)
SIZES = dict.fromkeys((*TERMS, "peak", "room"), "bytes")
COLUMNS = {"change": "", "phase": "", **SIZES}
PHASES = {
    "forward": "the forward pass",
    "backward": "the backward pass",
    "step": "the optimizer's step",
}
MOST_STEPS = 9  # of a plan


def memory_plan(setting: Setting, on: str = DEFAULT_MODEL) -> Run:
    """Measure whether a training fits a GPU, and what to change first.

    `on` is a model of GPU. Each setting is trained for some steps on virtual GPUs of this model that
    have memory enough and compute no values. Each row has the memory of the last step at its fullest
    moment, by category, the `phase` of that moment, and the `room` that PyTorch has on such a GPU. The
    first row is the setting unchanged, and each other row has one more change.

    Raises ValueError for a GPU that has no profile.
    """
    name = profiles.load(on).name
    parameters: dict[str, Any] = {"setting": str(setting), "gpu": name, "whole": False}
    badge = f"measured on virtual GPUs, modelled on {with_maker(name)}"
    run = Run("memory_plan", parameters, COLUMNS, badge, MOST_STEPS, iter(()))
    run.points = _points(run, setting, on)
    return run


def _points(run: Run, setting: Setting, model: str) -> Iterator[Row]:
    for step in plan(setting, model):
        told = {"change": step.change, "phase": PHASES[step.memory.phase]}
        sizes = {"peak": step.memory.peak, "room": training.room(model)}
        yield told | sizes | {term: step.memory.terms[term] for term in TERMS}
    run.parameters["whole"] = True
    run.total = len(run.rows)


def answer(result: Result) -> str:
    """Whether it fits and what to change first, in a sentence or two."""
    first, last = result.rows[0], result.rows[-1]
    if _fits(first):
        return "It fits."
    if len(result.rows) == 1 and result.parameters["whole"]:
        others = "cut the network in pieces, or give each GPU a share of its weights"
        return f"It does not fit, and none of these changes helps: {others}."
    told = "It does not fit." if first["peak"] > first["room"] else "It hardly fits."
    names = [row["change"] for row in result.rows[1:]]
    if names:
        then = f"; then {', '.join(names[1:])}" if names[1:] else ""
        told += f" First change: {names[0]}{then}."
    if _fits(last) or not result.parameters["whole"]:
        return told
    return f"{told} Even so it does not fit."


def _fits(row: Row) -> bool:
    return row["peak"] <= training.SHARE * row["room"]


# The figure


GIB = 1 << 30


@in_style
def plot_memory_plan(result: Result, prediction: float | None = None) -> Figure:
    """The terms of each step's peak beside the room that there is. `prediction` says in GiB what the first takes."""
    canvas, axes = new_canvas(_finding(result))
    axes.set_position((0.27, 0.36, 0.69, 0.48))
    if result.rows:
        _draw_plan(axes, result, prediction)
    said = "" if prediction is None else f"Predicted: {prediction:g} GiB."
    told = [f"{row['change']}: {_told(row)}" for row in result.rows]
    return badged(canvas, result.badge, result.parameters["setting"], *told, said)


def _finding(result: Result) -> str:
    gpu = result.parameters["gpu"]
    if not result.rows:
        return f"Not measured yet: {gpu}"
    first, last = result.rows[0], result.rows[-1]
    sizes = f"Needs {units.byte_text(first['peak'])}, {gpu} has {units.byte_text(first['room'])}"
    names = [row["change"] for row in result.rows[1:]]
    if not names:
        return f"{sizes}: {answer(result).split(',')[0].rstrip('.').lower()}"
    if len(names) == 1 and _fits(last):
        return f"{sizes}: enough with {names[0]}"
    return f"{sizes}: first change {names[0]}"


def _told(row: Row) -> str:
    terms = ", ".join(f"{name} {units.byte_text(row[name])}" for name in TERMS if row[name])
    return f"{units.byte_text(row['peak'])} in {row['phase']}: {terms}"


def _draw_plan(axes: Axes, result: Result, prediction: float | None) -> None:
    rows = result.rows
    left = [0.0] * len(rows)
    for name in TERMS:
        sizes = [row[name] / GIB for row in rows]
        if any(sizes):
            look: dict[str, Any] = {"color": CATEGORY_COLOURS[name], "label": name}
            look |= {"hatch": CATEGORY_HATCHES.get(name), "edgecolor": BLACK, "linewidth": 0.6}
            axes.barh(range(len(rows)), sizes, 0.55, left, **look)
            left = [start + size for start, size in zip(left, sizes, strict=True)]
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


class BudgetLab(ExperimentPanel):
    """Choose a network and how it is trained, predict what a step takes, and see whether it fits a GPU and what to change first.

    `network` adds one of your own sizes: `BudgetLab(GPT(width=256, layers=4, heads=4))`.
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
        self.spread = choice("by", list(training.SPREADS), "DDP", "10em")
        self.gpu = choice("Each is:", profiles.names(), DEFAULT_MODEL, "16em")
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
            return stays_open("Nothing was measured", prediction)
        first = result.rows[0]
        peak = first["peak"] / GIB
        told = f"It takes {peak:.3g} GiB, at its fullest in {first['phase']}; "
        told += f"you predicted {prediction:g}. "
        if abs(prediction - peak) <= GOOD * peak:
            told += "A good prediction! "
        there = f"{first['room'] / GIB:.3g} GiB on {result.parameters['gpu']}"
        return f"{told}Of {there}: {answer(result)}"
