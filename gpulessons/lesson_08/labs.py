"""Measure and draw the GPU memory of several processes that use one model, in three ways."""

from collections.abc import Iterator, Sequence
from typing import Any

import ipywidgets as widgets
import torch
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from gpulessons.lesson_08.sharing_process import take_part
from gputrace import units
from gputrace.figures.figure import (
    BESIDE,
    BLACK,
    BLUE,
    GREY,
    ORANGE,
    Figure,
    binary_ticks,
    darker,
    new_canvas,
)
from labkit.labs.experiment import Result, Row, Run, badge
from labkit.labs.figures import finished, hollow, in_style
from labkit.labs.panel import ExperimentPanel, one_of
from labkit.labs.predictions import stays_open
from labkit.processes import PATIENCE, children, context

MIB = 1 << 20
# For each way, the part of the first process and the part of each other process.
PARTS = {
    "a copy each": ("worker", "worker"),
    "shared weights": ("owner", "borrower"),
    "one server": ("server", "client"),
}
WAYS = tuple(PARTS)
MOST_PROCESSES = 8
WORK = 64 * MIB  # bytes that a request takes while it is answered
LARGEST = 1 << 34  # bytes
COLUMNS = {"way": "", "process": "", "context": "bytes", "weights": "bytes", "cache": "bytes"}
HELD = ("context", "weights", "cache")


def shared_model(ways: Sequence[str] = WAYS, processes: int = 3, weights: int = 512 * MIB) -> Run:
    """Measure the bytes of the GPU that each process holds when all use one model.

    "a copy each": each process has its own weights. "shared weights": the first process lends its
    weights to the others. "one server": the first process has the weights, and the others send it
    numbers. A request takes 64 MiB while it is answered. They stay in the cache of the process that
    answers. There is a row for each process: its CUDA `context` (the bytes that the GPU has lost
    beyond PyTorch's reserved memory), its own `weights`, and the rest of its reserved memory, the
    `cache`. Nothing is computed.

    Raises ValueError for other ways, processes outside 2 to 8, and sizes outside 1 MiB to 16 GiB.
    Raises RuntimeError if no GPU is in use.
    """
    chosen = [way for way in WAYS if way in ways]
    if not chosen or not set(ways) <= set(WAYS):
        raise ValueError(f"ways={ways!r}: choose from {', '.join(map(repr, WAYS))}")
    if type(processes) is not int or not 2 <= processes <= MOST_PROCESSES:
        raise ValueError(f"processes={processes!r}: give a whole number from 2 to {MOST_PROCESSES}")
    if type(weights) is not int or not MIB <= weights <= LARGEST:
        raise ValueError(
            f"weights={weights!r}: give a number of bytes from {MIB} (1 MiB) to {LARGEST} (16 GiB)"
        )
    parameters = {"ways": chosen, "processes": processes, "weights": weights, "work": WORK}
    rows = _points(chosen, processes, weights)
    return Run("shared_model", parameters, COLUMNS, badge(), len(chosen) * processes, rows)


def held_by_way(result: Result) -> dict[str, int]:
    """Return the bytes of the GPU that all processes together hold, for each way."""
    held = {}
    for way in dict.fromkeys(result.column("way")):
        held[way] = sum(sum(result.column(name, way=way)) for name in HELD)
    return held


def _points(ways: list[str], processes: int, weights: int) -> Iterator[Row]:
    torch.empty(1, device="cuda")  # creates this process's context, which does not count
    for way in ways:
        first, other = PARTS[way]
        yield from _rows(way, [first] + [other] * (processes - 1), weights)


