"""Data, tensor and pipeline degrees of a training on a cluster: each layout is tried in a simulated world. Experiment, figure, and lab."""

from collections.abc import Iterator, Sequence
from typing import Any

from gpulessons.rank_programs import rank_program
from gpulessons.trying_lab import TryingLab, place_bars
from gputrace import units
from gputrace.figures.figure import BLUE, GREEN, Figure, new_canvas, time_ticks
from labkit.labs.experiment import Result, Row, Run
from labkit.labs.figures import badged, in_style
from labkit.labs.panel import choice, one_of
from labkit.labs.predictions import compared_as_factor, stays_open

LIKE, PER_NODE, GPUS = "H100", 8, 32
BLOCKS, WIDTH, TOKENS, SEQUENCES, MICRO = 16, 8192, 2048, 32, 1  # of a GPT, of a sequence, of a batch, of a micro-batch
DEGREES = (1, 2, 4, 8, 16)
NETWORKS = ("400Gb/s", "100Gb/s")
COLUMNS = {"layout": "", "data": "", "tensor": "", "pipeline": "", "seconds": "seconds", "peak": "bytes"}
Layout = tuple[int, int]


def layout_steps(layouts: Sequence[Layout], network: str = "400Gb/s") -> Run:
    """A training step on 32 virtual H100s, eight a node, in each of the layouts: pairs of a tensor and a pipeline degree.

    The other ranks are data parallel. The model has 12.9 billion parameters, in 16 blocks of a GPT that are 8,192 wide; mixed precision
    and AdamW take 16 bytes for each. A batch is 32 sequences of 2,048 tokens, a micro-batch one of them. Each layout is run, as rank 0 of
    its world with the others simulated: all alike, and none late. `seconds` and `peak` are None where it runs out of memory.

    Raises ValueError, which names the choices, for a degree or a network that is none of them, and for more than 32 GPUs.
    """
    one_of(network, NETWORKS)
    for tensor, pipeline in layouts:
        one_of(tensor, DEGREES)
        one_of(pipeline, DEGREES)
        if tensor * pipeline > GPUS:
            raise ValueError(f"tensor {tensor} × pipeline {pipeline} asks for {tensor * pipeline} GPUs: there are {GPUS}")
    parameters = {"layouts": [list(layout) for layout in layouts], "network": network}
    badge = f"one simulated rank of each layout, virtual NVIDIA {LIKE}"
    return Run("layout_steps", parameters, COLUMNS, badge, len(layouts), _points(list(layouts), network))


def _points(layouts: Sequence[Layout], network: str) -> Iterator[Row]:
    from gpulessons.simulated_worlds import results

    where = {"world": GPUS, "nodes": GPUS // PER_NODE, "network": network, "like": LIKE}
    tried = [(GPUS // (tensor * pipeline), tensor, pipeline) for tensor, pipeline in layouts]
    worlds = [where | {"arguments": [*degrees, BLOCKS, WIDTH, TOKENS, SEQUENCES, MICRO]} for degrees in tried]
    for (data, tensor, pipeline), found in zip(tried, results(rank_program("layouts"), worlds), strict=True):
        yield {"layout": f"{data} × {tensor} × {pipeline}", "data": data, "tensor": tensor, "pipeline": pipeline} | found


# The figure


@in_style
def plot_layout_steps(result: Result, prediction: float | None = None) -> Figure:
    """A bar for each layout: the time of its step, or that it runs out of memory. `prediction` is the last one's seconds."""
    canvas, axes = new_canvas(_finding(result))
    fastest = best(result)
    most = max([row["seconds"] or 0.0 for row in result.rows] + [prediction or 0.0, 1e-3])
    time_ticks(axes, 1.1 * most)
    for place, row in enumerate(result.rows):
        axes.barh(place, row["seconds"] or 0.0, 0.6, color=GREEN if row is fastest else BLUE)
    place_bars(axes, result.column("layout"), [_figures(row) for row in result.rows], "a step, a rank's peak", prediction)
    axes.set_xlabel(f"a step, {units.time_unit(1.1 * most)[1]}")
    axes.set_ylabel("data × tensor × pipeline")
    sentence = "" if prediction is None else f"Predicted: {prediction:g} s."
    return badged(canvas, result.badge, *map(_told, result.rows), sentence)


def _figures(row: Row) -> str:
    return "out of memory" if row["seconds"] is None else f"{units.time_text(row['seconds'])}, {units.byte_text(row['peak'])}"


def best(result: Result) -> Row | None:
    """The row of the fastest layout that fits."""
    return min((row for row in result.rows if row["seconds"] is not None), key=lambda row: row["seconds"], default=None)


def _finding(result: Result) -> str:
    if not result.rows:
        return "Not measured yet: layouts of 32 GPUs"
    if (fastest := best(result)) is None:
        return "No layout tried fits"
    return (
        f"{fastest['layout']} is the fastest layout tried: {units.time_text(fastest['seconds'])} a step by {result.parameters['network']}"
    )


def _told(row: Row) -> str:
    if row["seconds"] is None:
        return f"{row['layout']} runs out of memory."
    return f"{row['layout']} takes {units.time_text(row['seconds'])} and {units.byte_text(row['peak'])}."


# The widget


GOOD = 1.1  # a prediction within this factor is called good


class LayoutsLab(TryingLab):
    """Choose tensor and pipeline degrees for 32 GPUs and their network, predict the step's seconds, and compare what you have tried."""

    question = "12.9 billion parameters on 32 H100s, batches of 32 sequences: how many seconds does a training step take?"
    unit = "s"

    def __init__(self, tensor: int = 2, pipeline: int = 2, network: str = "400Gb/s") -> None:
        self.tensor = choice("Tensor:", DEGREES, tensor, "9em")
        self.pipeline = choice("Pipeline:", DEGREES, pipeline, "9em")
        self.network = choice("Network:", NETWORKS, network, "13em")
        super().__init__([self.tensor, self.pipeline, self.network])

    def experiment(self) -> Run:
        return layout_steps([(self.tensor.value, self.pipeline.value)], self.network.value)

    def point(self, row: dict[str, Any]) -> str:
        return _told(row)

    def draw(self, result: Result, prediction: float | None) -> Figure:
        return plot_layout_steps(self.with_earlier(result, result.parameters["network"]), prediction)

    def verdict(self, result: Result, prediction: float) -> str:
        if not result.rows:
            return stays_open("The layout was not measured", prediction, unit=" s")
        row = result.rows[-1]
        if row["seconds"] is None:
            return f"{_told(row)} Divide the model further: by a larger tensor or pipeline degree."
        told = compared_as_factor(f"A step takes {row['seconds']:.3g} s; you predicted {prediction:g}", prediction, row["seconds"], GOOD)
        return f"{told} A rank's peak is {units.byte_text(row['peak'])}."
