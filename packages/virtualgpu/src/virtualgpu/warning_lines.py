"""Warnings name the line that PyTorch's C++ would name: that of the user or of PyTorch's Python.

On a real GPU, C++ attributes its warnings to the innermost line of Python. On a virtual GPU this is
often a line of the kit, which has called C++ on its part. Python asks `warnings._showwarnmsg` to
show a warning that no filter has stopped. Here a warning that names a line of the kit is issued
again for the line that called the kit. So filters for modules, and Python's rule that a line warns
once, work as on a real GPU.
"""

import sys
import warnings
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from virtualgpu import front_end

Show = Callable[[warnings.WarningMessage], None]


def replacements(machine: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield (object, new attributes by name) for each object of Python to change.

    These are the changes of this module. They are undone when `machine` is removed.
    """
    yield warnings, {"_showwarnmsg": _shows_at_caller(warnings._showwarnmsg)}  # type: ignore


def _shows_at_caller(show: Show) -> Show:
    """Return `show`, Python's function that shows a warning, changed to name the caller's line.

    A warning that names a line of the kit is issued again for the line that called the kit.
    """

    def show_at_caller(message: warnings.WarningMessage) -> None:
        if not front_end.is_ours(message.filename):
            return show(message)
        warned = _frame(message)
        if warned is None:
            return show(message)
        caller = warned
        while caller.f_back is not None and front_end.is_ours(caller.f_code.co_filename):
            caller = caller.f_back
        if front_end.is_ours(caller.f_code.co_filename):
            return show(message)
        # The kit's line may warn again, because it stands for any number of lines.
        warned.f_globals.get("__warningregistry__", {}).clear()
        once = getattr(warnings, "onceregistry", {})
        once.pop((str(message.message), message.category), None)
        return warnings.warn_explicit(
            message.message,
            message.category,
            caller.f_code.co_filename,
            caller.f_lineno,
            caller.f_globals.get("__name__", "<unknown>"),
            caller.f_globals.setdefault("__warningregistry__", {}),
            caller.f_globals,
            message.source,
        )

    return show_at_caller


def _frame(message: warnings.WarningMessage) -> FrameType | None:
    """Return the stack frame whose line the warning names, or None."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_lineno == message.lineno and frame.f_code.co_filename == message.filename:
            return frame
        frame = frame.f_back
    return None