def _rows(way: str, parts: list[str], weights: int) -> Iterator[Row]:
    """Run the processes of one way to use a model, and yield a row for each process.

    `parts` says what each process does. They end in reverse order, because a process that borrows
    weights must end before the one that lends them.
    """
    make = context()
    queues = [make.SimpleQueue() for _ in range(3)]
    lines = [make.Pipe() for _ in parts]
    arguments = [
        (theirs, part, weights, WORK, queues)
        for (_, theirs), part in zip(lines, parts, strict=True)
    ]
    with children(take_part, arguments) as started:
        for _, theirs in lines:
            theirs.close()  # Otherwise nobody would notice a child that dies.
        for number, ((line, _), part) in enumerate(zip(lines, parts, strict=True)):
            before = _used()
            line.send(len(parts) - 1)
            try:
                reserved, own = line.recv()
            except (EOFError, ConnectionResetError):
                raise RuntimeError(
                    f"process {number + 1} of “{way}” has ended. Its error is in the kernel's log."
                ) from None
            taken = _used() - before
            name = part
            if parts.count(part) > 1:
                name = f"{part} {number + (parts[0] == part)}"
            held = {"context": taken - reserved, "weights": own, "cache": reserved - own}
            yield {"way": way, "process": name, **held}
        for (line, _), process in reversed(list(zip(lines, started, strict=True))):
            line.close()
            process.join(PATIENCE)


def _used() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


# The figure


COLOURS = dict(zip(HELD, (GREY, BLUE, ORANGE), strict=True))
FILLED, THIN = 0.56, 0.16  # heights of a bar and of the recorded bar below it; rows are 1 apart
ROW, MARGIN = 0.83, 0.75  # inches of a row, and above and below all rows
GIB = 1 << 30


@in_style
def plot_shared_model(
    result: Result, recorded: Result | None = None, prediction: float | None = None
) -> Figure:
    """Draw a bar for each way, divided by process and by kind of memory.

    `prediction` is the predicted length of the first bar, in GiB.
    """
    canvas, axes = new_canvas(_finding(result))
    ways = [way for way in WAYS if way in result.column("way")]
    height = 2 * MARGIN + ROW * max(len(ways), 1)
    canvas.set_figheight(height)
    axes.set_position((0.16, MARGIN / height, 0.72, 1 - 2 * MARGIN / height))
    for row, way in enumerate(ways):
        _bar(axes, result, way, row)
        if recorded is not None and way in held_by_way(recorded):
            recorded_bar = {"facecolor": "none", "edgecolor": BLACK, "linestyle": "--"}
            axes.barh(row + (FILLED + THIN) / 2, held_by_way(recorded)[way], THIN, **recorded_bar)
    if prediction is not None and ways:
        above = prediction * GIB, -FILLED / 2 - 0.12
        axes.plot(*([value] for value in above), marker="o", **hollow(BLUE, 9))
        offset, side = (-9, 0), "right"
        if prediction * GIB < max(held_by_way(result).values()) / 2:
            offset, side = (9, 0), "left"
        style: Any = {**BESIDE, "ha": side, "color": darker(BLUE)}
        axes.annotate(f"predicted: {prediction:g} GiB", above, offset, **style)
    highest = [*held_by_way(result).values(), (prediction or 0) * GIB, MIB]
    if recorded is not None:
        highest += held_by_way(recorded).values()
    binary_ticks(axes, 1.02 * max(highest))
    size, unit = units.byte_unit(max(highest))
    ticks = axes.get_xticks()
    axes.set_xticks(ticks, [f"{tick / size:g} {unit}" if tick else "0" for tick in ticks])
    axes.set_yticks(range(len(ways)), [_on_two_lines(way) for way in ways])
    axes.set(ylim=(max(len(ways), 1) - 0.4, -0.6), xlabel="memory of the GPU")
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
    kinds = [
        Patch(facecolor=colour, edgecolor=BLACK, linewidth=0.6, label=kind)
        for kind, colour in COLOURS.items()
    ]
    place: Any = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2}
    axes.legend(handles=kinds, ncols=len(kinds), frameon=False, **place)
    said = ""
    if prediction is not None:
        said = f"Predicted: {prediction:g} GiB."
    return finished(canvas, result, recorded, _proof, said)


def _bar(axes: Axes, result: Result, way: str, row: int) -> None:
    """Draw the bar of one way in a row, process by process, and write the sum at its end.

    All sums have the unit of the longest bar.
    """
    size_of_unit, unit = units.byte_unit(max(held_by_way(result).values()))
    outline: Any = {"facecolor": "none", "edgecolor": BLACK, "linewidth": 1.2}
    end = 0
    for process in result.rows:
        if process["way"] != way:
            continue
        start = end
        for kind in HELD:
            axes.barh(row, process[kind], FILLED, left=end, color=COLOURS[kind])
            end += process[kind]
        axes.barh(row, end - start, FILLED, left=start, **outline)
    axes.annotate(f"{end / size_of_unit:.4g} {unit}", (end, row), (6, 0), **BESIDE)


