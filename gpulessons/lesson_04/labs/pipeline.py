"""The pipeline lab: a training step of a network in stages, when each GPU works, and its memory."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from matplotlib.axes import Axes
from torch import nn

from gpulessons.lesson_04.schedules import FORWARD, ONE_BATCH, SCHEDULES, bubble, launches, order
from gpulessons.lesson_04.work import (
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
WARM_UP = 1  # steps before the one that is measured
COLUMNS = {"schedule": "", "stage": "", "work": "", "micro_batch": ""}
COLUMNS |= {"start": "seconds", "seconds": "seconds", "peak": "bytes"}


def pipeline_step(
    layers: Sequence[int] = (2, 2, 2, 2),
    micro_batches: int = 8,
    schedules: Sequence[str] = SCHEDULES,
    link: int = 1,
    width: int = WIDTH,
    batch: int = BATCH,
) -> Run:
    """Run a training step of a pipeline under each of the `schedules`, and note each stage's work.

    `layers` has the number of linear layers of each stage. Each layer has ReLU, and stage i is on
    GPU i. The batch is split into `micro_batches`, except under the schedule "one batch". Tensors
    are sent from GPU to GPU on streams of their own, so that no other work waits for them. Each
    tensor is sent `link` times, which makes the link that many times slower. The first stage also
    computes the gradient of its input, so that equal stages have equal work.

    There is one row for each forward and backward pass of a micro-batch on a stage. It has the
    start and the seconds, counted from the start of the step. `peak` is the most memory that the
    step took on that GPU, without parameters and gradients. Virtual GPUs compute no values.

    Raises ValueError for an argument that is out of bounds, and RuntimeError if no GPU is in use.
    """
    name = badge()
    there = machine.in_use().count
    is_list = isinstance(layers, list | tuple) and 1 <= len(layers) <= there
    if not is_list or not all(type(n) is int and 1 <= n <= 64 for n in layers):
        raise ValueError(
            f"layers={layers!r}: give the number of layers, 1 to 64, of each of 1 to {there} "
            "stages, because there are that many GPUs in use"
        )
    if isinstance(schedules, str) or not schedules or not set(schedules) <= set(SCHEDULES):
        raise ValueError(
            f"schedules={schedules!r}: give one or more of {', '.join(map(repr, SCHEDULES))}"
        )
    for parameter, value in (("link", link), ("width", width), ("batch", batch)):
        if checked_count(parameter, value) > LARGEST:
            raise ValueError(f"{parameter}={value}: give at most {LARGEST}")
    if checked_count("micro_batches", micro_batches) > batch:
        raise ValueError(
            f"micro_batches={micro_batches}: a batch of {batch} rows cannot be cut into more than "
            f"{batch}"
        )
    rows = _points(list(layers), micro_batches, list(schedules), link, width, batch)
    parameters = {
        "schedules": list(schedules),
        "layers": "+".join(map(str, layers)),
        "micro_batches": micro_batches,
        "link": link,
        "width": width,
        "batch": batch,
    }
    total = 0
    for schedule in schedules:
        total += 2 * len(layers) * (1 if schedule == ONE_BATCH else micro_batches)
    return Run("pipeline_step", parameters, COLUMNS, name, total, rows)


def waiting_share(result: Result, schedule: str) -> float | None:
    """Return the share of the step in which a GPU waits, averaged over the stages.

    Return None if the step was not measured to its end.
    """
    if not is_whole(result, schedule):
        return None
    return waiting(_rows(result, schedule), stages(result))


def _rows(result: Result, schedule: str) -> list[Row]:
    return [row for row in result.rows if row["schedule"] == schedule]


def stages(result: Result) -> int:
    """Return the number of stages of a result of `pipeline_step`."""
    return len(result.parameters["layers"].split("+"))


def is_whole(result: Result, schedule: str) -> bool:
    """Return whether the step was measured to its end, which a stopped run does not reach."""
    count = 1
    if schedule != ONE_BATCH:
        count = result.parameters["micro_batches"]
    return len(result.column("stage", schedule=schedule)) == 2 * count * stages(result)


def stage_peaks(result: Result, schedule: str) -> dict[int, int]:
    """Return the most bytes that the step took on each stage's GPU, as far as it was measured."""
    return result.by("stage", "peak", schedule=schedule)


