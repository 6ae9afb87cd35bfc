"""What all tests share: Hypothesis's settings, and the tests that need real GPUs."""

import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

# No deadlines: a busy machine is no failure.
settings.register_profile("kit", deadline=None)
settings.load_profile("kit")


@pytest.fixture(autouse=True)
def the_same_main() -> Iterator[None]:
    """A shell of IPython's puts its own module in the place of `__main__`, in which multiprocessing then looks for the program."""
    main = sys.modules["__main__"]
    yield
    sys.modules["__main__"] = main


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
