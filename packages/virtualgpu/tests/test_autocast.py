"""Autocast on virtual GPUs uses CUDA's lists, caches weights as CUDA does, and ignores the CPU."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F

from virtualgpu import autocast

pytestmark = pytest.mark.usefixtures("shared_machine")
HALF = (torch.float16, torch.bfloat16)


def matrix(dtype: torch.dtype = torch.float32, **kwargs: object) -> torch.Tensor:
    return (
        torch.arange(1.0, 17.0, device="cuda")
        .reshape(4, 4)
        .div(16)
        .to(dtype)
        .requires_grad_(bool(kwargs.get("grad")))
    )


def test_the_lists_name_every_operator_that_the_installed_torch_casts_on_cuda():
    names = (
        *autocast.LOWER_PRECISION,
        *autocast.FLOAT32,
        *autocast.FLOAT32_RESULT,
        *autocast.APPEND_FLOAT32,
        *autocast.PROMOTE,
    )
    assert len(names) == len(set(names))
    cast = {
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_registrations_for_dispatch_key(autocast.KEY)
    }
    # Autocast bans `binary_cross_entropy`. Only builds with CUDA have `_cudnn_rnn`, and
    # `ops.nn.recurrent` casts in its place.
    assert cast - {"_cudnn_rnn"} == set(names) & cast | {"binary_cross_entropy"}


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    "call",
    [
        lambda x: x @ x, lambda x: torch.mm(x, x), lambda x: F.linear(x, x, x[0]),
        lambda x: torch.addmm(x, x, x), lambda x: torch.einsum("ij,kj->ik", x, x),
        lambda x: F.conv1d(x[None], x[:, :, None]), lambda x: F.prelu(x, x[0, :1]),
        lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]),
        lambda x: torch.linalg.multi_dot([x, x, x]), lambda x: torch.bmm(x[None], x[None]),
    ],
)  # fmt: skip
def test_products_run_in_the_region_s_precision(call, dtype):
    x = matrix()
    with torch.autocast("cuda", dtype=dtype):
        result = call(x)
    assert result.dtype is dtype
    rounded = call(matrix(dtype))
    assert torch.equal(result, rounded)


@pytest.mark.parametrize(
    "call",
    [
        torch.exp, torch.log, lambda x: x**2, lambda x: 2**x, lambda x: F.layer_norm(x, (4,)),
        lambda x: F.group_norm(x, 2), lambda x: F.mse_loss(x, x),
        lambda x: F.binary_cross_entropy_with_logits(x, x), lambda x: torch.cdist(x, x),
        lambda x: F.softmax(x, 1), lambda x: F.log_softmax(x, 1), lambda x: x.sum(),
        lambda x: x.sum(0), lambda x: x.cumsum(0), lambda x: x.prod(), lambda x: x.norm(),
        lambda x: torch.linalg.vector_norm(x), lambda x: torch.norm(x, 2, 0),
    ],
)  # fmt: skip
def test_what_needs_range_runs_in_float32(call):
    half = matrix(torch.float16)
    with torch.autocast("cuda"):
        result = call(half)
    assert result.dtype is torch.float32
    torch.testing.assert_close(result, call(half.float()), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("call", "first", "second", "expected"),
    [
        (lambda x, y: torch.addcmul(x, y, y), torch.float16, torch.float32, torch.float32),
        (lambda x, y: torch.addcmul(x, y, y), torch.float16, torch.float16, torch.float16),
        (lambda x, y: torch.dot(x[0], y[0]), torch.float32, torch.float16, torch.float32),
        (lambda x, y: torch.cat([x, y]), torch.float32, torch.float16, torch.float32),
        (lambda x, y: x + y, torch.float16, torch.float32, torch.float32),
        (lambda x, y: torch.mm(x, y), torch.float64, torch.float64, torch.float64),
    ],
)
def test_the_widest_type_wins_elsewhere(call, first, second, expected):
    with torch.autocast("cuda"):
        assert call(matrix(first), matrix(second)).dtype is expected


def test_cross_entropy_takes_its_softmax_in_the_logits_precision():
    # PyTorch's C++ names the dtype of the inner log_softmax itself
    target = torch.zeros(4, dtype=torch.long, device="cuda")
    with torch.autocast("cuda"):
        loss = F.cross_entropy(matrix(torch.float16), target)
    assert loss.dtype is torch.float32
    assert torch.equal(loss, F.nll_loss(F.log_softmax(matrix(torch.float16), 1).float(), target))


def test_a_dtype_that_the_caller_names_stays():
    with torch.autocast("cuda"):
        assert matrix(torch.float16).sum(dtype=torch.float16).dtype is torch.float16
        assert F.softmax(matrix(torch.float16), 1, dtype=torch.float64).dtype is torch.float64


def test_binary_cross_entropy_is_banned():
    with (
        torch.autocast("cuda"),
        pytest.raises(
            RuntimeError,
            match=r"^torch\.nn\.functional\.binary_cross_entropy and .* unsafe to auto",
        ),
    ):
        F.binary_cross_entropy(matrix(), matrix())


def test_half_precisions_do_not_mix_in_a_promotion():
    with (
        torch.autocast("cuda"),
        pytest.raises(
            RuntimeError, match="Unexpected floating ScalarType in at::autocast::prioritize"
        ),
    ):
        torch.addcmul(matrix(torch.bfloat16), matrix(), matrix().bfloat16())


def test_regions_nest_and_answer_for_themselves():
    x = matrix()
    assert not torch.is_autocast_enabled("cuda")
    with torch.autocast("cuda"):
        assert torch.is_autocast_enabled("cuda")
        assert torch.get_autocast_dtype("cuda") is torch.float16
        with torch.autocast("cuda", enabled=False):
            assert not torch.is_autocast_enabled("cuda")
            assert torch.mm(x, x).dtype is torch.float32
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert torch.mm(x, x).dtype is torch.bfloat16
        assert torch.mm(x, x).dtype is torch.float16
    assert torch.mm(x, x).dtype is torch.float32
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        assert torch.mm(x, x).dtype is torch.bfloat16
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", torch.float16)


def test_cpu_tensors_are_left_alone_in_a_cuda_region():
    x = torch.ones(2, 2)
    with torch.autocast("cuda"):
        assert torch.mm(x, x).dtype is torch.float32
        assert x.half().sum().dtype is torch.float16
        assert F.binary_cross_entropy(x, x).item() == 0


def test_the_cpu_has_a_region_of_its_own():
    x, layer = torch.ones(2, 2, requires_grad=True), torch.nn.Linear(4, 4, device="cuda")
    with torch.autocast("cpu"):
        y = torch.mm(x, x)
        assert y.dtype is torch.bfloat16
        assert F.mse_loss(y, y).dtype is torch.float32
        assert layer(matrix()).dtype is torch.float32
        assert matrix().sum().dtype is torch.float32
        with torch.autocast("cuda"):
            assert layer(matrix()).dtype is torch.float16
    y.float().sum().backward()
    assert x.grad.tolist() == [[4, 4], [4, 4]]


def test_weights_are_cast_once_and_kept_until_the_outermost_region_ends():
    layer = torch.nn.Linear(512, 512, device="cuda")  # 1 MiB for the weight and 2 KiB for the bias
    x = torch.ones(1, 512, device="cuda")
    x.requires_grad_()
    with torch.autocast("cuda"), torch.no_grad():
        layer(x)  # memory that any first product allocates
    start = torch.cuda.memory_allocated()
    with torch.autocast("cuda"), torch.no_grad():
        with torch.autocast("cuda"):
            layer(x)
            layer(x)
        held = torch.cuda.memory_allocated() - start
    # The weight, the bias, and x, which is a leaf that needs a gradient.
    assert held == 512 * 1024 + 1024 + 1024
    assert torch.cuda.memory_allocated() == start


def test_nothing_is_kept_without_the_cache():
    layer = torch.nn.Linear(512, 512, device="cuda")
    x = torch.ones(1, 512, device="cuda")
    with torch.autocast("cuda", cache_enabled=False), torch.no_grad():
        layer(x)
        first = torch.cuda.memory_allocated()
        layer(x)
        # a library's workspace may stay, but the copies of the weights do not
        assert torch.cuda.memory_allocated() == first
        assert not autocast.cache._casts


def test_gradients_come_back_in_float32_and_agree_with_float32():
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 64, device="cuda")
    x = torch.randn(32, 64, device="cuda")
    (expected,) = torch.autograd.grad(layer(x).square().mean(), [layer.weight])
    with torch.autocast("cuda"):
        loss = layer(x).square().mean()
    (found,) = torch.autograd.grad(loss, [layer.weight])
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, expected, rtol=0.02, atol=1e-3)


def test_checkpointing_recomputes_in_the_same_region():
    from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

    layer = torch.nn.Linear(8, 8, device="cuda")
    seen = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = layer(x)
        seen.append(y.dtype)
        return y

    x = torch.ones(2, 8, device="cuda", requires_grad=True)
    with set_checkpoint_early_stop(False):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            y = checkpoint(forward, x, use_reentrant=False)
        y.sum().backward()
    assert seen == [torch.bfloat16, torch.bfloat16]
    assert x.grad.dtype is torch.float32


def test_data_parallel_runs_its_threads_in_the_region():
    class Kind(torch.nn.Linear):
        def forward(self, x):
            seen.append(super().forward(x).dtype)
            return x

    seen: list = []
    with torch.autocast("cuda"):
        torch.nn.DataParallel(Kind(4, 4).cuda())(matrix())
    assert seen == [torch.float16] * torch.cuda.device_count()


def test_shapes_without_values_are_cast_too():
    x = torch.empty(1 << 15, 1 << 15, device="cuda")  # 4 GiB, for which no host keeps values
    with torch.autocast("cuda"):
        assert torch.mm(x, x).dtype is torch.float16
        assert x.half().sum(0).dtype is torch.float32


def test_custom_functions_name_their_own_precision():
    class Double(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
        def forward(ctx, x):
            seen.append((x.dtype, torch.mm(x, x).dtype))
            return 2 * x

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx, gradient):
            seen.append(torch.is_autocast_enabled("cuda"))
            return 2 * gradient

    seen: list = []
    x = matrix(torch.float16, grad=True)
    with torch.autocast("cuda"):
        Double.apply(x).sum().backward()
    assert seen == [(torch.float32, torch.float32), False]


def test_a_thread_starts_without_autocast():
    with torch.autocast("cuda"), ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: torch.mm(matrix(), matrix()).dtype).result() is torch.float32


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_the_scaler_skips_a_step_that_overflows(bad):
    weight = torch.ones(2, device="cuda", requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    for factor, scale, expected in ((1.0, 1024.0, 0.0), (bad, 512.0, 0.0), (1.0, 512.0, -1.0)):
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == scale
        assert weight.tolist() == [expected, expected]


@pytest.mark.parametrize("dtype", HALF)
def test_products_in_half_precision_are_rounded_once(dtype):
    torch.manual_seed(1)
    a, b, c = (torch.randn(40, 40).to(dtype) for _ in range(3))
    exact = a.float() @ b.float()
    assert torch.equal((a.cuda() @ b.cuda()).cpu(), exact.to(dtype))
    assert torch.equal(
        torch.addmm(c.cuda(), a.cuda(), b.cuda()).cpu(),
        torch.addmm(c.float(), a.float(), b.float()).to(dtype),
    )
    in_place = c.cuda()
    assert in_place.addmm_(a.cuda(), b.cuda()) is in_place
    assert torch.equal(in_place.cpu(), torch.addmm(c.float(), a.float(), b.float()).to(dtype))
    out = torch.empty(40, 40, dtype=dtype, device="cuda")
    assert torch.mm(a.cuda(), b.cuda(), out=out) is out
    assert torch.equal(out.cpu(), exact.to(dtype))


def test_a_region_costs_nothing_after_it():
    with torch.autocast("cuda"):
        pass
    assert not torch._C._dispatch_tls_is_dispatch_key_included(autocast.KEY)


@pytest.mark.parametrize("device", ["cpu", "cuda"])  # the CPU's cache is PyTorch's own
@pytest.mark.parametrize("without_gradients", [torch.no_grad, torch.inference_mode])
def test_a_weight_that_was_first_used_without_gradients_follows_the_installed_torch(
    device, without_gradients, machine
):
    weight = torch.ones(2, 2, device=device, requires_grad=True)
    with torch.autocast(device, torch.bfloat16):
        with without_gradients():
            assert not torch.mm(weight, weight).requires_grad
        if without_gradients is torch.inference_mode and not autocast.CASTS_HAVE_GRADIENTS:
            return  # these versions refuse the cached tensor in a graph
        first, second = torch.mm(weight, weight), torch.mm(weight, weight)
    assert first.requires_grad is second.requires_grad is autocast.CASTS_HAVE_GRADIENTS
    if first.requires_grad:
        casts = [[function for function, _ in y.grad_fn.next_functions] for y in (first, second)]
        assert casts[0][0] is casts[1][0]  # one cast serves both
