"""How long something went on, whatever else went on beside it."""

from types import SimpleNamespace

import numpy as np
import pytest

from labkit.trace import busy


@pytest.mark.parametrize(
    ("spans", "seconds"),
    [
        ([], 0.0),
        ([(1, 3)], 2.0),
        ([(0, 1), (2, 4)], 3.0),
        ([(0, 2), (1, 3)], 3.0),
        ([(0, 4), (1, 2), (5, 6)], 5.0),  # nothing is idle while the first still runs
    ],
)
def test_what_overlaps_counts_once(spans, seconds):
    start, end = np.array(spans, float).reshape(-1, 2).T
    told = SimpleNamespace(start=start, end=end)
    assert busy.seconds_of(told, np.ones(len(start), bool)) == seconds
