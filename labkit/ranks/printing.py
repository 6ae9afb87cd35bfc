"""Print what the ranks print, with a label before each line."""

import os
import sys

from labkit.processes.supervision import KEPT
from virtualgpu.front_end import ipython_shell

# Background colours of labels, among a terminal's 256 colours. White letters on them can be read in
# light and dark themes. No colour of letters alone can be read in both.
_COLOURS = (25, 130, 22, 90, 23, 88, 60, 94)


class RankPrinter:
    """Printer of the ranks' lines, one attempt after the other.

    By default, the lines of the first rank are printed at once. The lines of every other rank are
    printed when all ranks before it have ended, so that the text does not depend on timing.

    Args:
        expected: the number of ranks in an attempt.
        live: whether to print all lines at once.
        quiet: whether to print nothing.
    """

    def __init__(self, expected: int, live: bool, quiet: bool) -> None:
        self._expected, self._live, self._quiet = expected, live, quiet
        self._coloured = _takes_colours()
        self._begin()

    def _begin(self) -> None:
        self._unfinished: dict[int, bytes] = {}  # the text of each rank after its last end of line
        self._waiting: dict[int, list[str]] = {}  # the lines that are not printed yet
        self._allowed: dict[int, int] = {}  # the bytes of a rank that may still be printed
        self._ended: set[int] = set()

    def start(self, rank: int) -> None:
        """Expect lines of this rank."""
        self._unfinished[rank], self._waiting[rank], self._allowed[rank] = b"", [], KEPT
        self._print_ready()

    def add(self, rank: int, data: bytes) -> None:
        """Add output of this rank, and print its finished lines."""
        *lines, self._unfinished[rank] = (self._unfinished[rank] + data).split(b"\n")
        for line in lines:
            self._add_line(rank, line)
        self._print_ready()

    def _add_line(self, rank: int, line: bytes) -> None:
        self._allowed[rank] -= len(line) + 1
        if self._allowed[rank] >= 0:
            # A progress bar draws over its line. A terminal would show its last state.
            shown = line.rstrip(b"\r").rsplit(b"\r")[-1]
            self._waiting[rank].append(shown.decode(errors="replace"))

    def end(self, rank: int) -> None:
        """Expect no more output of this rank."""
        if self._unfinished[rank]:
            self._add_line(rank, self._unfinished[rank])
            self._unfinished[rank] = b""
        if self._allowed[rank] < 0:
            mebibytes = -self._allowed[rank] / (1 << 20)
            self._waiting[rank].append(f"[... {mebibytes:.1f} MiB of output left out ...]")
        self._ended.add(rank)
        self._print_ready()

    def _print_ready(self) -> None:
        """Print the lines whose turn has come."""
        if not self._live and len(self._unfinished) < self._expected:
            return  # a rank that starts later may be the first in order
        for rank in sorted(self._waiting):
            self._print_waiting(rank)
            if not self._live and rank not in self._ended:
                return

    def end_attempt(self, note: str = "") -> None:
        """Print the remaining lines and a note, and expect a new attempt."""
        for rank in sorted(self._waiting):
            self._print_waiting(rank)
        self._begin()
        self.print_note(note)

    def print_note(self, note: str) -> None:
        """Print a line without a label, unless it is empty."""
        if note:
            self._print(note)

    def _print_waiting(self, rank: int) -> None:
        label = f"[rank {rank}]"
        if self._coloured:
            label = f"\x1b[38;5;231;48;5;{_COLOURS[rank % len(_COLOURS)]}m{label}\x1b[0m"
        for line in self._waiting[rank]:
            self._print(f"{label} {line}")
        self._waiting[rank].clear()

    def _print(self, line: str) -> None:
        if not self._quiet:
            print(line, flush=True)


def _takes_colours() -> bool:
    """Return whether the output is a terminal or a notebook.

    A file takes no colours, and neither does a user who set NO_COLOR (https://no-color.org).
    """
    if os.environ.get("NO_COLOR"):
        return False
    return ipython_shell() is not None or sys.stdout.isatty()
