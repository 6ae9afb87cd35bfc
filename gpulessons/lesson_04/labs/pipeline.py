"""One training step of a network that is cut into stages, a GPU each: what every GPU does when, and the memory that it takes."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from matplotlib.axes import Axes
from torch import nn

from gpulessons.lesson_04.labs.schedules import FORWARD, ONE_BATCH, SCHEDULES, bubble, launches, order
from gpulessons.lesson_04.labs.work import (
    MILLISECOND,
    add_legend,
    draw_bars,
    draw_memory,
    mark,
    memory_in_words,
    percent,
    place_panels,
    waiting,
    waiting_finding,
    waits_in_words,
)
from gpulessons.networks import linear_layers
from gputrace import units
from gputrace.figures.figure import BESIDE, BLACK, TEXT_POINTS, Figure, new_canvas
from labkit import machine
from labkit.labs.experiment import Result, Row, Run, badge, checked_count
from labkit.labs.figures import badged, hollow, in_style
from labkit.labs.panel import ExperimentPanel, choice, switches
from labkit.labs.predictions import stays_open

WIDTH, BATCH = 4096, 16384
LARGEST = 1 << 16
WARM_UP = 1  # steps that do not count
COLUMNS = {"schedule": "", "stage": "", "work": "", "micro_batch": "", "start": "seconds", "seconds": "seconds", "peak": "bytes"}


def pipeline_step(
    layers: Sequence[int] = (2, 2, 2, 2),
    micro_batches: int = 8,
    schedules: Sequence[str] = SCHEDULES,
    link: int = 1,
    width: int = WIDTH,
    batch: int = BATCH,
) -> Run:
    """What each stage of a pipeline does when, in one step of forward and backward under each of the `schedules`.

    `layers` says how many linear layers, each with ReLU, every stage has: stage i lies on GPU i. The batch is cut into
    `micro_batches`, but for the schedule "one batch". What is sent from GPU to GPU goes through streams of its own, so that it makes
    no other work wait; each tensor is sent `link` times, which makes the link so many times slower. The first stage computes the gradient
    of its input too, as though layers came before it: so equal stages have equal work.

    One row for a forward or backward of a micro-batch on a stage: when its GPU began it and for how long it kept it, in seconds since
    the step's start; `peak` is the most memory that the step took on that GPU, beyond parameters and gradients. Virtual GPUs compute
    no values meanwhile. Raises ValueError for what is out of bounds, RuntimeError when no GPU is in use.
    """
    name = badge()
    there = machine.in_use().count
    if not isinstance(layers, list | tuple) or not 1 <= len(layers) <= there or not all(type(n) is int and 1 <= n <= 64 for n in layers):
        raise ValueError(f"layers={layers!r}: give the number of layers, 1 to 64, of each of 1 to {there} stages, as there are GPUs in use")
    if isinstance(schedules, str) or not schedules or not set(schedules) <= set(SCHEDULES):
        raise ValueError(f"schedules={schedules!r}: give one or more of {', '.join(map(repr, SCHEDULES))}")
    for parameter, value in (("link", link), ("width", width), ("batch", batch)):
        if checked_count(parameter, value) > LARGEST:
            raise ValueError(f"{parameter}={value}: give at most {LARGEST}")
    if checked_count("micro_batches", micro_batches) > batch:
        raise ValueError(f"micro_batches={micro_batches}: a batch of {batch} rows cannot be cut into more than {batch}")
    parameters = {
        "schedules": list(schedules),
        "layers": "+".join(map(str, layers)),
        "micro_batches": micro_batches,
        "link": link,
        "width": width,
        "batch": batch,
    }
    total = sum(2 * len(layers) * (1 if schedule == ONE_BATCH else micro_batches) for schedule in schedules)
    return Run("pipeline_step", parameters, COLUMNS, name, total, _points(list(layers), micro_batches, list(schedules), link, width, batch))


def waiting_share(result: Result, schedule: str) -> float | None:
    """The share of the step, averaged over the stages, in which a GPU waited; None if not one whole step was measured."""
    if not is_whole(result, schedule):
        return None
    return waiting(_rows(result, schedule), stages(result))


def _rows(result: Result, schedule: str) -> list[Row]:
    return [row for row in result.rows if row["schedule"] == schedule]


def stages(result: Result) -> int:
    """How many stages the pipeline of a `pipeline_step` has."""
    return len(result.parameters["layers"].split("+"))


def is_whole(result: Result, schedule: str) -> bool:
    """Whether all of the step was measured: a run that was stopped ends in the middle."""
    count = 1 if schedule == ONE_BATCH else result.parameters["micro_batches"]
    return len(result.column("stage", schedule=schedule)) == 2 * count * stages(result)


def stage_peaks(result: Result, schedule: str) -> dict[int, int]:
    """The bytes that the step took on each stage's GPU, as far as was measured."""
    return result.by("stage", "peak", schedule=schedule)