def _points(
    layers: list[int], micro_batches: int, schedules: list[str], link: int, width: int, batch: int
) -> Iterator[Row]:
    for schedule in schedules:
        count = 1 if schedule == ONE_BATCH else micro_batches
        with machine.in_use().without_values():
            rows = _step(layers, count, schedule, link, width, batch)
        yield from rows


def _step(
    layers: list[int], micro_batches: int, schedule: str, link: int, width: int, batch: int
) -> list[Row]:
    parts: list[nn.Module] = [
        linear_layers(count, width, f"cuda:{index}") for index, count in enumerate(layers)
    ]
    pipe = Pipe(parts, link)
    inputs = torch.ones(batch, width, device="cuda:0")
    for _ in range(WARM_UP):
        pipe.step(inputs, micro_batches, schedule)
    held = [torch.cuda.memory_allocated(index) for index in range(len(layers))]
    for index in range(len(layers)):
        torch.cuda.reset_peak_memory_stats(index)
    work = pipe.step(inputs, micro_batches, schedule)
    took = [torch.cuda.max_memory_allocated(index) - held[index] for index in range(len(layers))]
    rows = []
    for stage, what, index, start, seconds in work:
        row = {"schedule": schedule, "stage": stage, "work": what, "micro_batch": index}
        rows.append(row | {"start": start, "seconds": seconds, "peak": took[stage]})
    return sorted(rows, key=lambda row: (row["start"], row["stage"]))


class Pipe:
    """Stages of a network on GPUs 0, 1, 2 and so on.

    Neighbours have a pair of streams for each direction.
    """

    def __init__(self, stages: list[nn.Module], link: int = 1) -> None:
        self.stages, self.link = stages, link
        neighbours = [(i, i + 1) for i in range(len(stages) - 1)]
        pairs = neighbours + [(there, here) for here, there in neighbours]
        self.streams = {(i, j): (torch.cuda.Stream(i), torch.cuda.Stream(j)) for i, j in pairs}

    def step(
        self, inputs: torch.Tensor, micro_batches: int, schedule: str
    ) -> list[tuple[int, str, int, float, float]]:
        """Run forward and backward passes. The loss is the mean of the squared outputs.

        Returns (stage, work, micro-batch, start, seconds) of each pass, when all GPUs are done.
        """
        count = len(self.stages)
        self.parts = inputs.chunk(micro_batches)
        # What was sent to a stage for a pass, by (stage, work, micro-batch).
        self.sent: dict[tuple[int, str, int], tuple[torch.Tensor, torch.cuda.Event]] = {}
        # The input and the output of a stage for the backward pass, by (stage, micro-batch).
        self.kept: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        for index in range(count):
            torch.cuda.synchronize(index)
        begun = [mark(index) for index in range(count)]
        timed = []
        orders = [order(schedule, stage, count, len(self.parts)) for stage in range(count)]
        for stage, work, index in launches(orders):
            arrived = self._receive(stage, work, index)
            before = mark(stage)
            if work == FORWARD:
                result: torch.Tensor | None = self._forward(stage, index, arrived)
            else:
                result = self._backward(stage, index, arrived)
            timed.append((stage, work, index, before, mark(stage)))
            self._send(stage, work, index, result)
        for index in range(count):
            torch.cuda.synchronize(index)
        passes = []
        for stage, work, index, before, after in timed:
            start = begun[stage].elapsed_time(before) * MILLISECOND
            passes.append((stage, work, index, start, before.elapsed_time(after) * MILLISECOND))
        return passes

    def _forward(self, stage: int, index: int, arrived: torch.Tensor | None) -> torch.Tensor:
        if arrived is None:
            arrived = self.parts[index].detach()
        entered = arrived.requires_grad_()
        left = self.stages[stage](entered)
        if stage == len(self.stages) - 1:
            left = left.square().mean() / len(self.parts)
        self.kept[stage, index] = entered, left
        return left.detach()

    def _backward(
        self, stage: int, index: int, arrived: torch.Tensor | None
    ) -> torch.Tensor | None:
        entered, left = self.kept.pop((stage, index))
        left.backward(arrived)
        return entered.grad

    def _send(self, stage: int, work: str, index: int, tensor: torch.Tensor | None) -> None:
        """Send a pass's result to the stage that needs it, on streams that nothing else uses.

        The pass is the `work` ("forward" or "backward") of micro-batch `index` on `stage`.
        """
        if work == FORWARD:
            neighbour = stage + 1
        else:
            neighbour = stage - 1
        if tensor is None or neighbour not in range(len(self.stages)):
            return
        leaves, arrives = self.streams[stage, neighbour]
        leaves.wait_stream(torch.cuda.current_stream(stage))
        with torch.cuda.stream(leaves), torch.cuda.stream(arrives):
            copy = torch.empty_like(tensor, device=f"cuda:{neighbour}")
            for _ in range(self.link):
                copy.copy_(tensor, non_blocking=True)
        tensor.record_stream(leaves)  # Its memory must not be used again before it is sent.
        copy.record_stream(torch.cuda.current_stream(neighbour))
        self.sent[neighbour, work, index] = copy, arrives.record_event()

    def _receive(self, stage: int, work: str, index: int) -> torch.Tensor | None:
        """Return the neighbour's tensor for a pass, and let the pass wait for the tensor.

        The pass is the `work` ("forward" or "backward") of micro-batch `index` on `stage`. Return
        None if no neighbour sends anything.
        """
        copy, event = self.sent.pop((stage, work, index), (None, None))
        if event is not None:
            torch.cuda.current_stream(stage).wait_event(event)
        return copy


