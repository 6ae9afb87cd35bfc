"""Times of depthwise convolutions, compared with an H200 (timing/convolutions.json)."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import virtualgpu

from ..heard import spans

ROWS = json.loads(
    (Path(__file__).parents[3] / "benchmarks/timing/convolutions.json").read_text(encoding="utf-8")
)["rows"]
DEPTHWISE = [row for row in ROWS if row["groups"] == row["shape"][1] and not row["last"]]
LAST = [row for row in ROWS if row["last"] and row["stride"] == 1]


@pytest.fixture(autouse=True)
def valueless() -> Iterator[None]:
    with virtualgpu.use(1, like="H200", values=False):
        yield


@pytest.mark.sample(12)
@pytest.mark.parametrize(
    "row",
    DEPTHWISE,
    ids=lambda row: f"{row['dtype']}, {row['shape']}, {row['kernel']}, stride {row['stride']}",
)
def test_depthwise_convolutions_take_as_long_as_on_an_h200(row):
    for name, milliseconds in took(row).items():
        assert milliseconds == pytest.approx(row[name], rel=0.25)


def test_with_channels_last_cudnns_take_about_as_long():
    """Check that seven of ten are within a third. For some sizes, cuDNN chooses a slow kernel."""
    ratios = [milliseconds / row[name] for row in LAST for name, milliseconds in took(row).items()]
    assert sum(3 / 4 < ratio < 4 / 3 for ratio in ratios) > 0.7 * len(ratios)


def took(row: dict) -> dict[str, float]:
    """Return the milliseconds of a recorded convolution on a virtual H200.

    They are for the output and for each gradient, by name.
    """
    x = torch.empty(row["shape"], device="cuda", dtype=getattr(torch, row["dtype"]))
    x = x.to(
        memory_format=torch.channels_last if row["last"] else torch.contiguous_format
    ).requires_grad_()
    weight = torch.empty(
        row["out"],
        1,
        row["kernel"],
        row["kernel"],
        device="cuda",
        dtype=x.dtype,
        requires_grad=True,
    )
    y = None

    def forward() -> None:
        nonlocal y
        y = F.conv2d(
            x, weight, stride=row["stride"], padding=row["kernel"] // 2, groups=row["groups"]
        )

    found = {"forward": 1e3 * spans(forward)[-1].duration}
    for wanted, name in ((x, "input"), (weight, "weight")):
        back = spans(
            lambda wanted=wanted: torch.autograd.grad(
                y, wanted, torch.empty_like(y), retain_graph=True
            )
        )
        found[name] = 1e3 * next(
            span.duration for span in back if span.name == "convolution_backward"
        )
    return found
