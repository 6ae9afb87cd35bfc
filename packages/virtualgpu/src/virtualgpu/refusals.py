"""What a virtual GPU cannot do: it raises NotImplementedError by name, at its first use."""

from typing import Any

from virtualgpu.errors import unsupported


def refuse(name: str, original: Any = None) -> Any:
    """A function that raises NotImplementedError, in place of a function, or of a class where `original` is one.

    A class may stand in annotations and `isinstance` without harm. torch's compiler unwraps decorated functions when it is imported.
    """

    def refused(*args: Any, **kwargs: Any) -> Any:
        raise unsupported(name)

    if isinstance(original, type):
        return type(original.__name__, (), {"__new__": refused, "__module__": original.__module__})
    if wrapped := getattr(original, "__wrapped__", None):
        refused.__wrapped__ = wrapped  # type: ignore[attr-defined]
    return refused