# The figure


ABOVE = -0.75  # y of a prediction, above stage 0


@in_style
def plot_pipeline_step(
    result: Result, recorded: Result | None = None, prediction: float | None = None
) -> Figure:
    """Draw when each GPU works under each schedule, and the memory of each GPU.

    There is a bar for each forward and backward pass, with the number of its micro-batch.
    `prediction` is the percentage of the step in which the GPUs wait under the last schedule. A
    hollow marker shows where the step would end then.
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
    if recorded is None:
        shown = result.badge
    else:
        shown = f"{result.badge}  ·  {recorded.badge}"
    waits = ""
    if recorded is not None:
        waits = f"{recorded.badge}: the GPUs wait {waits_in_words(_shares(recorded))}."
    memory = memory_in_words({schedule: stage_peaks(result, schedule) for schedule in schedules})
    return badged(canvas, result.badge, memory, sentence, waits, shown=shown)


def _shares(result: Result) -> dict[str, float]:
    """Return {schedule: share of waiting} for the schedules that were measured to their end."""
    shares = {}
    for schedule in result.parameters["schedules"]:
        share = waiting_share(result, schedule)
        if share is not None:
            shares[schedule] = share
    return shares


def _heading(result: Result, recorded: Result | None, schedule: str) -> str:
    count = 1
    if schedule != ONE_BATCH:
        count = result.parameters["micro_batches"]
    name = schedule
    if count != 1:
        name = f"{schedule}, {count} micro-batches"
    if len(result.parameters["schedules"]) == 1 and recorded is None:
        return name  # the figure's title says the rest
    share = waiting_share(result, schedule)
    before = None
    if recorded is not None:
        before = waiting_share(recorded, schedule)
    waits = "not measured to its end"
    if share is not None:
        waits = f"GPUs wait {percent(share)}"
    if before is not None:
        waits += f" (recorded: {percent(before)})"
    return f"{name}: {waits}"


def _end(result: Result, prediction: float | None) -> float:
    """Return the end of the time axis in seconds: the last pass or the predicted end."""
    last = max((row["start"] + row["seconds"] for row in result.rows), default=1e-3)
    return 1.03 * max(last, _predicted_seconds(result, prediction) or 0.0)


def _predicted_seconds(result: Result, prediction: float | None) -> float | None:
    """Return the predicted end of the last schedule's step, in seconds.

    It follows from the predicted share of waiting.
    """
    schedule = result.parameters["schedules"][-1]
    if prediction is None or prediction >= 100 or not is_whole(result, schedule):
        return None
    work = sum(result.column("seconds", schedule=schedule))
    return work / (stages(result) * (1 - prediction / 100))


def _predicted_end(axes: Axes, result: Result, prediction: float | None) -> str:
    """Draw the last schedule's predicted end as a hollow marker. Return a sentence about it."""
    seconds = _predicted_seconds(result, prediction)
    if seconds is None:
        return ""
    axes.set_ylim(axes.get_ylim()[0], -1.1)  # for the marker above the bars
    axes.plot([seconds], [ABOVE], marker="s", clip_on=False, zorder=4, **hollow(BLACK))
    side = "right" if seconds > axes.get_xlim()[1] / 2 else "left"
    style: Any = {**BESIDE, "ha": side}
    offset = (-11 if side == "right" else 11, 0)
    axes.annotate(f"predicted: {prediction:g}%", (seconds, ABOVE), offset, **style)
    return f"Predicted for {result.parameters['schedules'][-1]}: the GPUs wait {prediction:g}%."


