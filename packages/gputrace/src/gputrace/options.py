"""Options of commands and magics that record."""

from virtualgpu import profiles
from virtualgpu.options import HOST, option

MAX_EVENTS = 200_000  # on a real GPU, each takes about 2 KB of host memory
MAX_EVENTS_OPTION = option(
    "--max-events",
    type=int,
    metavar="N",
    default=MAX_EVENTS,
    help="number of events to keep. Older ones are dropped (default: %(default)s)",
)
FILES = (
    option(
        "--output",
        metavar="FILE",
        help="the page to write. It replaces a page of that name (default: SCRIPT-memory.html)",
    ),
    option(
        "--chrome",
        metavar="FILE",
        help="also write the timeline for https://ui.perfetto.dev, such as trace.json",
    ),
    option(
        "--snapshot",
        metavar="FILE",
        help="also write the memory for https://pytorch.org/memory_viz, such as memory.pickle",
    ),
)
SAVE = option(
    "--save",
    metavar="FILE",
    help="also keep the trace, such as before.trace, which --compare and Trace.load read",
)
COMPARE = option(
    "--compare",
    nargs=2,
    metavar=("BEFORE", "AFTER"),
    help="write a page about what changed between two traces that --save kept. No script runs",
)
NO_TIMELINE = option(
    "--no-timeline",
    action="store_true",
    help="record no timeline. On real GPUs, PyTorch's profiler is not used",
)
FIT = (
    option(
        "--like",
        metavar="A,B",
        default="T4,L4,A100,A100-80,H100,H200",
        help=f"GPU models out of {', '.join(profiles.names())}, separated by commas "
        "(default: %(default)s)",
    ),
    option(
        "--steps",
        type=int,
        default=4,
        metavar="N",
        help="number of steps, at least 3. If memory changes, up to 4 more run "
        "(default: %(default)s)",
    ),
    HOST,
)


def check_max_events(given: int) -> None:
    """Raise ValueError if `given` is not a number of events that a recording can keep."""
    if given < 1:
        raise ValueError(f"--max-events {given}: expected a whole number from 1")
