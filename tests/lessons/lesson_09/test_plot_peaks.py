"""The figure of the peaks of several steps."""

import pytest
import torch

import labkit
from gpulessons.lesson_09.labs import kinds_at_peak, plot_peaks

MIB = 1 << 20


@pytest.fixture
def traces():
    """Two recordings that allocate 96 MiB and 32 MiB of no known kind."""
    with labkit.use(gpus=1, virtual=True, quiet=True):
        found = {}
        for name, size in {"large": 96, "small": 32}.items():
            with labkit.record() as found[name]:
                torch.empty(size * MIB, dtype=torch.uint8, device="cuda")
        yield found


def test_the_kinds_add_up_to_the_peak(traces):
    for trace in traces.values():
        assert sum(kinds_at_peak(trace).values()) == trace.peak
    assert kinds_at_peak(traces["large"])["other"] == 96 * MIB


def test_the_figure_says_first_and_last_peak_and_what_is_free(traces):
    figure = plot_peaks(traces, room=64 * MIB)
    assert figure.title == "From 96 MiB to 32 MiB. The GPU has 64 MiB free"
    assert "Large: 96 MiB, other 96 MiB." in figure.alt
    assert "The GPU has 64 MiB free." in figure.alt
    assert labkit.current().badge.lower() in figure.alt.lower()
