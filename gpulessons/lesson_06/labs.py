"""Run and draw a training loop with leaks: the bytes after each step, and what holds them."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from html import escape
from textwrap import indent
from typing import Any

import ipywidgets as widgets
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from gputrace import record, units
from gputrace.figures.figure import (
    BLACK,
    BLUE,
    GREEN,
    ORANGE,
    SKY_BLUE,
    VERMILLION,
    Figure,
    byte_ticks,
    darker,
    label_ends,
    new_canvas,
)
from labkit.labs.experiment import Result, Row, Run, badge
from labkit.labs.figures import finished, hollow, in_style
from labkit.labs.panel import ExperimentPanel, switches
from labkit.labs.predictions import stays_open

# The lines that make a training leak, by the name of the leak. The line of "retain_graph" replaces
# the line with `loss.backward()`.
LEAKS = {
    "summed losses": "total += loss",
    "kept losses": "losses.append(loss)",
    "hook": "model[1].register_forward_hook(lambda module, inputs, output: seen.append(output))",
    "kept batches": "history.append((x, output))",
    "evaluation": "valid += nn.functional.mse_loss(model(x + 1), y + 1)",
    "retain_graph": "loss.backward(retain_graph=True)",
}
# The leaks that show in a training of their own. A retained graph is freed with its loss.
ALONE = tuple(leak for leak in LEAKS if leak != "retain_graph")
STEPS = 6
MOST_STEPS = 1000
COLUMNS = {"leak": "", "step": "", "allocated": "bytes", "grown": "bytes", "holder": ""}
NO_LEAK = "no leak"

_SET_UP = """import torch
from torch import nn

model = nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 64)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
total = valid = 0
losses, seen, history = [], [], []
"""
_STEP = """x = torch.ones(2048, 128, device="cuda")
y = torch.ones(2048, 64, device="cuda")
output = model(x)
loss = nn.functional.mse_loss(output, y)
optimizer.zero_grad()
loss.backward()
optimizer.step()
"""


def leaky_training(leaks: Sequence[str] = ALONE, steps: int = STEPS, together: bool = False) -> Run:
    """Train a small network with leaks: one training for each leak, or one with all `together`.

    `leaks` are names of `LEAKS`. Each step has a row with the bytes `allocated` after it, and the
    bytes `grown` since the first step began. Two warm-up steps come before. With `together`, the
    last row names the `holder` of the largest tensor that leaked. A step's input takes 1 MiB, and
    so does the hidden layer. Target and output take 0.5 MiB each.

    Raises ValueError for other leaks and for steps outside 2 to 1000, and RuntimeError if no GPU is
    in use.
    """
    chosen = list(dict.fromkeys(leaks))
    if not set(chosen) <= set(LEAKS) or not (chosen or together):
        raise ValueError(
            f"expected leaks of {', '.join(map(repr, LEAKS))}, got {leaks!r}. "
            "No leak is possible only with together=True."
        )
    if type(steps) is not int or not 2 <= steps <= MOST_STEPS:
        raise ValueError(f"expected a whole number from 2 to {MOST_STEPS} for steps, got {steps!r}")
    if together:
        trainings = [chosen]
    else:
        trainings = [[leak] for leak in chosen]
    parameters = {"leaks": chosen, "steps": steps, "together": together}
    rows = _points(trainings, steps, together)
    return Run("leaky_training", parameters, COLUMNS, badge(), steps * len(trainings), rows)


def script(leaks: Sequence[str]) -> tuple[str, str]:
    """Return the source of the training: the code before the loop, and the code of a step."""
    before, step = _SET_UP, _STEP
    if "hook" in leaks:
        before += f"{LEAKS['hook']}\n"
    if "retain_graph" in leaks:
        step = step.replace("loss.backward()", LEAKS["retain_graph"])
    for leak, line in LEAKS.items():
        if leak in leaks and leak not in ("hook", "retain_graph"):
            step += f"{line}\n"
    return before, step


def growth(result: Result) -> dict[str, float]:
    """Return the bytes that each training added per step, as far as it was measured."""
    rows = {row["leak"]: row for row in result.rows}  # the last row of each training
    return {leak: row["grown"] / row["step"] for leak, row in rows.items()}


def _points(trainings: list[list[str]], steps: int, names_holder: bool) -> Iterator[Row]:
    for leaks in trainings:
        yield from _training(leaks, steps, names_holder)


def _training(leaks: list[str], steps: int, names_holder: bool) -> Iterator[Row]:
    before, step = (compile(source, "<string>", "exec") for source in script(leaks))
    names: dict[str, Any] = {"__name__": "training"}  # The trace names what the namespace holds.
    try:
        exec(before, names)
        exec(step, names)
        exec(step, names)
        start = torch.cuda.memory_allocated()

        def row(number: int) -> Row:
            exec(step, names)
            allocated = torch.cuda.memory_allocated()
            taken = {"step": number, "allocated": allocated, "grown": allocated - start}
            return {"leak": " + ".join(leaks) or NO_LEAK, **taken, "holder": ""}

        with record(timeline=False) if names_holder else nullcontext() as trace:
            for number in range(1, steps):
                yield row(number)
        last = row(steps)  # After this step, only leaked tensors of the recorded steps are left.
        holder = ""
        if trace is not None:
            leaked = trace.leaks()
            if leaked:
                holder = leaked[0].holders[0].text
        yield {**last, "holder": holder}
    finally:
        names.clear()  # The hook and these names hold each other.


# The figure


MIB = 1 << 20
STYLES = (
    (VERMILLION, "o"),
    (BLUE, "s"),
    (ORANGE, "^"),
    (GREEN, "D"),
    (SKY_BLUE, "v"),
    (BLACK, "x"),
)


@in_style
def plot_leaky_training(
    result: Result, recorded: Result | None = None, prediction: float | None = None
) -> Figure:
    """Draw the bytes that each training keeps after each step.

    `prediction` is the predicted growth in MiB per step. The figure marks it at the last step.
    """
    kept = growth(result)
    canvas, axes = new_canvas(_finding(result, kept))
    labels = [_line(axes, result, leak, "-", index) for index, leak in enumerate(kept)]
    for index, leak in enumerate(kept):
        if recorded is not None and leak in growth(recorded):
            _line(axes, recorded, leak, "--", index)
    guess = _predicted(axes, result, prediction)
    recorded_rows = []
    if recorded:
        recorded_rows = recorded.column("grown")
    highest = max([*result.column("grown"), *recorded_rows, guess or 0, MIB])
    byte_ticks(axes, 1.08 * highest, 6)
    axes.set_ylim(bottom=-0.02 * axes.get_ylim()[1])  # so that a line at 0 is visible
    axes.set(xlabel="training step", ylabel="kept since the start")
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    if guess is not None:
        labels.append((result.rows[-1]["step"], guess, f"predicted: {prediction:g}", BLUE))
    label_ends(axes, labels)
    said = ""
    if prediction is not None:
        said = f"Predicted: {prediction:g} MiB per step."
    return finished(canvas, result, recorded, _proof, _held(result), said)


def _finding(result: Result, kept: dict[str, float]) -> str:
    if not kept:
        return "Not measured yet: not even one step"
    if len(kept) == 1:
        nbytes = next(iter(kept.values()))
        if not nbytes:
            return "Memory does not grow"
        return f"Memory grows by {units.byte_text(nbytes)} per step"
    most, least = max(kept, key=lambda leak: kept[leak]), min(kept, key=lambda leak: kept[leak])
    nothing = "nothing"
    if kept[least]:
        nothing = units.byte_text(kept[least])
    return f"“{most}” keeps {units.byte_text(kept[most])} per step, “{least}” {nothing}"


def _proof(result: Result) -> str:
    told = ", ".join(f"{leak} {units.byte_text(nbytes)}" for leak, nbytes in growth(result).items())
    return f"kept per step: {told}."


def _held(result: Result) -> str:
    return "".join(f"Held by {holder}." for holder in result.column("holder") if holder)


def _line(
    axes: Axes, result: Result, leak: str, dashes: str, index: int
) -> tuple[float, float, str, str]:
    """Draw the bytes that one training kept, and return the label for the end of the line.

    `leak` is the name of the leak, and `index` the index of the line's colour.
    """
    steps, grown = result.column("step", leak=leak), result.column("grown", leak=leak)
    colour, marker = STYLES[index % len(STYLES)]
    if dashes == "-":
        axes.plot(steps, grown, dashes, color=colour, marker=marker, clip_on=False)
    else:
        axes.plot(steps, grown, dashes, color=darker(colour), linewidth=1.4)
    name = leak
    if "+" in leak:
        name = f"{leak.count('+') + 1} leaks"
    return steps[-1], grown[-1], name, colour


def _predicted(axes: Axes, result: Result, prediction: float | None) -> float | None:
    """Draw the predicted bytes at the last step as a hollow marker, and return the bytes.

    `prediction` is the growth in MiB per step, or None.
    """
    if prediction is None or not result.rows:
        return None
    step = result.rows[-1]["step"]
    guess = prediction * MIB * step
    axes.plot([step], [guess], marker="o", clip_on=False, **hollow(BLUE))
    return guess


# The widget


NEAR = 0.02  # MiB. A prediction within this distance is right.


class LeakLab(ExperimentPanel):
    """Lab in which learners switch leaks on, and predict how many MiB the loop keeps per step.

    Then they run the loop and see what holds the memory. `leaks` are switched on at first. `leaks`
    and `steps` are the arguments of `leaky_training`.
    """

    question = "How many MiB does this loop keep each step?"
    unit = "MiB per step"
    zero_is_possible = True

    def __init__(self, leaks: Sequence[str] = ("kept losses",), steps: int = STEPS) -> None:
        self.steps = steps
        self.switches = switches(leaks, LEAKS, "11em")
        self.source = widgets.HTML()
        super().__init__(list(self.switches.values()))
        question, row, *others = self.children
        self.children = (question, row, self.source, *others)
        self._show_source()

    @property
    def leaks(self) -> list[str]:
        """The leaks that are switched on."""
        return [name for name, switch in self.switches.items() if switch.value]

    def experiment(self) -> Run:
        return leaky_training(self.leaks, self.steps, together=True)

    def point(self, row: dict[str, Any]) -> str:
        allocated, grown = units.byte_text(row["allocated"]), units.byte_text(row["grown"])
        return f"{allocated} allocated, {grown} more than at the start"

    def draw(self, result: Result, prediction: float | None) -> Figure:
        return plot_leaky_training(result, result.recorded(), prediction)

    def verdict(self, result: Result, prediction: float) -> str:
        if not result.rows:
            return stays_open("No step was measured", prediction)
        kept = next(iter(growth(result).values())) / MIB
        told = f"The loop keeps {kept:.4g} MiB per step; you predicted {prediction:g}"
        off = prediction - kept
        if abs(off) <= NEAR:
            told += ". A good prediction!"
        elif off > 0:
            told += f", {off:.4g} too high."
        else:
            told += f", {-off:.4g} too low."
        holder = result.rows[-1]["holder"]
        if not holder:
            return told
        return f"{told} The largest tensor that leaked is held by {holder}."

    def _chosen(self) -> None:
        self._show_source()
        super()._chosen()

    def _show_source(self) -> None:
        before, step = script(self.leaks)
        loop = f"for _ in range({self.steps}):\n{indent(step, '    ')}"
        leaking = {LEAKS[name] for name in self.leaks}
        lines = []
        for line in (before + "\n" + loop).splitlines():
            shown = escape(line)
            if line.strip() in leaking:
                shown = f"<b>{shown}</b>"
            lines.append(shown)
        self.source.value = "<pre style='line-height: 1.3'>" + "\n".join(lines) + "</pre>"
