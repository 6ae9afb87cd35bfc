"""What the tests of recordings share: two virtual H200s."""

import pytest

import labkit


@pytest.fixture
def machine():
    with labkit.use(gpus=2, like="H200", virtual=True, quiet=True) as used:
        yield used