def _points(layers: list[int], micro_batches: int, schedules: list[str], link: int, width: int, batch: int) -> Iterator[Row]:
    for schedule in schedules:
        with machine.in_use().without_values():
            rows = _step(layers, 1 if schedule == ONE_BATCH else micro_batches, schedule, link, width, batch)
        yield from rows


def _step(layers: list[int], micro_batches: int, schedule: str, link: int, width: int, batch: int) -> list[Row]:
    pipe = Pipe([linear_layers(count, width, f"cuda:{index}") for index, count in enumerate(layers)], link)
    inputs = torch.ones(batch, width, device="cuda:0")
    for _ in range(WARM_UP):
        pipe.step(inputs, micro_batches, schedule)
    held = [torch.cuda.memory_allocated(index) for index in range(len(layers))]
    for index in range(len(layers)):
        torch.cuda.reset_peak_memory_stats(index)
    work = pipe.step(inputs, micro_batches, schedule)
    took = [torch.cuda.max_memory_allocated(index) - held[index] for index in range(len(layers))]
    rows = [
        {"schedule": schedule, "stage": stage, "work": what, "micro_batch": index, "start": start, "seconds": seconds, "peak": took[stage]}
        for stage, what, index, start, seconds in work
    ]
    return sorted(rows, key=lambda row: (row["start"], row["stage"]))


