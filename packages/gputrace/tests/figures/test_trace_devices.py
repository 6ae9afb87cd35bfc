"""The memory of all devices of a trace, one panel each."""

import pytest


def replicas(trace_of, sizes):
    """Return a made-up trace with a device for each size in MiB, which the device holds."""
    return trace_of(
        [
            (0.1, action, 2, size, device, 1)
            for device, size in enumerate(sizes)
            for action in ("segment_alloc", "alloc")
        ]
    )


@pytest.mark.parametrize(
    ("sizes", "title"),
    [
        ([9], "Peak 9 MiB on cuda:0"),
        ([40, 10], "Peak 40 MiB on cuda:0: 4.0 times the 10 MiB on cuda:1"),
        ([10, 40, 10], "Peak 40 MiB on cuda:1: 4.0 times the 10 MiB on the other 2"),
        ([40, 10, 20, 30], "Peak 40 MiB on cuda:0, 10 MiB to 30 MiB on the other 3"),
        ([0, 40], "Peak 40 MiB on cuda:1, nothing on cuda:0"),
        ([10, 10, 10], "All 3 devices peak at about 10 MiB"),
    ],
)
def test_the_title_compares_the_devices(trace_of, sizes, title):
    assert replicas(trace_of, sizes).plot_devices().title == title


def test_nothing_allocated(trace_of):
    assert trace_of([]).plot_devices().title == "Nothing was allocated on any device"


@pytest.mark.parametrize("count", [1, 2, 8])
def test_panels_share_their_scales(trace_of, drawn, count):
    figure = replicas(trace_of, range(10, 10 + count)).plot_devices()
    panels = drawn[-1].axes
    assert len(panels) == count
    assert len({(panel.get_xlim(), panel.get_ylim()) for panel in panels}) == 1
    assert f"{9 + count} MiB on cuda:{count - 1}" in figure.alt
