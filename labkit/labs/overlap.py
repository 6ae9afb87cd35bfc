"""What streams gain: copies to the GPU beside kernels, and two chains of kernels on one stream and on two."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median

import torch
from matplotlib.axes import Axes

from gputrace import units
from gputrace.figures.figure import BESIDE, BLACK, BLUE, GREY, TEXT_POINTS, Figure, binary_scale, darker, label_ends, new_canvas
from labkit import machine
from labkit.lab_parts.experiment import Result, Row, Run, badge, checked_count, checked_sizes
from labkit.lab_parts.figures import SAME, add_line, finished, in_style, sources
from labkit.lab_parts.timing import host_seconds

MIB = 1 << 20
ALONE = ("copies alone", "kernels alone")
TOGETHER = ("pageable memory", "pinned memory", "pinned, on a stream of its own")
WAYS = ALONE + TOGETHER
LARGEST_SIZE, LARGEST_WIDTH = 1 << 28, 1 << 14
OVERLAP_COLUMNS = {"way": "", "seconds": "seconds"}


def copy_overlap(ways: Sequence[str] = WAYS, batches: int = 8, size: int = 32 * MIB, width: int = 2048, repeats: int = 3) -> Run:
    """Seconds for so many batches to be copied to the current GPU, each of them worked on there; a row for each of the `ways`.

    A batch has `size` bytes; the work on one is a product of two float32 matrices, `width` wide. "copies alone" are pinned ones; in the
    last way batch k + 1 is copied on a stream of its own while the GPU works on batch k. The median of `repeats`, after one that does
    not count. Virtual GPUs compute no values meanwhile.

    Raises ValueError for what is not one of the ways, sizes outside 1 byte to 256 MiB and widths outside 1 to 16384, RuntimeError when
    no GPU is in use.
    """
    if not ways or not set(ways) <= set(WAYS):
        raise ValueError(f"ways={ways!r}: choose from {', '.join(map(repr, WAYS))}")
    for name, value, largest in (("size", size, LARGEST_SIZE), ("width", width, LARGEST_WIDTH)):
        if checked_count(name, value) > largest:
            raise ValueError(f"{name}={value}: give a whole number up to {largest}")
    chosen = [way for way in WAYS if way in ways]
    batches, repeats = checked_count("batches", batches), checked_count("repeats", repeats)
    parameters = {"ways": chosen, "batches": batches, "size": size, "width": width, "repeats": repeats}
    return Run("copy_overlap", parameters, OVERLAP_COLUMNS, badge(), len(chosen), _overlap_points(chosen, batches, size, width, repeats))


def hidden_share(result: Result, way: str = TOGETHER[-1]) -> float | None:
    """The share of the shorter of copies and kernels that went on while the other did: 0 to 1; None where something was not measured."""
    seconds = result.by("way", "seconds")
    if not {*ALONE, way} <= set(seconds):
        return None
    copies, kernels = (seconds[alone] for alone in ALONE)
    return min(1.0, max(0.0, (copies + kernels - seconds[way]) / min(copies, kernels)))


def _overlap_points(ways: Sequence[str], batches: int, size: int, width: int, repeats: int) -> Iterator[Row]:
    for way in ways:
        with machine.in_use().without_values():
            pinned = way != TOGETHER[0]
            source = torch.empty(size, dtype=torch.uint8, pin_memory=pinned).fill_(1)
            matrix = torch.ones(width, width, device="cuda")
            work = partial(_PROGRAMS[way], source, batches, partial(torch.mm, matrix, matrix))
            times = [host_seconds(work) for _ in range(1 + repeats)]
            del source, matrix, work
        yield {"way": way, "seconds": median(times[1:])}


def _copies(source: torch.Tensor, batches: int, kernel: Callable[[], object]) -> None:
    for _ in range(batches):
        source.to("cuda", non_blocking=True)


def _kernels(source: torch.Tensor, batches: int, kernel: Callable[[], object]) -> None:
    for _ in range(batches):
        kernel()


def _in_turn(source: torch.Tensor, batches: int, kernel: Callable[[], object]) -> None:
    for _ in range(batches):
        source.to("cuda", non_blocking=True)
        kernel()


def _beside(source: torch.Tensor, batches: int, kernel: Callable[[], object]) -> None:
    """Each batch's copy on a stream of its own, one ahead of the kernels, which wait for their own batch's."""
    here, side = torch.cuda.current_stream(), torch.cuda.Stream()

    def copied() -> torch.Tensor:
        with torch.cuda.stream(side):
            return source.to("cuda", non_blocking=True)

    following = copied()
    for index in range(batches):
        here.wait_stream(side)
        batch = following
        batch.record_stream(here)
        if index + 1 < batches:
            following = copied()
        kernel()


_PROGRAMS = dict(zip(WAYS, (_copies, _kernels, _in_turn, _in_turn, _beside), strict=True))


# Two chains of kernels


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


# The figures


COLOURS = dict.fromkeys(ALONE, GREY) | dict.fromkeys(TOGETHER, BLUE)
LINES = {TOGETHER[-1]: "pinned, on a\nstream of its own"}  # as they are written beside the bars
TOLD = 1.1  # a gain from which on its number stands beside its point
BEHIND = {"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}
FILLED, THIN = 0.62, 0.2  # of a bar's place: this machine's bar, and the recorded one below it


@in_style
def plot_copy_overlap(result: Result, recorded: Result | None = None) -> Figure:
    """Seconds of copies and of kernels alone (grey), and of both together (blue), a bar each; recorded ones are thin and dashed."""
    canvas, axes = new_canvas(_overlap_finding(result))
    axes.set_position((0.22, 0.19, 0.64, 0.70))
    ways = [way for way in COLOURS if way in result.column("way")]
    _bars(axes, result, ways)
    if recorded is not None:
        _thin_bars(axes, recorded, ways)
    axes.set_yticks(range(len(ways)), [LINES.get(way, way) for way in ways])
    axes.set(ylim=(len(ways) - 0.4, -0.6), xlim=(0, None))
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
    size, unit = units.time_unit(max(result.column("seconds"), default=1.0))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / size:g}")
    axes.set_xlabel(f"time until all batches are done, {unit}")
    return finished(canvas, result, recorded, _overlap_proof)


def _bars(axes: Axes, result: Result, ways: list[str]) -> None:
    for row, way in enumerate(ways):
        (seconds,) = result.column("seconds", way=way)
        axes.barh(row, seconds, FILLED, color=COLOURS[way])
        axes.annotate(units.time_text(seconds), (seconds, row), (6, 0), **BESIDE)


def _thin_bars(axes: Axes, recorded: Result, ways: list[str]) -> None:
    for row, way in enumerate(ways):
        for seconds in recorded.column("seconds", way=way):
            axes.barh(row + (FILLED + THIN) / 2, seconds, THIN, facecolor="none", edgecolor=BLACK, linestyle="--")
            axes.annotate(units.time_text(seconds), (seconds, row + (FILLED + THIN) / 2), (6, 0), **BESIDE, fontsize=TEXT_POINTS)


def _overlap_finding(result: Result) -> str:
    share = hidden_share(result)
    if share is None:
        return "Not measured yet: copies, kernels, and both on two streams"
    seconds = result.by("way", "seconds")
    shorter = "copying" if seconds[ALONE[0]] <= seconds[ALONE[1]] else "computing"
    return f"A stream of its own for the copies hides {share:.0%} of the {shorter}"


def _overlap_proof(result: Result) -> str:
    times = [f"{way} {units.time_text(seconds)}" for way, seconds in result.by("way", "seconds").items()]
    return f"{'; '.join(times)}."


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
