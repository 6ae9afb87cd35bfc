"""How a process that multiprocessing starts afresh gets the machine of its parent: the first thing that it unpickles puts it in place."""

from collections.abc import Callable
from typing import Any


class _Call:
    """A call that is made where this object is unpickled."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple]:
        return self.function, self.arguments


def with_call(
    prepare: Callable[[str], dict], function: Callable[[Any, dict], None], argument: Any, environment: Callable[[], dict[str, str]]
) -> Callable[[str], dict]:
    """`get_preparation_data` of multiprocessing that also has the child call `function` with the argument and what `environment` returns.

    A server of forks may be older than the machine: its children do not have this process's environment.
    """

    def get_preparation_data(name: str) -> dict:
        return prepare(name) | {"virtualgpu": _Call(function, argument, environment())}

    return get_preparation_data
