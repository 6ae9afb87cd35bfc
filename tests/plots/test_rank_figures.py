"""The figures of ranks: collectives, what each holds, and DistributedDataParallel beside DataParallel."""

from gputrace.figures.figure import GREY
from labkit import plots
from labkit.experiments.collectives import COLUMNS
from labkit.experiments.ddp import COLUMNS as STEP_COLUMNS
from labkit.experiments.ddp import DATA_PARALLEL, DDP
from labkit.experiments.result import Result
from labkit.experiments.shards import COLUMNS as HELD_COLUMNS
from labkit.experiments.shards import KINDS
from labkit.plots.ranks import RANKS

BADGE = "measured on paper"
BROUGHT, SUMS = [[10, 11], [20, 21]], [30, 32]
AFTER = {"broadcast": [BROUGHT[0]] * 2, "all_reduce": [SUMS] * 2, "reduce_scatter": [[30], [32]], "all_gather": [SUMS] * 2}


def exchanged(after=AFTER) -> Result:
    rows = [
        {"collective": name, "rank": rank, "before": [[30], [32]][rank] if name == "all_gather" else BROUGHT[rank], "after": left}
        for name, vectors in after.items()
        for rank, left in enumerate(vectors)
    ]
    return Result("collectives", {"ranks": 2}, COLUMNS, rows, BADGE)


def test_every_number_is_drawn_in_the_colour_of_who_brought_it(drawn):
    figure = plots.collectives(exchanged())
    assert figure.title == "An all_reduce does what reduce_scatter and all_gather do together"
    assert "Reduce_scatter: before, ranks 0 to 1 hold 10, 11; 20, 21; after, 30; 32." in figure.alt
    assert "All_gather: before, ranks 0 to 1 hold 30; 32; after, each 30, 32. Measured on paper." in figure.alt
    from matplotlib.colors import to_hex

    broadcast, all_reduce, *_ = drawn[-1].axes
    assert [to_hex(box.get_edgecolor(), keep_alpha=False).upper() for box in broadcast.patches] == [
        *[RANKS[0]] * 4,
        *[RANKS[1]] * 2,
        *[RANKS[0]] * 2,
    ]
    assert [to_hex(box.get_edgecolor(), keep_alpha=False).upper() for box in all_reduce.patches[2:4]] == [GREY] * 2


def test_ranks_that_found_something_else_are_not_said_to_agree():
    assert plots.collectives(exchanged(AFTER | {"all_gather": [[30, 31]] * 2})).title == "What 2 ranks hold before and after collectives"


def holding(**ways) -> Result:
    rows = [
        {"way": way, "rank": rank, "kind": kind, "bytes": nbytes + 8, "formula": nbytes, "whole": 0}
        for way, sizes in ways.items()
        for rank in range(2)
        for kind, nbytes in zip(KINDS, sizes, strict=True)
    ]
    return Result("held_by_ranks", {"ranks": 2}, HELD_COLUMNS, rows, BADGE)


def test_bars_stand_on_one_another_and_the_formula_is_hollow(drawn):
    figure = plots.held_by_ranks(holding(DDP=[1 << 20, 1 << 20, 2 << 20], FSDP=[1 << 19, 1 << 19, 1 << 20]))
    assert figure.title == "A rank holds 4 MiB under DDP, 2 MiB under FSDP"
    assert "FSDP: each rank 512 KiB of parameters, 512 KiB of gradients, 1 MiB of optimizer state. Measured on paper." in figure.alt
    [axes] = drawn[-1].axes
    assert [round(bar.get_y()) for bar in axes.patches[:3]] == [0, (1 << 20) + 8, (2 << 20) + 16]
    assert [line.get_ydata()[0] for line in axes.lines] == [4 << 20, 4 << 20, 2 << 20, 2 << 20]
    assert all(line.get_markerfacecolor() == "white" for line in axes.lines)
    assert plots.held_by_ranks(holding(DDP=[1, 1, 2])).title == "Not measured yet: what a rank holds"


def steps(times, badge=BADGE, **more) -> Result:
    """A result from {(model, way, device): {GPUs: seconds}}."""
    rows = [
        {"gpus": gpus, "model": model, "way": way, "device": device, "width": 8, "batch": 4, "seconds": seconds}
        for (model, way, device), values in times.items()
        for gpus, seconds in values.items()
    ]
    return Result("ddp_beside_data_parallel", {}, STEP_COLUMNS, rows, badge, **more)


HERE = steps({("tiny", DATA_PARALLEL, "GPU"): {1: 0.001, 2: 0.002}, ("tiny", DDP, "CPU"): {1: 0.004, 2: 0.003}}, "virtual GPU")
THERE = steps(
    {("small", DATA_PARALLEL, "GPU"): {1: 0.002, 4: 0.012}, ("small", DDP, "GPU"): {1: 0.002, 4: 0.003}},
    "recorded on 4× NVIDIA H200",
    origin={"machine": "4x NVIDIA H200"},
)


def test_times_of_two_clocks_are_not_compared_and_the_recorded_ones_are(drawn):
    figure = plots.ddp_beside_data_parallel(HERE, THERE)
    assert figure.title == "DDP on 4 GPUs: small model 4.0× as fast"
    assert "Tiny model, DataParallel: 1 ms on 1, 2 ms on 2; tiny model, DistributedDataParallel: 4 ms on 1, 3 ms on 2." in figure.alt
    assert "Recorded on 4× NVIDIA H200: small model, DataParallel: 2 ms on 1, 12 ms on 4" in figure.alt
    assert [[line.get_linestyle() for line in axes.lines] for axes in drawn[-1].axes] == [["--", "--", "-", "-"]] * 2
    assert [text.get_text() for text in drawn[-1].legends[0].get_texts()] == [
        "DataParallel (here: virtual GPUs)",
        "DDP (here: ranks on the CPU)",
        "recorded",
    ]


def test_what_was_measured_here_comes_before_what_was_recorded():
    measured = steps({("small", DATA_PARALLEL, "GPU"): {1: 0.002, 2: 0.006}, ("small", DDP, "GPU"): {1: 0.002, 2: 0.003}})
    assert plots.ddp_beside_data_parallel(measured, THERE).title == "DDP on 2 GPUs: small model 2.0× as fast"
    assert plots.ddp_beside_data_parallel(HERE).title == "Not measured yet: both ways on the same GPUs"