# The widget


MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
LINKS = {"as it is": 1, "4 times slower": 4, "16 times slower": 16, "64 times slower": 64}
LAYERS = 2  # of each stage
GOOD = 5.0  # A prediction within this many percentage points is called good.


class PipelineLab(ExperimentPanel):
    """Widget that splits a network into stages and its batch into micro-batches.

    The learner predicts how long the GPUs wait, and then sees when each GPU works. The prediction
    is for the last of the `schedules` that are switched on.

    Raises ValueError for a schedule or a number of micro-batches that cannot be chosen.
    """

    question = (
        "Under the last schedule that is switched on, for how many percent of the step does a GPU "
        "wait, on average?"
    )
    unit = "%"
    zero_is_possible = True

    def __init__(self, schedules: Sequence[str] = SCHEDULES[1:], micro_batches: int = 8) -> None:
        used = machine.current()
        most = 4
        if used is not None:
            most = used.count
        self.stages = choice("Stages:", range(1, most + 1), most, "9em")
        self.micro_batches = choice("Micro-batches:", MICRO_BATCHES, micro_batches, "12em")
        self.link = choice("Link:", list(LINKS), next(iter(LINKS)), "14em")
        self.switches = switches(schedules, SCHEDULES, "7em")
        super().__init__([self.stages, self.micro_batches, self.link], list(self.switches.values()))

    @property
    def schedules(self) -> list[str]:
        """The schedules that are switched on."""
        return [name for name, switch in self.switches.items() if switch.value]

    def experiment(self) -> Run:
        """Return an experiment with the chosen settings.

        Raises ValueError if no schedule is switched on.
        """
        if not self.schedules:
            raise ValueError("Switch at least one schedule on.")
        return pipeline_step(
            [LAYERS] * self.stages.value,
            self.micro_batches.value,
            self.schedules,
            LINKS[self.link.value],
        )

    def point(self, row: dict[str, Any]) -> str:
        micro_batch, gpu = row["micro_batch"] + 1, f"cuda:{row['stage']}"
        return f"{row['schedule']}, {row['work']} of micro-batch {micro_batch} on {gpu}"

    def draw(self, result: Result, prediction: float | None) -> Figure:
        return plot_pipeline_step(result, result.recorded(), prediction)

    def verdict(self, result: Result, prediction: float) -> str:
        schedule = result.parameters["schedules"][-1]
        share = waiting_share(result, schedule)
        if share is None:
            return stays_open(f"{schedule} was not measured to its end", prediction, unit="%")
        percent = 100 * share
        told = (
            f"With {schedule} the GPUs wait {percent:.0f}% of the step; "
            f"you predicted {prediction:g}%"
        )
        off = prediction - percent
        if abs(off) <= GOOD:
            told += ". A good prediction!"
        elif off > 0:
            told += f", {off:.0f} too high."
        else:
            told += f", {-off:.0f} too low."
        count = 1
        if schedule != ONE_BATCH:
            count = result.parameters["micro_batches"]
        most = max(stage_peaks(result, schedule).values())
        formula = 100 * bubble(stages(result), count)
        memory = f"At most {units.byte_text(most)} on a GPU."
        return f"{told} The formula says {formula:.0f}%. {memory}"

    def predicted(self, text: str) -> float:
        number = super().predicted(text)
        if number >= 100:
            raise ValueError("Something is done in each step: predict less than 100%.")
        return number
