"""Options of commands and magics that record."""

from virtualgpu.options import option

MAX_EVENTS = 200_000  # on a real GPU some 2 KB of host memory each
MAX_EVENTS_OPTION = option(
    "--max-events",
    type=int,
    metavar="N",
    default=MAX_EVENTS,
    help="number of events to keep; the newest stay (default: %(default)s)",
)


def check_max_events(given: int) -> None:
    """Raise ValueError for a number of events that no recording can keep."""
    if given < 1:
        raise ValueError(f"--max-events {given}: give a whole number, 1 or more")
