"""What a training loop with leaks keeps: the bytes allocated after each step, and who holds them in the end."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from html import escape
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

# The lines that make a training leak, by the name of the leak. That of "retain_graph" takes the place of the backward line.
LEAKS = {
    "summed losses": "total += loss",
    "kept losses": "losses.append(loss)",
    "hook": "model[1].register_forward_hook(lambda module, inputs, output: seen.append(output))",
    "kept batches": "history.append((x, output))",
    "evaluation": "valid += nn.functional.mse_loss(model(x + 1), y + 1)",
    "retain_graph": "loss.backward(retain_graph=True)",
}
ALONE = tuple(
    LEAKS
)[
    :5
]  # those that are worth a training of their own: a retained graph goes with its loss, if nothing keeps that
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
    """Trains a small network with leaks built in: a training for each of `leaks`, or with `together` one that has them all.

    The leaks are those of `LEAKS`, by name. One row a step: `allocated` after it, and by how much that has `grown` since the first step
    began, two that do not count aside. With `together`, the last row names the `holder` of the largest tensor that leaked, if one did.
    A step's input takes 1 MiB, and so does the hidden layer; target and output take half of that each.

    Raises ValueError for other leaks, or steps outside 2 to 1000, RuntimeError when no GPU is in use.
    """
    chosen = list(dict.fromkeys(leaks))
    if not set(chosen) <= set(LEAKS) or not (chosen or together):
        raise ValueError(
            f"leaks={leaks!r}: choose from {', '.join(map(repr, LEAKS))}; none of them only with together=True"
        )
    if type(steps) is not int or not 2 <= steps <= MOST_STEPS:
        raise ValueError(f"steps={steps!r}: give a whole number from 2 to {MOST_STEPS}")
    trainings = [chosen] if together else [[leak] for leak in chosen]
    parameters = {"leaks": chosen, "steps": steps, "together": together}
    return Run(
        "leaky_training",
        parameters,
        COLUMNS,
        badge(),
        steps * len(trainings),
        _points(trainings, steps, together),
    )


def script(leaks: Sequence[str]) -> tuple[str, str]:
    """The training's source: what comes before the loop, and a step."""
    before = _SET_UP + (f"{LEAKS['hook']}\n" if "hook" in leaks else "")
    step = (
        _STEP.replace("loss.backward()", LEAKS["retain_graph"])
        if "retain_graph" in leaks
        else _STEP
    )
    return before, step + "".join(
        f"{LEAKS[leak]}\n"
        for leak in LEAKS
        if leak in leaks and leak not in ("hook", "retain_graph")
    )


def growth(result: Result) -> dict[str, float]:
    """Bytes that each training added a step, as far as it was measured."""
    rows = {row["leak"]: row for row in result.rows}  # the last of each
    return {leak: row["grown"] / row["step"] for leak, row in rows.items()}


def _points(trainings: list[list[str]], steps: int, names_holder: bool) -> Iterator[Row]:
    for leaks in trainings:
        yield from _training(leaks, steps, names_holder)


def _training(leaks: list[str], steps: int, names_holder: bool) -> Iterator[Row]:
    before, step = (compile(source, "<string>", "exec") for source in script(leaks))
    names: dict[str, Any] = {
        "__name__": "training"
    }  # a namespace of its own: what it holds is told by name
    try:
        exec(before, names)
        exec(step, names)
        exec(step, names)
        start = torch.cuda.memory_allocated()

        def row(number: int) -> Row:
            exec(step, names)
            allocated = torch.cuda.memory_allocated()
            return {
                "leak": " + ".join(leaks) or NO_LEAK,
                "step": number,
                "allocated": allocated,
                "grown": allocated - start,
                "holder": "",
            }

        with record(timeline=False) if names_holder else nullcontext() as trace:
            for number in range(1, steps):
                yield row(number)
        last = row(steps)  # after it nothing is left of the recorded steps, but for what leaked
        leaked = trace.leaks() if trace is not None else []
        yield {**last, "holder": leaked[0].holders[0].text if leaked else ""}
    finally:
        names.clear()  # the hook and these names hold each other


# The figure


MIB = 1 << 20
LOOKS = ((VERMILLION, "o"), (BLUE, "s"), (ORANGE, "^"), (GREEN, "D"), (SKY_BLUE, "v"), (BLACK, "x"))


