"""Options of commands and magics that record."""

from virtualgpu.options import HOST, option

MAX_EVENTS = 200_000  # on a real GPU some 2 KB of host memory each
MAX_EVENTS_OPTION = option(
    "--max-events",
    type=int,
    metavar="N",
    default=MAX_EVENTS,
    help="number of events to keep; the newest stay (default: %(default)s)",
)
FILES = (
    option(
        "--output",
        metavar="FILE",
        help="the page; one of that name is written over (default: SCRIPT-memory.html, here)",
    ),
    option(
        "--chrome",
        metavar="FILE",
        help="also write what ran when for https://ui.perfetto.dev, such as trace.json",
    ),
    option(
        "--snapshot",
        metavar="FILE",
        help="also write the memory for https://pytorch.org/memory_viz, such as memory.pickle",
    ),
)
NO_TIMELINE = option(
    "--no-timeline",
    action="store_true",
    help="leave out what ran when: on real GPUs PyTorch's profiler stays off",
)
FIT = (
    option(
        "--like",
        metavar="A,B",
        default="T4,L4,A100,A100-80,H100,H200",
        help="the models (default: %(default)s)",
    ),
    option(
        "--steps",
        type=int,
        default=4,
        metavar="N",
        help="number of steps, 3 or more; up to 4 more run if memory changes (default: %(default)s)",
    ),
    HOST,
)


def check_max_events(given: int) -> None:
    """Raise ValueError for a number of events that no recording can keep."""
    if given < 1:
        raise ValueError(f"--max-events {given}: give a whole number, 1 or more")
