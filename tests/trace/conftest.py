"""Two virtual H200s for the tests of recordings."""

import pytest

import labkit


@pytest.fixture
def machine():
    with labkit.use(gpus=2, like="H200", virtual=True, quiet=True) as used:
        yield used