class Pipe:
    """Stages of a network on GPUs 0, 1, 2 …, and a pair of streams for each direction of the links between neighbours."""

    def __init__(self, stages: list[nn.Module], link: int = 1) -> None:
        self.stages, self.link = stages, link
        neighbours = [(i, i + 1) for i in range(len(stages) - 1)]
        pairs = neighbours + [(there, here) for here, there in neighbours]
        self.streams = {(i, j): (torch.cuda.Stream(i), torch.cuda.Stream(j)) for i, j in pairs}

    def step(self, inputs: torch.Tensor, micro_batches: int, schedule: str) -> list[tuple[int, str, int, float, float]]:
        """Forward and backward of the mean square, the gradients added to the parameters'.

        Returns (stage, work, micro-batch, start, seconds) of each piece of work; the GPUs have done all of it.
        """
        count = len(self.stages)
        self.parts = inputs.chunk(micro_batches)
        self.sent: dict[tuple[int, str, int], tuple[torch.Tensor, torch.cuda.Event]] = {}  # to a stage, for its forward or backward
        self.kept: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}  # input and output of a forward, for its backward
        for index in range(count):
            torch.cuda.synchronize(index)
        begun = [mark(index) for index in range(count)]
        timed = []
        for stage, work, index in launches([order(schedule, stage, count, len(self.parts)) for stage in range(count)]):
            arrived = self._receive(stage, work, index)
            before = mark(stage)
            result = self._forward(stage, index, arrived) if work == FORWARD else self._backward(stage, index, arrived)
            timed.append((stage, work, index, before, mark(stage)))
            self._send(stage, work, index, result)
        for index in range(count):
            torch.cuda.synchronize(index)
        return [
            (stage, work, index, begun[stage].elapsed_time(before) * MILLISECOND, before.elapsed_time(after) * MILLISECOND)
            for stage, work, index, before, after in timed
        ]

    def _forward(self, stage: int, index: int, arrived: torch.Tensor | None) -> torch.Tensor:
        entered = (self.parts[index].detach() if arrived is None else arrived).requires_grad_()
        left = self.stages[stage](entered)
        if stage == len(self.stages) - 1:
            left = left.square().mean() / len(self.parts)
        self.kept[stage, index] = entered, left
        return left.detach()

    def _backward(self, stage: int, index: int, arrived: torch.Tensor | None) -> torch.Tensor | None:
        entered, left = self.kept.pop((stage, index))
        left.backward(arrived)
        return entered.grad

    def _send(self, stage: int, work: str, index: int, tensor: torch.Tensor | None) -> None:
        """Copy a result to the stage that needs it, once the work before is done, on streams on which nothing else waits."""
        neighbour = stage + 1 if work == FORWARD else stage - 1
        if tensor is None or neighbour not in range(len(self.stages)):
            return
        leaves, arrives = self.streams[stage, neighbour]
        leaves.wait_stream(torch.cuda.current_stream(stage))
        with torch.cuda.stream(leaves), torch.cuda.stream(arrives):
            copy = torch.empty_like(tensor, device=f"cuda:{neighbour}")
            for _ in range(self.link):
                copy.copy_(tensor, non_blocking=True)
        tensor.record_stream(leaves)  # or its memory might be given to others before it has left
        copy.record_stream(torch.cuda.current_stream(neighbour))
        self.sent[neighbour, work, index] = copy, arrives.record_event()

    def _receive(self, stage: int, work: str, index: int) -> torch.Tensor | None:
        """What the neighbour sent for this work, which will start after it has come; None for the first or last stage of all."""
        copy, event = self.sent.pop((stage, work, index), (None, None))
        if event is not None:
            torch.cuda.current_stream(stage).wait_event(event)
        return copy


# The figure


ABOVE = -0.75  # where a prediction stands, above stage 0


@in_style
def plot_pipeline_step(result: Result, recorded: Result | None = None, prediction: float | None = None) -> Figure:
    """A bar for each forward and backward of each stage's GPU over time, a panel for each schedule, and each GPU's memory beside it.

    A number in a bar is that of the micro-batch. `prediction` is the percentage of the step in which the GPUs wait under the last of
    the schedules: a hollow marker shows where the step would end.
    """
    schedules = list(dict.fromkeys(result.column("schedule"))) or result.parameters["schedules"][:1]
    canvas, *panels = new_canvas(waiting_finding(_shares(result)), rows=len(schedules))
    place_panels(canvas, panels, _end(result, prediction), memory=True)
    for axes, schedule in zip(panels, schedules, strict=True):
        axes.set_title(_heading(result, recorded, schedule), loc="left", fontsize=TEXT_POINTS)
        draw_bars(axes, _rows(result, schedule), stages(result))
        draw_memory(axes, stage_peaks(result, schedule))
    sentence = _predicted_end(panels[-1], result, prediction)
    add_legend(canvas, split=any(result.column("micro_batch")))
    shown = result.badge if recorded is None else f"{result.badge}  ·  {recorded.badge}"
    waits = "" if recorded is None else f"{recorded.badge}: the GPUs wait {waits_in_words(_shares(recorded))}."
    memory = memory_in_words({schedule: stage_peaks(result, schedule) for schedule in schedules})
    return badged(canvas, result.badge, memory, sentence, waits, shown=shown)


def _shares(result: Result) -> dict[str, float]:
    """The share of the step for which a GPU waits, of the schedules that were measured to their end."""
    return {schedule: share for schedule in result.parameters["schedules"] if (share := waiting_share(result, schedule)) is not None}


