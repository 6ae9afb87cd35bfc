"""What a rank holds, sends and takes for a training step when a model is divided among GPUs in one way or another, each way tried in a
simulated world. Experiment, figure, and lab."""

from collections.abc import Iterator, Sequence
from typing import Any

from gpulessons.rank_programs import rank_program
from gpulessons.trying_lab import TryingLab, place_bars
from gputrace import units
from gputrace.figures.figure import BLUE, GREEN, SKY_BLUE, Figure, new_canvas
from labkit.labs.experiment import Result, Row, Run
from labkit.labs.figures import badged, in_style
from labkit.labs.panel import choice, one_of
from labkit.labs.predictions import compared_as_factor, stays_open

LIKE, PER_NODE, TOKENS = "H100", 8, 2048
WAYS = ("DDP", "ZeRO-1", "ZeRO-2", "FSDP", "tensor", "FSDP × tensor")
GPUS = (8, 16, 32)
MODELS = {"1.6 billion": (8, 4096), "6.4 billion": (8, 8192), "12.9 billion": (16, 8192)}  # by parameters: blocks of a GPT, their width
COLUMNS = {"setting": "", "way": "", "gpus": "", "seconds": "seconds", "held": "bytes", "peak": "bytes", "sent": "bytes"}


def strategy_steps(settings: Sequence[tuple[str, int]], model: str = "6.4 billion") -> Run:
    """A training step on virtual H100s, eight a node, for each pair of a way to divide the model and a number of GPUs.

    The ways: each rank has the whole model (DDP); ranks share the optimizer's state (ZeRO-1), the gradients too (ZeRO-2), the parameters
    too (`fully_shard`); layers are cut among all ranks (tensor), or among those of a node, and their parts shared by the nodes (FSDP ×
    tensor). The model is so many blocks of a GPT, in mixed precision with AdamW; a batch is one sequence of 2,048 tokens for each GPU.
    Each is run as rank 0 of its world with the others simulated: all alike, and none late. `held` is what a rank has between two steps,
    `peak` the most in a step, `sent` what it sends in a step if each collective is a ring. All are None where it runs out of memory.

    Raises ValueError, which names the choices, for what is none of them.
    """
    one_of(model, MODELS)
    for way, gpus in settings:
        one_of(way, WAYS)
        one_of(gpus, GPUS)
    parameters = {"settings": [list(setting) for setting in settings], "model": model}
    badge = f"one simulated rank of each world, virtual NVIDIA {LIKE}"
    return Run("strategy_steps", parameters, COLUMNS, badge, len(settings), _points(list(settings), model))


def _points(settings: Sequence[tuple[str, int]], model: str) -> Iterator[Row]:
    from gpulessons.simulated_worlds import results

    found = results(rank_program("strategies"), [_world(way, gpus, model) for way, gpus in settings])
    for (way, gpus), row in zip(settings, found, strict=True):
        yield {"setting": f"{way} on {gpus}", "way": way, "gpus": gpus} | row


def _world(way: str, gpus: int, model: str) -> dict[str, Any]:
    return {"world": gpus, "nodes": gpus // PER_NODE, "like": LIKE, "arguments": [way, *MODELS[model], TOKENS]}


# The figure


@in_style
def plot_strategy_steps(result: Result, prediction: float | None = None) -> Figure:
    """A bar for each setting: what a rank holds, and from there to its peak, or that it runs out of memory. `prediction` is the last one's
    peak in GiB."""
    canvas, axes = new_canvas(_finding(result))
    smallest = least(result)
    for place, row in enumerate(result.rows):
        axes.barh(place, _gib(row["peak"]), 0.6, color=GREEN if row is smallest else SKY_BLUE)
        axes.barh(place, _gib(row["held"]), 0.6, color=BLUE)
    place_bars(axes, result.column("setting"), [_figures(row) for row in result.rows], "a step, sent", prediction)
    axes.set_xlim(0, 1.1 * max([_gib(row["peak"]) for row in result.rows] + [prediction or 0.0, 1.0]))
    axes.set_xlabel("a rank's memory, GiB: held between steps (dark), at the peak")
    sentence = "" if prediction is None else f"Predicted: {prediction:g} GiB."
    return badged(canvas, result.badge, *map(_told, result.rows), sentence)


def _gib(nbytes: int | None) -> float:
    return (nbytes or 0) / 2**30


def _figures(row: Row) -> str:
    return "out of memory" if row["peak"] is None else f"{units.time_text(row['seconds'])}, {units.byte_text(row['sent'])}"


def least(result: Result) -> Row | None:
    """The row of the lowest peak."""
    return min((row for row in result.rows if row["peak"] is not None), key=lambda row: row["peak"], default=None)


def _finding(result: Result) -> str:
    if not result.rows:
        return "Not measured yet: a model divided among GPUs"
    if (smallest := least(result)) is None:
        return "Nothing tried fits"
    return f"{smallest['setting']} GPUs has the lowest peak tried: {units.byte_text(smallest['peak'])} a rank"


def _told(row: Row) -> str:
    if row["peak"] is None:
        return f"{row['setting']} GPUs: out of memory."
    held, peak, sent = (units.byte_text(row[name]) for name in ("held", "peak", "sent"))
    return f"{row['setting']} GPUs: {held} held, {peak} at the peak, {sent} sent, {units.time_text(row['seconds'])} a step."


# The widget


GOOD = 1.25  # a prediction within this factor is called good


class StrategiesLab(TryingLab):
    """Choose a model, a number of GPUs and how it is divided among them, predict a rank's peak, and compare what you have tried."""

    question = "A GPT is trained on H100s, one sequence for each: how many GiB does a rank need at the peak of a step?"
    unit = "GiB"

    def __init__(self, way: str = "FSDP", gpus: int = 8, model: str = "6.4 billion") -> None:
        self.way = choice("Divided by:", WAYS, way, "15em")
        self.gpus = choice("GPUs:", GPUS, gpus, "8em")
        self.model = choice("Parameters:", list(MODELS), model, "15em")
        super().__init__([self.way, self.gpus, self.model])

    def experiment(self) -> Run:
        return strategy_steps([(self.way.value, self.gpus.value)], self.model.value)

    def point(self, row: dict[str, Any]) -> str:
        return _told(row)

    def draw(self, result: Result, prediction: float | None) -> Figure:
        return plot_strategy_steps(self.with_earlier(result, result.parameters["model"]), prediction)

    def verdict(self, result: Result, prediction: float) -> str:
        if not result.rows:
            return stays_open("The peak was not measured", prediction, unit=" GiB")
        row = result.rows[-1]
        if row["peak"] is None:
            return f"{_told(row)} What does each rank hold whole? Divide that, too."
        peak = _gib(row["peak"])
        told = compared_as_factor(f"A rank needs {peak:.3g} GiB; you predicted {prediction:g}", prediction, peak, GOOD)
        return f"{told} It holds {units.byte_text(row['held'])} between two steps."
