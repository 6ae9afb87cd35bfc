"""Operators of PyTorch's operator and module databases allocate the same sizes as on an H200.

Recorded with torch 2.11 on 2026-11-24, in float32 unless the name says otherwise. Sizes are in
bytes, in the order of time. A free is a negative number.
"""

import pytest
import torch

from .asked import recorded

aten = torch.ops.aten


def spread(*shape: int) -> torch.Tensor:
    """Return the gradient of a sum for an input of this shape.

    All its elements are one number in memory.
    """
    return torch.ones((), device="cuda").expand(shape)


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device="cuda")


def longs(*shape: int) -> torch.Tensor:
    return zeros(*shape, dtype=torch.int64)


CASES = {
    "avg_pool2d_backward": (
        lambda: (spread(3, 3, 3), zeros(3, 6, 6), [2, 2], [2, 2], [0, 0], False, True, None),
        [432, 108, -108],
    ),
    "_adaptive_avg_pool2d_backward": (lambda: (spread(8, 1, 5), zeros(8, 1, 8)), [256, 160, -160]),
    "_adaptive_avg_pool3d_backward": (
        lambda: (spread(3, 3, 3, 3), zeros(3, 5, 2, 7)), [840, 324, -324],
    ),
    "adaptive_max_pool2d_backward": (
        lambda: (spread(4, 1, 3), zeros(4, 1, 4), longs(4, 1, 3)), [64, 48, -48],
    ),
    "fractional_max_pool2d_backward": (
        lambda: (spread(1, 3, 2, 3), zeros(1, 3, 5, 7), [2, 2], [2, 3], longs(1, 3, 2, 3)),
        [72, 420, -72],
    ),
    "reflection_pad1d_backward": (lambda: (spread(1, 6), zeros(1, 3), [1, 2]), [12, 24, -24]),
    "upsample_nearest1d_backward": (lambda: (spread(2, 3, 3), [3], [2, 3, 4]), [96, 72, -72]),
    "native_batch_norm_backward": (
        lambda: (
            spread(2, 3, 4, 4), zeros(2, 3, 4, 4), *(zeros(3) for _ in range(5)), False, 1e-5,
            [True, True, True],
        ),
        [384, 12, 12],
    ),
    "embedding_dense_backward": (lambda: (spread(5, 5), longs(5), 10, -1, False), [100, 200, -100]),
    "nll_loss_backward": (
        lambda: (spread(2), zeros(2, 3), longs(2), None, 0, -100, zeros()), [24, 8, -8],
    ),
    "soft_margin_loss": (lambda: (zeros(5), zeros(5)), [20, 4, -4]),
    "soft_margin_loss_backward": (
        lambda: (zeros(), zeros(5), zeros(5), 1), [20, 20, 20, -20, -20, 20, -20],
    ),
    "roll": (lambda: (zeros(9, 10), [4, 5], [0, 1]), [360, 360, -360]),
    "ldexp": (lambda: (zeros(), zeros()), [4, 8, -8, 4, -4]),
    "mvlgamma": (lambda: (zeros(5, 5) + 3, 1), [4, 100, -4, 100, -100]),
    "equal": (lambda: (zeros(3), zeros(3)), [3, 1, -1, -3]),
    "all": (lambda: (zeros(),), [1, 1, -1]),
    "isin": (lambda: (zeros(20), zeros(5)), [20, 100, 20, -20, -100]),
    "nonzero": (lambda: (zeros(1),), [4, 1, -1, -4]),
    "scatter_reduce": (
        lambda: (zeros(10, 5), 0, longs(5, 5), zeros(5, 5), "mean"),
        [200, 100, 200, 50, -50, -200, -100],
    ),
    "index": (lambda: (zeros(5, 5), [longs(10, 1), longs(1, 10)]), [800, 800, 400, -800, -800]),
    "mode": (lambda: (zeros(5, 5, 5), 1), [100, 200, 500, -500]),
    "linalg_lu_solve": (
        lambda: (zeros(5, 5) + 1, zeros(5, dtype=torch.int32) + 1, zeros(5, 1)), [20, 8, 8, -8, -8],
    ),
    "linalg_householder_product": (lambda: (zeros(5, 5), zeros(5)), [100, 4, 132224, -132224, -4]),
    "geqrf": (lambda: (zeros(5, 5),), [100, 20, 4, 3145856, -3145856, -4]),
    "_fft_r2c": (lambda: (zeros(5, 10, 7), [1], 1, True), [1680, 1400, -1400]),
    "_fft_c2c": (lambda: (zeros(5, 6, 7, dtype=torch.complex64), [0, 1, 2], 0, True), [1680]),
    "convolution_backward": (
        lambda: (
            spread(1, 3, 3, 3), zeros(1, 3, 4, 4), zeros(3, 3, 3, 3), [3], [2, 2], [2, 2], [1, 1],
            False, [0, 0], 1, [True, True, True]
        ),
        [192, 108, -108, 108, 324, -108, 12],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_an_operator_asks_for_what_an_h200_was_asked_for(name, machine):
    arguments, expected = CASES[name]
    given = arguments()
    assert recorded(lambda: getattr(aten, name)(*given))[1] == [f"{size:+d}" for size in expected]


def test_a_lazy_layer_takes_the_type_that_it_was_moved_to(machine):
    layer = torch.nn.LazyConv2d(5, 3).to("cuda", torch.float16)
    assert layer(zeros(2, 4, 5, 5, dtype=torch.float16)).dtype is torch.float16


def test_cudnn_flattens_no_bfloat16_weights(machine):
    assert (
        torch.nn.LSTM(3, 4).to("cuda", torch.bfloat16).weight_ih_l0.untyped_storage().nbytes()
        == 16 * 3 * 2
    )
    assert (
        torch.nn.LSTM(3, 4).to("cuda", torch.float16).weight_ih_l0.untyped_storage().nbytes()
        > 16 * 3 * 2
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_batch_norm_without_weight_evaluates_in_half_precision(machine, dtype):
    norm = torch.nn.BatchNorm1d(4, affine=False).to("cuda", dtype).eval()
    x = torch.randn(3, 4, device="cuda", dtype=dtype)
    torch.testing.assert_close(norm(x), x, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("tests", [3, 40])
@pytest.mark.parametrize("invert", [False, True])
def test_isin_of_few_and_of_many_agrees_with_the_cpu(machine, tests, invert):
    x, wanted = torch.randint(0, 9, (6, 5)), torch.randint(0, 9, (tests,))
    assert torch.equal(
        torch.isin(x.cuda(), wanted.cuda(), invert=invert).cpu(),
        torch.isin(x, wanted, invert=invert),
    )


def test_composed_operators_agree_with_the_cpu(machine):
    x = torch.rand(4, 5) + 3
    for function in (
        lambda t: t.mvlgamma(2),
        lambda t: torch.ldexp(t, t),
        lambda t: t.roll((1, 2), (0, 1)),
        lambda t: t.roll(3),
    ):
        torch.testing.assert_close(function(x.cuda()).cpu(), function(x))
    assert torch.equal(x.cuda(), x.cuda()) and not torch.equal(x.cuda(), x.cuda() + 1)


def test_deviations_are_looked_at_again_when_there_is_an_output(machine):
    mean, deviation = zeros(), torch.ones((), device="cuda")
    assert [int(size) for size in recorded(lambda: torch.normal(mean, deviation))[1]] == [
        4,
        1,
        -1,
        -4,
        4,
        4,
        1,
        -1,
        -4,
    ]


def test_segments_have_their_offsets_from_lengths(machine):
    x, lengths = (
        torch.arange(5.0, device="cuda", requires_grad=True),
        torch.tensor([1, 2, 0, 2], device="cuda"),
    )
    segments, asked = recorded(lambda: torch.segment_reduce(x, "sum", lengths=lengths))
    assert [int(size) for size in asked] == [
        8,
        -8,
        8,
        1,
        1,
        -1,
        -1,
        -8,
        16,
        8,
        40,
        -8,
        1279,
        -1279,
        -40,
    ]
    assert segments.tolist() == [0, 3, 0, 7]
    gradient = spread(4)
    into_x, asked = recorded(lambda: torch.autograd.grad(segments, x, gradient)[0])
    assert [int(size) for size in asked] == [16, 20, 8, 40, -8, 1279, -1279, -40, -16]
    assert into_x.tolist() == [1] * 5


def test_the_gradient_of_binary_cross_entropy_by_its_target_is_multiplied_in_place(machine):
    x, target = (
        torch.full((3,), 0.5, device="cuda"),
        torch.full((3,), 0.5, device="cuda", requires_grad=True),
    )
    loss = torch.nn.functional.binary_cross_entropy(x, target, reduction="sum")
    gradient = torch.ones_like(loss)
    assert recorded(lambda: torch.autograd.grad(loss, target, gradient))[1] == ["+12"]


def test_the_backward_of_rms_norm_reads_a_gradient_that_lies_contiguous(machine):
    x, weight = (torch.ones(*shape, device="cuda", requires_grad=True) for shape in ((2, 3), (3,)))
    y, gradient = torch.nn.functional.rms_norm(x, (3,), weight), spread(2, 3)
    assert recorded(lambda: torch.autograd.grad(y, (x, weight), gradient, retain_graph=True))[
        1
    ] == ["+24", "+12", "+24", "-24"]


def test_ctc_loss_keeps_its_targets_as_64_bit_integers_on_the_gpu(machine):
    scores, lengths = torch.zeros(8, 3, 5, device="cuda", requires_grad=True), [2, 2, 2]
    targets = torch.ones(3, 2, dtype=torch.int32, device="cuda")
    loss, asked = recorded(
        lambda: torch.nn.functional.ctc_loss(scores, targets, [8, 8, 8], lengths)
    )
    assert asked[0] == "+48" and "-48" not in asked
    assert (
        loss.item()
        == torch.nn.functional.ctc_loss(
            scores.detach().cpu(), targets.cpu().long(), [8, 8, 8], lengths
        ).item()
    )
    with pytest.raises(NotImplementedError, match="\"ctc_loss_cuda\" not implemented for 'Half'"):
        torch.nn.functional.ctc_loss(scores.half(), targets, [8, 8, 8], lengths)
