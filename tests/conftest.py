"""What all tests share: Hypothesis's settings, and the tests that need real GPUs."""

import pytest
from hypothesis import settings

# No deadlines: a busy machine is no failure.
settings.register_profile("kit", deadline=None)
settings.load_profile("kit")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` where there are too few real GPUs, and say so."""
    marked = [(item, marker) for item in items if (marker := item.get_closest_marker("gpu"))]
    if not marked:
        return
    import torch

    present = torch.cuda.device_count()
    for item, marker in marked:
        needed = marker.args[0] if marker.args else 1
        if present < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} real CUDA GPU{'s' * (needed > 1)}, this machine has {present}"))
