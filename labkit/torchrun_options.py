"""Options of `labkit torchrun` and `%%torchrun`, and the defaults that `labkit.torchrun` shares."""

from virtualgpu.cluster import NETWORK
from virtualgpu.options import HOST, LIKE, MEMORY, NO_VALUES, VIRTUAL_TIME, CommandParser, option

RANKS = 2
NODES = 1
CELL_TIMEOUT = 60  # seconds; a command has no limit
MAX_RESTARTS = 0

DEFAULT = "(default: %(default)s)"
RANKS_OPTION = option(
    "--ranks",
    type=int,
    metavar="N",
    default=RANKS,
    help=f"number of ranks on all nodes together {DEFAULT}",
)
OF_THE_JOB = (
    RANKS_OPTION,
    option(
        "--nodes",
        type=int,
        metavar="N",
        default=NODES,
        help=f"nodes among which the ranks are divided, all on this machine {DEFAULT}",
    ),
    option("--timeout", type=float, metavar="S", help="seconds that the ranks may run"),
    option(
        "--max-restarts",
        type=int,
        metavar="N",
        default=MAX_RESTARTS,
        help=f"number of times that all ranks start again after one has failed {DEFAULT}",
    ),
    option(
        "--devices",
        metavar="KIND",
        help="cuda or cpu (default: cuda if this machine has a GPU for each rank)",
    ),
    option(
        "--network",
        metavar="RATE",
        default=NETWORK,
        help=f"rate of a virtual GPU's adapter to other nodes {DEFAULT}",
    ),
)
VIRTUAL = (MEMORY, NO_VALUES, VIRTUAL_TIME, HOST)
SIMULATE = option(
    "--simulate",
    type=int,
    metavar="N",
    help="run one rank of a world of N ranks alone, on a virtual GPU without values",
)
RANK = option("--rank", type=int, metavar="R", help="the rank that --simulate runs (default: 0)")
IN_ORDER = option(
    "--in-order",
    action="store_true",
    help="show the ranks' output one rank after the other (default: lines as they come)",
)
LIVE = option(
    "--live",
    action="store_true",
    help="show lines as they come (default: one rank after the other)",
)
TRACE = option(
    "--trace",
    action="store_true",
    help="record what the virtual GPUs do, as the result's `trace`",
)
OUTPUT = option(
    "-o",
    "--output",
    metavar="NAME",
    help="variable for the result, which is what `labkit.torchrun` returns",
)


def add_job(parser: CommandParser, timeout: float | None) -> None:
    """Add the options that `labkit torchrun` and `%%torchrun` share to a parser.

    `timeout` is the default of `--timeout` in seconds, or None for no limit.
    """
    parser.add(*OF_THE_JOB)
    parser.add(LIKE, help=f"{LIKE.settings['help']} (default: ranks have no virtual GPU)")
    parser.add(*VIRTUAL)
    parser.set_defaults(timeout=timeout)
