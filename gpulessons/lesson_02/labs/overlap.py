"""What a second stream gains: two chains of kernels on one stream and on two."""

from collections.abc import Iterator, Sequence
from statistics import median

import torch

from gputrace.figures.figure import BESIDE, BLACK, BLUE, Figure, binary_scale, darker, label_ends, new_canvas
from labkit import machine
from labkit.labs.experiment import Result, Row, Run, badge, checked_count, checked_sizes
from labkit.labs.figures import SAME, add_line, finished, in_style, sources
from labkit.labs.timing import host_seconds

WIDTHS = (64, 128, 256, 512, 1024, 2048, 4096)
LARGEST = 1 << 14
CHAINS = 2
COLUMNS = {"width": "", "streams": "", "seconds": "seconds"}


def two_streams(widths: Sequence[int] = WIDTHS, kernels: int = 20, repeats: int = 3) -> Run:
    """Seconds of two chains of `kernels` matrix products each, on one stream and on two; `widths` of the square float32 matrices.

    The host launches in turn, one product of each chain. Each time is the median of `repeats`, after one that does not count. Virtual
    GPUs compute no values meanwhile.

    Raises ValueError for widths outside 1 to 16384, RuntimeError when no GPU is in use.
    """
    widths = checked_sizes("widths", widths, LARGEST)
    kernels, repeats = checked_count("kernels", kernels), checked_count("repeats", repeats)
    parameters = {"widths": widths, "kernels": kernels, "repeats": repeats}
    return Run("two_streams", parameters, COLUMNS, badge(), CHAINS * len(widths), _points(widths, kernels, repeats))


def stream_gain(result: Result) -> dict[int, float]:
    """How many times faster the chains are on two streams than on one, by width, where both were measured."""
    one, two = (result.by("width", "seconds", streams=count) for count in (1, 2))
    return {width: one[width] / seconds for width, seconds in two.items() if width in one}


def _points(widths: Sequence[int], kernels: int, repeats: int) -> Iterator[Row]:
    streams = [torch.cuda.Stream() for _ in range(CHAINS)]
    for width in widths:
        for count in (1, 2):
            with machine.in_use().without_values():
                matrices = [torch.ones(width, width, device="cuda") for _ in range(CHAINS)]
                torch.cuda.synchronize()
                used = [streams[chain % count] for chain in range(CHAINS)]
                times = [_seconds(matrices, used, kernels) for _ in range(1 + repeats)]
                del matrices
            yield {"width": width, "streams": count, "seconds": median(times[1:])}


def _seconds(matrices: list[torch.Tensor], streams: list[torch.cuda.Stream], kernels: int) -> float:
    products = [torch.empty_like(matrix) for matrix in matrices]

    def launch() -> None:
        for _ in range(kernels):
            for matrix, product, stream in zip(matrices, products, streams, strict=True):
                with torch.cuda.stream(stream):
                    torch.mm(matrix, matrix, out=product)

    return host_seconds(launch)


# The figure


TOLD = 1.1  # a gain from which on its number stands beside its point
BEHIND = {"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}


@in_style
def plot_two_streams(result: Result, recorded: Result | None = None) -> Figure:
    """How many times as fast two chains of kernels are on two streams as on one, by the width of the matrices."""
    canvas, axes = new_canvas(_gain_finding(stream_gain(result), {} if recorded is None else stream_gain(recorded)))
    widths = result.parameters["widths"]
    labels: list[tuple] = [(widths[-1], 1, "one stream", BLACK)]
    for source, dashes in sources(result, recorded):
        gain = stream_gain(source)
        label = "two streams" if source is result else "two streams, recorded"
        labels += add_line(axes, list(gain), list(gain.values()), BLUE, dashes, label)
        for width, times in gain.items():
            if times >= TOLD:
                axes.annotate(f"{times:.2f}", (width, times), (0, 10), **BESIDE, ha="center", color=darker(BLUE), bbox=BEHIND)
    axes.hlines(1, widths[0], widths[-1], color=BLACK, linewidth=1)
    axes.set_ylim(min(0.8, axes.get_ylim()[0]), max(2.1, axes.get_ylim()[1]))
    axes.set_ylabel("times as fast as on one stream")
    binary_scale(axes, "width of the matrices that a kernel multiplies", lambda width: f"{width:g}", most=10)
    label_ends(axes, labels)
    return finished(canvas, result, recorded, _gain_proof)


def _gain_finding(gain: dict[int, float], recorded: dict[int, float]) -> str:
    """The width at which the second stream helps most."""
    if not gain:
        return "Not measured yet: one stream and two at one width"
    best, there = (max(gains, key=lambda width: gains[width], default=0) for gains in (gain, recorded))
    told = f" (recorded: {recorded[there]:.1f} at {there})" if recorded else ""
    if gain[best] < SAME:
        return f"Two streams are no faster than one at any width{told}"
    return f"Two streams help most at width {best}: {gain[best]:.1f} times faster{told}"


def _gain_proof(result: Result) -> str:
    parts = [f"width {width}: {value:.2f} times" for width, value in stream_gain(result).items()]
    return f"faster on two streams, {', '.join(parts)}." if parts else ""
