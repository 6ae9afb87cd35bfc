"""Prints what the ranks print, line by line with a label in the rank's colour: in the order of the ranks, or as it comes."""

import os
import sys

from labkit.processes.supervision import KEPT
from virtualgpu.front_end import ipython_shell

# Grounds for white letters, of a terminal's 256 colours: no colour of the letters alone can be read on white and on a dark theme's black.
_COLOURS = (25, 130, 22, 90, 23, 88, 60, 94)  # the label says the number too


class RankPrinter:
    """Prints the lines of one attempt after the other.

    In order (`live=False`) the first rank's lines come at once, and each other rank's when those before it have ended: so the text is the
    same whatever the timing. `quiet` prints nothing. `here` is how many ranks an attempt has on this computer.
    """

    def __init__(self, here: int, live: bool, quiet: bool) -> None:
        self._here, self._live, self._quiet = here, live, quiet
        self._coloured = _takes_colours()
        self._begin()

    def _begin(self) -> None:
        self._open: dict[int, bytes] = {}  # what follows a rank's last end of line
        self._waiting: dict[int, list[str]] = {}
        self._allowed: dict[int, int] = {}
        self._ended: set[int] = set()

    def start(self, rank: int) -> None:
        """This rank will print."""
        self._open[rank], self._waiting[rank], self._allowed[rank] = b"", [], KEPT
        self._print_ready()

    def add(self, rank: int, data: bytes) -> None:
        *lines, self._open[rank] = (self._open[rank] + data).split(b"\n")
        for line in lines:
            self._add_line(rank, line)
        self._print_ready()

    def _add_line(self, rank: int, line: bytes) -> None:
        self._allowed[rank] -= len(line) + 1
        if self._allowed[rank] >= 0:
            # A progress bar draws over its line: its last state is what a terminal would show.
            self._waiting[rank].append(
                line.rstrip(b"\r").rsplit(b"\r")[-1].decode(errors="replace")
            )

    def end(self, rank: int) -> None:
        """This rank prints no more."""
        if self._open[rank]:
            self._add_line(rank, self._open[rank])
        if self._allowed[rank] < 0:
            self._waiting[rank].append(
                f"[... {-self._allowed[rank] / (1 << 20):.1f} MiB of output left out ...]"
            )
        self._open[rank] = b""
        self._ended.add(rank)
        self._print_ready()

    def _print_ready(self) -> None:
        if not self._live and len(self._open) < self._here:
            return  # a rank that comes later may be the first
        for rank in sorted(self._open):
            for line in self._waiting[rank]:
                self._print(self._labelled(rank, line))
            self._waiting[rank].clear()
            if not self._live and rank not in self._ended:
                return

    def end_attempt(self, note: str = "") -> None:
        """Print what is left, then `note`; the ranks begin again."""
        for rank in sorted(self._open):
            for line in self._waiting[rank]:
                self._print(self._labelled(rank, line))
        self._begin()
        self.print_note(note)

    def print_note(self, note: str) -> None:
        if note:
            self._print(note)

    def _labelled(self, rank: int, line: str) -> str:
        label = f"[rank {rank}]"
        if self._coloured:
            label = f"\x1b[38;5;231;48;5;{_COLOURS[rank % len(_COLOURS)]}m{label}\x1b[0m"
        return f"{label} {line}"

    def _print(self, text: str) -> None:
        if not self._quiet:
            print(text, flush=True)


def _takes_colours() -> bool:
    """In a terminal and in a notebook; not in a file, nor by who asks for none (https://no-color.org)."""
    if os.environ.get("NO_COLOR"):
        return False
    return ipython_shell() is not None or sys.stdout.isatty()
