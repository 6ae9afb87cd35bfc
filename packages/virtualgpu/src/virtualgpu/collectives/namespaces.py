"""The functions that run the operators of torch.distributed's namespaces.

They are imported at the first such operator, because torch.distributed is slow to import and some
builds of torch lack it.
"""

from collections.abc import Callable

from virtualgpu.ops.call import Handler


def _run() -> Handler:
    """Import and return `operators.run`, which runs operators of the namespace `c10d::`."""
    from virtualgpu.collectives import operators

    return operators.run


def _functional() -> Handler:
    """Import and return `operators.functional`, which runs operators of `_c10d_functional::`."""
    from virtualgpu.collectives import operators

    return operators.functional


FUNCTIONS: dict[str, Callable[[], Handler]] = {"c10d": _run, "_c10d_functional": _functional}
