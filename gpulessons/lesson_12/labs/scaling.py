"""A training step under FSDP on 8 to 1,024 GPUs: its time, and what a rank holds, as one simulated rank of each world has them."""

from collections.abc import Iterator
from typing import Any

from matplotlib.ticker import NullLocator

from gpulessons.rank_programs import rank_program
from gputrace import units
from gputrace.figures.figure import BLACK, BLUE, GREEN, VERMILLION, Figure, decimal_scale, label_ends, new_canvas
from labkit.labs.experiment import Result, Row, Run
from labkit.labs.figures import badged, in_style

LIKE = "H100"
PER_NODE = 8
RANKS = (8, 64, 256, 1024)
NETWORKS = ("400Gb/s", "100Gb/s")
BLOCKS, WIDTH, TOKENS = 4, 4096, 256  # of a GPT's blocks, and of a sequence
SEQUENCES = 1024  # of a batch on 8 GPUs
GROWS, FIXED = "grows", "fixed"
COLUMNS = {"ranks": "", "batch": "", "network": "", "seconds": "seconds", "held": "bytes", "peak": "bytes"}


def scaling_steps() -> Run:
    """A step on 8, 64, 256 and 1,024 virtual H100s, eight a node, a row for each.

    Four blocks of a GPT, 4,096 wide, under FSDP in bfloat16 with AdamW, on sequences of 256 tokens: 1,024 of them on 8 GPUs. The batch
    then "grows" with the ranks, so that each has 128 (weak scaling), or stays "fixed" (strong scaling), by networks of 400 and of 100 Gb/s
    a GPU. Each world is run, as its rank 0 with the others simulated: all alike, and none late. `held` is what a rank holds after a step.
    """
    parameters = {"ranks": list(RANKS), "blocks": BLOCKS, "width": WIDTH, "tokens": TOKENS, "sequences": SEQUENCES}
    return Run("scaling_steps", parameters, COLUMNS, f"one simulated rank of each world, virtual NVIDIA {LIKE}", len(_asked()), _points())


def _asked() -> list[Row]:
    weak = [{"ranks": ranks, "batch": GROWS, "network": NETWORKS[0]} for ranks in RANKS]
    return weak + [{"ranks": ranks, "batch": FIXED, "network": network} for network in NETWORKS for ranks in RANKS]


def _points() -> Iterator[Row]:
    from gpulessons.simulated_worlds import results

    asked = _asked()
    worlds = {_key(row): _world(row) for row in asked}  # those on one node are the same by any network
    coming, found = results(rank_program("scaling"), list(worlds.values())), {}
    for row in asked:
        if (key := _key(row)) not in found:
            found[key] = next(coming)
        yield row | found[key]


def _key(row: Row) -> tuple:
    return row["ranks"], _sequences(row), row["network"] if row["ranks"] > PER_NODE else ""


def _sequences(row: Row) -> int:
    """Of a rank."""
    return SEQUENCES // (PER_NODE if row["batch"] == GROWS else row["ranks"])


def _world(row: Row) -> dict[str, Any]:
    where = {"world": row["ranks"], "nodes": row["ranks"] // PER_NODE, "network": row["network"], "like": LIKE}
    return where | {"arguments": [BLOCKS, WIDTH, TOKENS, _sequences(row)]}


# The figure


LINES = {  # by what becomes of the batch, and the network
    (GROWS, NETWORKS[0]): (BLACK, "o", "the batch grows"),
    (FIXED, NETWORKS[0]): (BLUE, "s", "the batch is fixed"),
    (FIXED, NETWORKS[1]): (VERMILLION, "D", "fixed, 100 Gb/s"),
}
BYTES = {  # by what becomes of the batch, and the column
    (GROWS, "peak"): (BLACK, "o", "peak, batch grows"),
    (FIXED, "peak"): (BLUE, "s", "peak, batch fixed"),
    (FIXED, "held"): (GREEN, "^", "held, batch fixed"),
}


@in_style
def plot_scaling_steps(result: Result) -> Figure:
    """By the number of GPUs, above the time of a step, below the most bytes that a rank holds in it, and what it holds after it."""
    canvas, above, below = new_canvas(_finding(result), rows=2)
    ends: list[list[tuple]] = [[], []]
    for (batch, network), (colour, marker, name) in LINES.items():
        seconds = result.by("ranks", "seconds", batch=batch, network=network)
        above.plot(list(seconds), list(seconds.values()), marker=marker, color=colour)
        ends[0] += [(ranks, seconds[ranks], name, colour) for ranks in list(seconds)[-1:]]
    for (batch, column), (colour, marker, name) in BYTES.items():
        nbytes = result.by("ranks", column, batch=batch, network=NETWORKS[0])
        below.plot(list(nbytes), list(nbytes.values()), marker=marker, color=colour)
        ends[1] += [(ranks, nbytes[ranks], name, colour) for ranks in list(nbytes)[-1:]]
    decimal_scale(above, "time per step", units.time_text)
    below.set_yscale("log", base=2)
    below.set_yticks(list(TICKS), [units.byte_text(tick) for tick in TICKS])
    below.yaxis.set_minor_locator(NullLocator())
    below.margins(y=0.1)
    below.set_ylabel("memory per GPU")
    below.set_xscale("log", base=2)
    below.set_xticks(RANKS, [f"{ranks:,}" for ranks in RANKS])
    below.xaxis.set_minor_locator(NullLocator())
    below.set_xlabel(f"GPUs, {PER_NODE} a node")
    for axes, names in zip((above, below), ends, strict=True):
        label_ends(axes, names)
    shown = f"{NETWORKS[0].replace('Gb', ' Gb')} where not said, logarithmic axes  ·  {result.badge}"
    return badged(canvas, result.badge, *(_told(result, *line) for line in LINES), shown=shown)


TICKS = tuple(1 << power for power in (27, 30, 33, 36))  # bytes


def _finding(result: Result) -> str:
    seconds = result.by("ranks", "seconds", batch=FIXED, network=NETWORKS[0])
    if set(seconds) != set(RANKS):
        return "Not measured yet: a step on 8 to 1,024 GPUs"
    best = min(seconds, key=seconds.__getitem__)
    if best == RANKS[-1]:
        return f"With a fixed batch, {best:,} GPUs are {seconds[RANKS[0]] / seconds[best]:.0f} times as fast as {RANKS[0]}"
    longer = seconds[RANKS[-1]] / seconds[best]
    return f"With a fixed batch, a step is fastest on {best} GPUs; on {RANKS[-1]:,} it takes {longer:.1f} times as long"


def _told(result: Result, batch: str, network: str) -> str:
    columns = (result.column(name, batch=batch, network=network) for name in ("ranks", "seconds", "peak", "held"))
    parts = [
        f"on {ranks:,} GPUs {units.time_text(seconds)}, peak {units.byte_text(peak)}, held {units.byte_text(held)}"
        for ranks, seconds, peak, held in zip(*columns, strict=True)
    ]
    return f"The batch {batch if batch == GROWS else 'is fixed'}, {network}: {'; '.join(parts)}." if parts else ""
