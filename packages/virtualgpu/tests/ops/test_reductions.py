"""Staging buffers and semaphores of reductions, as recorded on an H200.

An H200 has 132 multiprocessors of 2048 threads.
"""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from virtualgpu.ops.reductions import buffers, launch

from .asked import asked

H200 = (132, 2048)


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


@pytest.mark.parametrize(
    ("shape", "dims", "accumulator", "expected"),
    [
        ((4000, 3000), (0, 1), 4, (2112, 4)),
        ((100000, 30), (0,), 4, (376320, 8)),
        ((4096, 4096), (0,), 4, (134217728, 128)),
        ((4000, 3000), (0, 1), 8, (4224, 4)),
        ((2000, 210), (0, 1), 16, (832, 4)),
        ((2000, 210), (0, 1), 1, (52, 4)),
        ((33, 65, 129), (0, 1, 2), 4, (136, 4)),
        ((100000, 3), (0,), 4, (600, 8)),
        ((128, 8, 768), (0, 1), 4, (6291456, 24)),
        ((4096, 4096), (1,), 4, ()),
        ((8, 64, 56, 56), (2, 3), 4, ()),
        ((50,), (0,), 4, ()),
    ],
)
def test_recorded_launches(shape, dims, accumulator, expected):
    assert buffers(launch(shape, contiguous(shape), dims, 0, 512, *H200), accumulator) == expected


def test_layout_counts():
    """Check that a transposed matrix is summed in its order in memory.

    A matrix with gaps keeps its dimensions.
    """
    assert buffers(launch((210, 2000), (1, 210), (0, 1), 0, 512, *H200), 4) == (208, 4)
    assert buffers(launch((2000, 105), (210, 2), (0, 1), 0, 512, *H200), 4) == (104, 4)


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=3), st.data())
def test_properties(sizes, data):
    """Check how the buffers of random reductions change with each parameter.

    Dimensions of size 1 change nothing. A larger accumulator changes only the buffer. Fewer
    multiprocessors never need more memory.
    """
    shape = tuple(sizes)
    dims = tuple(data.draw(st.sets(st.integers(0, len(shape) - 1), min_size=1)))
    found = buffers(launch(shape, contiguous(shape), dims, 0, 512, *H200), 4)
    wider = buffers(launch((*shape, 1), contiguous((*shape, 1)), dims, 0, 512, *H200), 4)
    assert wider == found
    double = buffers(launch(shape, contiguous(shape), dims, 0, 512, *H200), 8)
    assert double == ((2 * found[0], found[1]) if found else ())
    small = buffers(launch(shape, contiguous(shape), dims, 0, 512, 40, 1024), 4)
    assert sum(small) <= sum(found)


@pytest.mark.parametrize(
    ("reduce", "expected"),
    [
        (lambda x: x.sum(), ["+4", "+208", "+4", "-4", "-208"]),
        (lambda x: x.argmax(), ["+8", "+832", "+4", "-4", "-832"]),
        (lambda x: x.var(), ["+4", "+832", "+4", "-4", "-832"]),
        (lambda x: x.norm(1), ["+4", "+208", "+4", "-4", "-208"]),
        (
            lambda x: x.sum(dtype=torch.float64),
            ["+8", "+3360000", "+416", "+4", "-4", "-416", "-3360000"],
        ),
        (lambda x: x.sum(1), ["+8000"]),
    ],
)
def test_operators(reduce, expected):
    assert asked(reduce, setup=lambda: torch.randn(2000, 210, device="cuda")) == expected


def test_a_smaller_gpu_shares_an_output_among_fewer_blocks():
    work = asked(lambda x: x.sum(), setup=lambda: torch.randn(1000, 1000, device="cuda"), like="T4")
    # 40 multiprocessors of 1024 threads: 80 blocks
    assert work == [
        "+4",
        "+320",
        "+4",
        "-4",
        "-320",
    ]


# Norms of lists of tensors


def with_gradients(*sizes: int) -> list[torch.Tensor]:
    module = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes))).cuda()
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    return list(module.parameters())


@pytest.mark.parametrize(
    ("sizes", "order", "expected"),
    [
        (
            (300, 300, 300),
            2.0,
            "+32 +4 +4 +4 +4 -32 +16 +4 -16 -4 -4 -4 -4 +4 +4 +4 -4 -4 +4 -4 -4",
        ),
        ((200, 100), float("inf"), "+8 +4 +4 -8 +8 +4 -8 -4 -4 +4 +4 +4 -4 -4 +4 -4 -4"),
    ],
)
def test_clipping(sizes, order, expected):
    def clip(parameters: list[torch.Tensor]) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(parameters, 1.0, order)

    assert " ".join(asked(clip, setup=lambda: with_gradients(*sizes))) == expected


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_sums_of_complex_numbers_leave_out_those_with_a_part_that_is_no_number(shared_machine):
    x = torch.tensor(
        [[1 + 2j, complex(float("nan"), 1)], [3, complex(1, float("nan"))]], device="cuda"
    )
    assert torch.nansum(x).item() == 4 + 2j
    assert torch.nansum(x, 0).tolist() == [4 + 2j, 0]
    assert torch.nanmean(x[:, :1], 0, keepdim=True).tolist() == [[2 + 1j]]
    assert torch.nansum(x.to(torch.complex32)).item() == 4 + 2j
    out = torch.empty(0, device="cuda", dtype=x.dtype)
    assert torch.nansum(x, 1, out=out).tolist() == out.tolist() == [1 + 2j, 3]
    assert torch.nansum(torch.tensor([1.0, float("nan")], device="cuda")).item() == 1.0