def _heading(result: Result, recorded: Result | None, schedule: str) -> str:
    count = 1 if schedule == ONE_BATCH else result.parameters["micro_batches"]
    name = schedule if count == 1 else f"{schedule}, {count} micro-batches"
    if len(result.parameters["schedules"]) == 1 and recorded is None:
        return name  # the figure's title says the rest
    share, before = waiting_share(result, schedule), None if recorded is None else waiting_share(recorded, schedule)
    waits = "not measured to its end" if share is None else f"GPUs wait {percent(share)}"
    return f"{name}: {waits}" + ("" if before is None else f" (recorded: {percent(before)})")


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
    axes.set_ylim(axes.get_ylim()[0], -1.1)  # room above the bars
    axes.plot([seconds], [ABOVE], marker="s", clip_on=False, zorder=4, **hollow(BLACK))
    side = "right" if seconds > axes.get_xlim()[1] / 2 else "left"
    axes.annotate(f"predicted: {prediction:g}%", (seconds, ABOVE), (-11 if side == "right" else 11, 0), **BESIDE, ha=side)
    return f"Predicted for {result.parameters['schedules'][-1]}: the GPUs wait {prediction:g}%."


# The widget


MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
LINKS = {"as it is": 1, "4 times slower": 4, "16 times slower": 16, "64 times slower": 64}
LAYERS = 2  # of each stage
GOOD = 5.0  # percent: a prediction this close is called good


class PipelineLab(ExperimentPanel):
    """Cut a network into stages and its batch into micro-batches, predict for how long the GPUs wait, then see what each does when.

    `schedules` are those switched on at first. The prediction is for the last that is switched on. Raises ValueError for a schedule that
    there is not, and for a number of micro-batches that cannot be chosen.
    """

    question = "Under the last schedule that is switched on, for how many percent of the step does a GPU wait, on average?"
    unit = "%"
    zero_is_possible = True

    def __init__(self, schedules: Sequence[str] = SCHEDULES[1:], micro_batches: int = 8) -> None:
        used = machine.current()
        most = 4 if used is None else used.count
        self.stages = choice("Stages:", range(1, most + 1), most, "9em")
        self.micro_batches = choice("Micro-batches:", MICRO_BATCHES, micro_batches, "12em")
        self.link = choice("Link:", list(LINKS), next(iter(LINKS)), "14em")
        self.switches = switches(schedules, SCHEDULES, "7em")
        super().__init__([self.stages, self.micro_batches, self.link], list(self.switches.values()))

    @property
    def schedules(self) -> list[str]:
        """Those that are switched on."""
        return [name for name, switch in self.switches.items() if switch.value]

    def experiment(self) -> Run:
        """The step as it is chosen, not yet begun. Raises ValueError where no schedule is switched on."""
        if not self.schedules:
            raise ValueError("Switch at least one schedule on.")
        return pipeline_step([LAYERS] * self.stages.value, self.micro_batches.value, self.schedules, LINKS[self.link.value])

    def point(self, row: dict[str, Any]) -> str:
        return f"{row['schedule']}, {row['work']} of micro-batch {row['micro_batch'] + 1} on cuda:{row['stage']}"

    def draw(self, result: Result, prediction: float | None) -> Figure:
        return plot_pipeline_step(result, result.recorded(), prediction)

    def verdict(self, result: Result, prediction: float) -> str:
        schedule = result.parameters["schedules"][-1]
        share = waiting_share(result, schedule)
        if share is None:
            return stays_open(f"{schedule} was not measured to its end", prediction, unit="%")
        percent = 100 * share
        told = f"With {schedule} the GPUs wait {percent:.0f}% of the step; you predicted {prediction:g}%"
        off = prediction - percent
        told += ". A good prediction!" if abs(off) <= GOOD else f", {abs(off):.0f} too {'high' if off > 0 else 'low'}."
        count = 1 if schedule == ONE_BATCH else result.parameters["micro_batches"]
        most = max(stage_peaks(result, schedule).values())
        return f"{told} The formula says {100 * bubble(stages(result), count):.0f}%. At most {units.byte_text(most)} on a GPU."

    def predicted(self, text: str) -> float:
        number = super().predicted(text)
        if number >= 100:
            raise ValueError("Something is done in each step: predict less than 100%.")
        return number
