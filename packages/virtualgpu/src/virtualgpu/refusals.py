"""Refusal of what a virtual GPU cannot do: NotImplementedError with the name, at the first use."""

from typing import Any

from virtualgpu.errors import unsupported


def refuse(name: str, original: Any = None) -> Any:
    """Return a function that raises NotImplementedError, as a replacement of `original`.

    If `original` is a class, return a class, which can be used in annotations and `isinstance`.
    torch's compiler unwraps decorated functions when it is imported, so the function keeps
    `__wrapped__`.
    """

    def refused(*args: Any, **kwargs: Any) -> Any:
        raise unsupported(name)

    if isinstance(original, type):
        members = {"__new__": refused, "__module__": original.__module__}
        return type(original.__name__, (), members)
    wrapped = getattr(original, "__wrapped__", None)
    if wrapped is not None:
        refused.__wrapped__ = wrapped  # type: ignore[attr-defined]
    return refused
