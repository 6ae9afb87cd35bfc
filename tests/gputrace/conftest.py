"""What the tests of recordings share: two virtual H200s, and a garbage collector that tells of all objects."""

import gc
from collections.abc import Iterator

import pytest

import labkit


@pytest.fixture(scope="module", autouse=True)
def nothing_is_frozen() -> Iterator[None]:
    """As in most programs: recordings and searches ask the collector what there is."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.fixture
def machine():
    with labkit.use(gpus=2, like="H200", virtual=True, quiet=True) as used:
        yield used
