"""Measure depthwise, grouped and plain convolutions on a real GPU.

usage: python benchmarks/timing/convolutions.py OUT.json

The script needs a CUDA GPU, or `virtualgpu run --virtual-time --no-values`. The rule for depthwise
convolutions in virtualgpu/ops/nn is from its results.

Times are milliseconds between two CUDA events, medians of 7, for the output and for each gradient.
convolutions.json has the times of H200s with torch 2.11 and driver 580.159.04. The rows with
channels last are from a second run of that day. The GPU sleeps first, so that launches take no
part.
"""

import datetime
import json
import statistics
import sys
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

DEPTHWISE = (
    (64, 96, 112),
    (64, 192, 56),
    (64, 384, 28),
    (64, 768, 14),
    (64, 1024, 7),
    (128, 240, 28),
    (16, 192, 56),
)
DEPTHWISE_LAST = (
    (64, 96, 112),
    (64, 96, 56),
    (64, 192, 56),
    (64, 192, 28),
    (64, 384, 14),
    (64, 768, 14),
    (64, 768, 7),
    (16, 192, 56),
)
GROUPED = (
    (64, 192, 56, 1),
    (64, 384, 28, 1),
    (64, 384, 28, 2),
    (64, 768, 14, 1),
    (64, 1536, 7, 1),
    (128, 192, 28, 1),
)
# batch, channels, size, kernel, stride, output channels
PLAIN = (
    (64, 64, 56, 3, 1, 64), (64, 128, 28, 3, 1, 128), (64, 256, 14, 3, 1, 256),
    (64, 512, 7, 3, 1, 512), (64, 64, 56, 1, 1, 256), (64, 256, 56, 1, 1, 64),
    (64, 512, 28, 1, 1, 128), (64, 1024, 14, 1, 1, 256), (64, 16, 112, 1, 1, 96),
    (64, 32, 112, 1, 1, 16), (64, 3, 224, 7, 2, 64), (64, 3, 224, 3, 2, 32), (64, 96, 56, 1, 1, 24),
    (128, 40, 28, 1, 1, 240), (128, 240, 28, 1, 1, 40), (64, 128, 28, 3, 1, 32),
    (64, 672, 14, 1, 1, 112),
)  # fmt: skip


def milliseconds(work: Callable[[], object]) -> float:
    work()
    work()
    found = []
    for _ in range(7):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(400_000)
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end))
    return round(statistics.median(found), 4)


def measured(
    dtype: torch.dtype,
    batch: int,
    channels: int,
    size: int,
    kernel: int,
    stride: int,
    groups: int,
    out: int,
    last=False,
) -> dict:
    x = torch.randn(batch, channels, size, size, device="cuda", dtype=dtype)
    x = x.to(
        memory_format=torch.channels_last if last else torch.contiguous_format
    ).requires_grad_()
    weight = torch.randn(
        out, channels // groups, kernel, kernel, device="cuda", dtype=dtype, requires_grad=True
    )

    def forward() -> torch.Tensor:
        return F.conv2d(x, weight, stride=stride, padding=kernel // 2, groups=groups)

    y = forward()
    grad = torch.randn_like(y)
    found = {
        "dtype": str(dtype)[6:],
        "shape": list(x.shape),
        "out": out,
        "kernel": kernel,
        "stride": stride,
        "groups": groups,
        "last": last,
    }
    return found | {
        "forward": milliseconds(forward),
        "input": milliseconds(lambda: torch.autograd.grad(y, x, grad, retain_graph=True)),
        "weight": milliseconds(lambda: torch.autograd.grad(y, weight, grad, retain_graph=True)),
    }


def rows(dtype: torch.dtype) -> Iterator[dict]:
    for kernel, stride in ((3, 1), (3, 2), (5, 1), (5, 2), (7, 1)):
        for batch, channels, size in DEPTHWISE:
            yield measured(dtype, batch, channels, size, kernel, stride, channels, channels)
    for kernel, stride in ((3, 1), (3, 2), (5, 1), (7, 1)):
        for batch, channels, size in DEPTHWISE_LAST:
            yield measured(
                dtype, batch, channels, size, kernel, stride, channels, channels, last=True
            )
    for width in (4, 8, 16, 24, 32, 64):
        for batch, channels, size, stride in GROUPED:
            yield measured(dtype, batch, channels, size, 3, stride, channels // width, channels)
    for batch, channels, size, kernel, stride, out in PLAIN:
        yield measured(dtype, batch, channels, size, kernel, stride, 1, out)


def main(path: str) -> None:
    found = [row for dtype in (torch.float32, torch.bfloat16) for row in rows(dtype)]
    whole = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "rows": found,
    }
    with open(path, "w") as file:
        json.dump(whole, file, indent=0)


if __name__ == "__main__":
    main(sys.argv[1])
