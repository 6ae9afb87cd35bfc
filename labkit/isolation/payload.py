"""The payload that is sent between the two processes: pickled, what a cell defines by value, and never a tensor of a GPU."""

import contextlib
import inspect
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from labkit.processes import by_value


class DeviceTensorError(TypeError):
    """A tensor lies on a GPU: its memory belongs to one process."""


class _Pickler(by_value.Pickler):
    def reducer_override(self, value: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, (torch.Tensor, torch.UntypedStorage)) and value.device.type not in ("cpu", "meta"):
            raise DeviceTensorError(f"a tensor on {value.device}")
        return super().reducer_override(value)


def pack(path: Path, value: Any) -> None:
    """Write `value` to a new file.

    Raises:
        DeviceTensorError: it is, or holds, a tensor of a GPU.
        Exception: whatever a part of it that cannot be pickled raises.
    """
    with path.open("wb") as file:
        _Pickler(file, protocol=5).dump(value)


def unpack(path: Path) -> Any:
    """What `pack` wrote. Raises whatever building it here raises, such as ModuleNotFoundError."""
    with path.open("rb") as file:
        return pickle.load(file)


def unsendable(name: str, function: Callable[..., Any], args: tuple, keywords: dict[str, Any], file: Path) -> tuple[str, Exception]:
    """Which part of a call of `name` cannot be packed, in words, and what it raised; `file` is one to try in."""
    for part, value in _parts(name, function, args, keywords):
        try:
            pack(file, value)
        except Exception as error:
            return part, error
    raise AssertionError("every part can be packed")


def _parts(name: str, function: Callable[..., Any], args: tuple, keywords: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The arguments, then the variables that the function uses, then the whole."""
    yield from ((f"argument {number} of {name}", value) for number, value in enumerate(args, 1))
    yield from ((f"argument {keyword}= of {name}", value) for keyword, value in keywords.items())
    with contextlib.suppress(TypeError, ValueError):  # not a function in Python, or one that uses a variable before it has a value
        used = inspect.getclosurevars(function)
        variables = used.nonlocals if _importable(function) else {**used.nonlocals, **used.globals}  # an importable one is sent by its name
        yield from ((f"the variable {variable}, which {name} uses,", value) for variable, value in variables.items())
    yield f"the function {name}", function
    yield f"the call of {name}", (function, args, keywords)


def _importable(function: Callable[..., Any]) -> bool:
    """Whether its module's name and its own name find it: then cloudpickle sends the names. What `__main__` holds goes by value."""
    module = getattr(function, "__module__", None)
    return module != "__main__" and getattr(sys.modules.get(str(module)), getattr(function, "__qualname__", ""), None) is function
