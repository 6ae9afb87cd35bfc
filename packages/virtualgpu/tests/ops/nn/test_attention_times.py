"""Times of attention and of layers around it, compared with real GPUs (timing/kernels.json)."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

import virtualgpu
from virtualgpu import hardware

from ..heard import spans


@pytest.fixture(autouse=True)
def valueless() -> Iterator[None]:
    with virtualgpu.use(1, like="H200", values=False):
        yield


@pytest.mark.parametrize(
    ("causal", "there", "back"), [(False, 2.0029, 5.2252), (True, 1.1955, 3.0306)]
)
def test_where_arithmetic_is_slow_the_start_and_the_end_of_a_block_weigh_little(
    causal, there, back
):
    q, k, v = (torch.empty(16, 16, 1024, 64, device="cuda", requires_grad=True) for _ in range(3))
    out = None

    def forward() -> None:
        nonlocal out
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    assert 1e3 * spans(forward)[-1].duration == pytest.approx(there, rel=0.15)
    attended = [
        span
        for span in spans(lambda: out.backward(torch.empty_like(out)))
        if span.name == "attention_backward"
    ]
    assert 1e3 * attended[0].duration == pytest.approx(back, rel=0.15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_in_evaluation_attention_does_the_same_products(dtype):
    layer = torch.nn.MultiheadAttention(512, 8, batch_first=True, device="cuda", dtype=dtype).eval()
    x = torch.empty(8, 256, 512, device="cuda", dtype=dtype)
    with torch.no_grad():
        fused = spans(lambda: layer(x, x, x, need_weights=False))
        # Older kernels run as one operator, because the weights are a result.
        whole = spans(lambda: layer(x, x, x))
    assert [span.name for span in fused] == ["addmm", "attention", "addmm"]
    seconds = 4 * 2 * 2048 * 512 * 512 / peak(dtype)
    assert (
        sum(span.duration for span in fused) > seconds
        and sum(span.duration for span in whole) > seconds
    )


def peak(dtype: torch.dtype) -> float:
    return hardware.machine().profile.peak_flops[str(dtype).removeprefix("torch.")]


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_an_encoder_layer_in_evaluation_launches_its_parts(first, activation):
    layer = torch.nn.TransformerEncoderLayer(
        64, 4, 128, activation=activation, norm_first=first, batch_first=True, device="cuda"
    ).eval()
    x = torch.empty(8, 16, 64, device="cuda")
    with torch.no_grad():
        names = [span.name for span in spans(lambda: layer(x))]
    attention, feed = ["addmm", "attention", "addmm"], ["_addmm_activation", "addmm"]
    norm, add = ["native_layer_norm"], ["add_"]
    assert names == (
        [*norm, *attention, *add, *norm, *feed, *add]
        if first
        else [*attention, *add, *norm, *feed, *add, *norm]
    )
