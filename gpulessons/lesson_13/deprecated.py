"""Find the deprecated functions of torch.cuda that a block calls."""

import contextlib
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def deprecated_calls() -> Iterator[list[str]]:
    """Collect the deprecated functions of torch.cuda that the block calls.

    This also works where warnings are hidden.
    """
    functions = [
        function for function in vars(torch.cuda).values() if hasattr(function, "__deprecated__")
    ]
    texts, warned, before = (
        {function.__wrapped__.__code__: function.__deprecated__ for function in functions},
        [],
        sys.getprofile(),
    )

    def called(frame: types.FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code in texts:
            warned.append(texts[frame.f_code])

    sys.setprofile(called)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield warned
    finally:
        sys.setprofile(before)
