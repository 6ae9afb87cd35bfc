"""How far the memory of DistributedDataParallel varies from run to run on real GPUs: a recording, drawn."""

from gputrace import units
from gputrace.figures.figure import BLUE, VERMILLION, Figure, byte_ticks, label_ends, new_canvas
from labkit.labs.experiment import Result
from labkit.labs.figures import badged, in_style

LOOKS = {"reserved": ("#666666", "D", 0.2), "peak": (VERMILLION, "s", 0.0), "allocated": (BLUE, "o", -0.2)}  # colour, marker, shift


@in_style
def plot_ddp_memory(recorded: Result) -> Figure:
    """Every value of memory that a rank was seen with at each point of its first steps, a mark each; a line joins those of a point.

    `recorded` is the recording `ddp_memory`.
    """
    points = recorded.parameters["points"]
    peaks = [nbytes / 2**30 for nbytes in recorded.column("bytes", point=points[-1], kind="peak")]
    canvas, axes = new_canvas(f"{recorded.parameters['repeats']} runs of one program: peaks from {min(peaks):.2f} to {max(peaks):.2f} GiB")
    ends = []
    for kind, (colour, marker, shift) in LOOKS.items():
        for place, point in enumerate(points):
            seen = recorded.column("bytes", point=point, kind=kind)
            axes.plot([place + shift] * len(seen), seen, marker, linestyle="-", color=colour, linewidth=1.5)
        ends.append((len(points) - 0.8, max(seen), kind, colour))
    byte_ticks(axes, 1.08 * max(recorded.column("bytes")), most=6)
    axes.set_xticks(range(len(points)), [point.replace(" ", "\n") for point in points])
    axes.grid(axis="x", visible=False)
    label_ends(axes, ends)
    return badged(canvas, recorded.badge, *(_told(recorded, point) for point in points))


def _told(recorded: Result, point: str) -> str:
    parts = []
    for kind in LOOKS:
        seen = sorted(map(units.byte_text, recorded.column("bytes", point=point, kind=kind)))
        parts.append(f"{kind} {' or '.join(seen)}")
    return f"{point}: {', '.join(parts)}."
