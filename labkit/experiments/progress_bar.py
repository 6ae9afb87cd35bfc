"""A bar that shows how far a measurement is, in a notebook and in a terminal."""

import sys
from html import escape
from typing import Any

from virtualgpu.front_end import ipython_shell

EMPTY = {"text/plain": ""}  # a stored notebook and a new run have the same output


class ProgressBar:
    """Bar that shows how many of `total` combinations are done. It disappears at the end.

    A program whose standard error is a file shows nothing.
    """

    def __init__(self, name: str, total: int) -> None:
        self._name = name
        self._total = total
        self._display: Any = None
        self._line = ""  # what stands in the terminal now

    def __enter__(self) -> "ProgressBar":
        if getattr(ipython_shell(), "kernel", None) is not None:
            from IPython.display import display

            self._display = display(EMPTY, raw=True, display_id=True)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._display is not None:
            self._display.update(EMPTY, raw=True)
        self._write("")

    def show(self, done: int, text: str) -> None:
        """Show that `done` combinations are done. `text` says which one is running now."""
        told = f"{self._name}: {done} of {self._total} done"
        if text:
            told = f"{told}, now {text}"
        if self._display is not None:
            bar = f'<progress value="{done}" max="{self._total}"></progress>'
            html = f"<label>{bar} {escape(told)}</label>"
            self._display.update({"text/html": html, "text/plain": told}, raw=True)
        else:
            self._write(told)

    def print(self, text: str) -> None:
        """Print a line above the bar, which stays when the bar disappears."""
        self._write("")
        print(text)

    def _write(self, line: str) -> None:
        """Replace the current line of the terminal."""
        if self._display is None and sys.stderr.isatty() and line != self._line:
            sys.stderr.write("\r" + line.ljust(len(self._line)) + ("" if line else "\r"))
            sys.stderr.flush()
            self._line = line