@in_style
def plot_leaky_training(
    result: Result, recorded: Result | None = None, prediction: float | None = None
) -> Figure:
    """What each training has kept after each step. `prediction` says in MiB what is kept a step; it is drawn at the last one."""
    kept = growth(result)
    canvas, axes = new_canvas(_finding(result, kept))
    labels = [_line(axes, result, leak, "-", index) for index, leak in enumerate(kept)]
    for index, leak in enumerate(kept):
        if recorded is not None and leak in growth(recorded):
            _line(axes, recorded, leak, "--", index)
    guess = _predicted(axes, result, prediction)
    highest = [
        *result.column("grown"),
        *(recorded.column("grown") if recorded else []),
        guess or 0,
        MIB,
    ]
    byte_ticks(axes, 1.08 * max(highest), 6)
    axes.set_ylim(bottom=-0.02 * axes.get_ylim()[1])  # a line at 0 is seen
    axes.set(xlabel="training step", ylabel="kept since the start")
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    label_ends(
        axes,
        [*labels, (result.rows[-1]["step"], guess, f"predicted: {prediction:g}", BLUE)]
        if guess is not None
        else labels,
    )
    said = "" if prediction is None else f"Predicted: {prediction:g} MiB a step."
    return finished(canvas, result, recorded, _proof, _held(result), said)


def _finding(result: Result, kept: dict[str, float]) -> str:
    if not kept:
        return "Not measured yet: not even one step"
    if len(kept) == 1:
        nbytes = next(iter(kept.values()))
        return (
            f"Memory grows by {units.byte_text(nbytes)} a step"
            if nbytes
            else "Memory does not grow"
        )
    most, least = max(kept, key=lambda leak: kept[leak]), min(kept, key=lambda leak: kept[leak])
    nothing = units.byte_text(kept[least]) if kept[least] else "nothing"
    return f"“{most}” keeps {units.byte_text(kept[most])} a step, “{least}” {nothing}"


def _proof(result: Result) -> str:
    told = ", ".join(f"{leak} {units.byte_text(nbytes)}" for leak, nbytes in growth(result).items())
    return f"kept a step: {told}."


def _held(result: Result) -> str:
    return "".join(f"Held by {holder}." for holder in result.column("holder") if holder)


def _line(
    axes: Axes, result: Result, leak: str, dashes: str, index: int
) -> tuple[float, float, str, str]:
    """Draw what one training kept; returns the name for the line's end."""
    steps, grown = result.column("step", leak=leak), result.column("grown", leak=leak)
    colour, marker = LOOKS[index % len(LOOKS)]
    if dashes == "-":
        axes.plot(steps, grown, dashes, color=colour, marker=marker, clip_on=False)
    else:
        axes.plot(steps, grown, dashes, color=darker(colour), linewidth=1.4)
    return steps[-1], grown[-1], f"{leak.count('+') + 1} leaks" if "+" in leak else leak, colour


def _predicted(axes: Axes, result: Result, prediction: float | None) -> float | None:
    """Draw the predicted bytes at the last step as a hollow marker, and return them."""
    if prediction is None or not result.rows:
        return None
    step = result.rows[-1]["step"]
    guess = prediction * MIB * step
    axes.plot([step], [guess], marker="o", clip_on=False, **hollow(BLUE))
    return guess


# The widget


NEAR = 0.02  # MiB: a prediction this close is right


class LeakLab(ExperimentPanel):
    """Switch leaks of a training loop on, predict how many MiB it keeps each step, and watch it; the end names who holds them.

    `leaks` are those switched on at first and `steps` the loop's, as in `leaky_training`.
    """

    question = "How many MiB does this loop keep each step?"
    unit = "MiB a step"
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
        """Those that are switched on."""
        return [name for name, switch in self.switches.items() if switch.value]

    def experiment(self) -> Run:
        return leaky_training(self.leaks, self.steps, together=True)

    def point(self, row: dict[str, Any]) -> str:
        return f"{units.byte_text(row['allocated'])} allocated, {units.byte_text(row['grown'])} more than at the start"

    def draw(self, result: Result, prediction: float | None) -> Figure:
        return plot_leaky_training(result, result.recorded(), prediction)

    def verdict(self, result: Result, prediction: float) -> str:
        if not result.rows:
            return stays_open("No step was measured", prediction)
        kept = next(iter(growth(result).values())) / MIB
        told = f"The loop keeps {kept:.4g} MiB a step; you predicted {prediction:g}"
        told += (
            ". A good prediction!"
            if abs(prediction - kept) <= NEAR
            else f", {abs(prediction - kept):.4g} too {_way(prediction, kept)}."
        )
        holder = result.rows[-1]["holder"]
        return f"{told} The largest tensor that leaked is held by {holder}." if holder else told

    def _chosen(self) -> None:
        self._show_source()
        super()._chosen()

    def _show_source(self) -> None:
        before, step = script(self.leaks)
        loop = f"for _ in range({self.steps}):\n" + "".join(
            f"    {line}\n" for line in step.splitlines()
        )
        leaking = {LEAKS[name] for name in self.leaks}
        lines = [
            (f"<b>{escape(line)}</b>" if line.strip() in leaking else escape(line))
            for line in (before + "\n" + loop).splitlines()
        ]
        self.source.value = "<pre style='line-height: 1.3'>" + "\n".join(lines) + "</pre>"


def _way(prediction: float, kept: float) -> str:
    return "high" if prediction > kept else "low"