def _on_two_lines(way: str) -> str:
    return "\n".join(way.rsplit(" ", 1))


def _finding(result: Result) -> str:
    sums = held_by_way(result)
    processes = result.parameters["processes"]
    if not result.rows:
        return "Not measured yet: not even one process"
    if len(sums) == 1:
        (way,) = sums
        count = len(result.rows)
        some = f"{count} process{'es' * (count > 1)}"
        return f"{some}, {way}: {units.byte_text(sums[way])} of the GPU"
    least, most = min(sums, key=lambda way: sums[way]), max(sums, key=lambda way: sums[way])
    size, unit = units.byte_unit(sums[most])  # one unit for both
    lowest, highest = (f"{sums[way] / size:.4g} {unit}" for way in (least, most))
    return f"For {processes} processes, {least} takes {lowest}, {most} {highest}"


def _proof(result: Result) -> str:
    parts = []
    for way, total in held_by_way(result).items():
        kinds = ", ".join(
            f"{kind} {units.byte_text(sum(result.column(kind, way=way)))}" for kind in HELD
        )
        parts.append(f"{way} {units.byte_text(total)} ({kinds})")
    return f"{'; '.join(parts)}."


# The widget


WEIGHTS = (64 * MIB, 512 * MIB, 2 * GIB, 7 * GIB)
PROCESSES = range(2, 7)
GOOD = 0.1  # A prediction within this share of the measured number is called good.


class SharingLab(ExperimentPanel):
    """Lab in which learners choose how processes share a model, and predict their GPU memory.

    Then the processes start one by one. `way`, `processes` and `weights` (bytes: 64 MiB, 512 MiB,
    2 GiB or 7 GiB) are chosen at first. `shared_model` explains them.
    """

    question = "How many GiB of the GPU do these processes take together, their contexts included?"
    unit = "GiB"

    def __init__(self, way: str = WAYS[0], processes: int = 3, weights: int = 512 * MIB) -> None:
        ways = [(way, way) for way in WAYS]
        counts = [(str(count), count) for count in PROCESSES]
        sizes = [(units.byte_text(size), size) for size in WEIGHTS]
        self.choices = {
            "way": _choice("way", ways, way),
            "processes": _choice("processes", counts, processes),
            "weights": _choice("weights", sizes, weights),
        }
        super().__init__(list(self.choices.values()))
        told = (
            f"A request takes {units.byte_text(WORK)} more while it is answered, "
            "in the process that answers it."
        )
        question, row, *others = self.children
        self.children = (question, row, widgets.HTML(f"<p>{told}</p>"), *others)

    def experiment(self) -> Run:
        chosen = {name: choice.value for name, choice in self.choices.items()}
        return shared_model([chosen["way"]], chosen["processes"], chosen["weights"])

    def point(self, row: dict[str, Any]) -> str:
        sizes = ", ".join(f"{name} {units.byte_text(row[name])}" for name in HELD)
        return f"{row['process']} holds {sizes}"

    def draw(self, result: Result, prediction: float | None) -> Figure:
        return plot_shared_model(result, result.recorded(), prediction)

    def verdict(self, result: Result, prediction: float) -> str:
        if len(result.rows) < result.parameters["processes"]:
            return stays_open("Not all processes were started", prediction)
        taken = sum(held_by_way(result).values()) / GIB
        was = f"Together they take {taken:.3g} GiB; you predicted {prediction:g}"
        if abs(prediction - taken) <= GOOD * taken:
            return f"{was}. A good prediction!"
        way = "high" if prediction > taken else "low"
        return f"{was}, {abs(prediction - taken):.3g} too {way}."


def _choice(name: str, options: list[tuple[str, Any]], value: Any) -> widgets.Dropdown:
    one_of(value, (allowed for _, allowed in options))
    return widgets.Dropdown(
        description=name, options=options, value=value, layout=widgets.Layout(width="17em")
    )
