"""What all tests share: one thread each, Hypothesis's settings, and the tests that need real GPUs."""

import gc
import os
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

# Workers share the cores, and torch's threads wait spinning: with two threads each, two workers on two cores took twice as long.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# No deadlines: a busy machine is no failure.
settings.register_profile("kit", deadline=None)
settings.load_profile("kit")


@pytest.fixture(autouse=True)
def the_same_main() -> Iterator[None]:
    """A shell of IPython's puts its own module in the place of `__main__`, in which multiprocessing then looks for the program."""
    main = sys.modules["__main__"]
    yield
    sys.modules["__main__"] = main


def pytest_collection_finish() -> None:
    """Collections of garbage, of which the tests ask for many, pass over what is there before the first: half a million objects."""
    gc.collect()
    gc.freeze()


def gpus_needed(count: int = 1) -> int:
    """What the marker asks for: `gpu`, `gpu(2)` or `gpu(count=2)`."""
    return count


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` where there are too few real GPUs, and say so."""
    marked = [(item, marker) for item in items if (marker := item.get_closest_marker("gpu"))]
    if not marked:
        return
    import torch

    present = torch.cuda.device_count()
    for item, marker in marked:
        needed = gpus_needed(*marker.args, **marker.kwargs)
        if present < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} real CUDA GPU{'s' * (needed > 1)}, this machine has {present}"))
