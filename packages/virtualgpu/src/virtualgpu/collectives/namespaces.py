"""The functions that run the operators of torch.distributed's namespaces.

They are imported at the first such operator: torch.distributed is heavy, and a torch may be without it.
"""

from collections.abc import Callable

from virtualgpu.ops.call import Handler


def _run() -> Handler:
    from virtualgpu.collectives import operators

    return operators.run


def _functional() -> Handler:
    from virtualgpu.collectives import operators

    return operators.functional


FUNCTIONS: dict[str, Callable[[], Handler]] = {"c10d": _run, "_c10d_functional": _functional}
