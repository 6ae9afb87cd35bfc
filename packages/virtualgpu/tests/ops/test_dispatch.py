"""The operators that a virtual GPU runs, and those that it refuses by name."""

from collections.abc import Callable

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

BUILT_FOR_CUDA = torch.backends.cuda.is_built()  # read before a virtual machine changes it
needs_distributed = pytest.mark.skipif(
    not distributed.is_available(), reason="this build of torch has no torch.distributed"
)


@pytest.fixture(autouse=True)
def used(machine):
    return machine


@pytest.fixture
def process_group(tmp_path):
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    distributed.destroy_process_group()


def replicated(x: torch.Tensor) -> nn.Module:
    return nn.parallel.DistributedDataParallel(nn.Linear(2, 2).to(x.device))


@needs_distributed
@pytest.mark.parametrize(
    "work", [distributed.all_reduce, lambda x: distributed.broadcast(x, 0), replicated]
)
def test_gloo_takes_tensors_of_virtual_gpus(work, process_group):
    x = torch.ones(2, device="cuda")
    work(x)
    assert x.tolist() == [1.0, 1.0]


def plain(x: torch.Tensor, prepare: Callable[[nn.Module], object] = id) -> torch.Tensor:
    torch.manual_seed(0)
    layer = nn.Linear(2, 2).to(x.device)
    prepare(layer)
    return layer(x)


@needs_distributed
def test_a_sharded_layer(process_group):
    """Check that fake tensors report a CUDA device. One rank needs no collective."""
    x = torch.ones(1, 2, device="cuda")
    assert torch.equal(plain(x, fully_shard), plain(x))


@needs_distributed
# without a device argument, the accelerator is used
@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl", None])
def test_a_group_of_one_rank(backend, tmp_path):
    distributed.init_process_group(
        backend, init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        x = torch.ones(2, device="cuda")
        distributed.all_reduce(x)
        assert distributed.is_nccl_available() and x.tolist() == [1.0, 1.0]
        with pytest.raises(
            NotImplementedError,
            match="a reduction by PREMUL_SUM is not supported by the virtual GPU",
        ):
            distributed.all_reduce(x, op=distributed._make_nccl_premul_sum(2.0))
    finally:
        distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_quantized_layers_have_no_kernels():
    weight = torch.quantize_per_tensor(torch.ones(2, 2), 0.1, 0, torch.qint8)
    packed = torch.ops.quantized.linear_prepack(weight, None)
    with pytest.raises(
        NotImplementedError,
        match="Could not run 'quantized::linear_dynamic' with arguments from the 'CUDA' backend",
    ):
        torch.ops.quantized.linear_dynamic(torch.ones(1, 2, device="cuda"), packed)


def test_an_operator_for_cuda_alone_is_refused_by_name():
    q = torch.ones(1, 2, 1, 8, device="cuda")
    with pytest.raises(
        NotImplementedError,
        match=r"^torch.ops.aten._efficient_attention_forward is not supported by the virtual GPU",
    ):
        torch.ops.aten._efficient_attention_forward(q, q, q, None, None, None, None, None, 0.0, 0)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
def test_a_product_of_rows_stored_sparse():
    x = torch.eye(3)
    got = x.cuda().to_sparse_csr() @ torch.arange(9.0, device="cuda").view(3, 3)
    assert got.is_cuda and got.tolist() == torch.arange(9.0).view(3, 3).tolist()


# Operators of the program's own


@pytest.fixture
def library():
    library = torch.library.Library("labkit_tests", "DEF")
    yield library
    library._destroy()


def by_name(library: torch.library.Library, function, key: str):
    library.define("f(Tensor x) -> Tensor")
    library.impl("f", function, key)
    return torch.ops.labkit_tests.f


@pytest.mark.parametrize("key", ["CUDA", "CompositeExplicitAutograd", "CompositeImplicitAutograd"])
def test_an_operator_in_python_runs_on_the_gpu_call_by_call(library, key):
    def scaled(x):
        assert x.is_cuda
        return (x.repeat(4096) * 3)[: len(x)].clone()

    f, x = by_name(library, scaled, key), torch.ones(4, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    assert f(x).tolist() == [3, 3, 3, 3]
    # an intermediate result
    assert torch.cuda.max_memory_allocated() - before >= 2 * 4096 * x.nbytes


def test_an_operator_for_the_cpu_alone_is_pytorchs_error(library):
    f = by_name(library, lambda x: x * 3, "CPU")
    assert f(torch.ones(1)).item() == 3
    with pytest.raises(
        NotImplementedError,
        match="Could not run 'labkit_tests::f' with arguments from the 'CUDA' backend",
    ):
        f(torch.ones(1, device="cuda"))


def test_a_custom_operator_with_a_gradient():
    @torch.library.custom_op("labkit_tests_too::scaled", mutates_args=())
    def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
        return x * factor

    def keep(ctx, inputs, output):
        ctx.factor = inputs[1]

    scaled.register_autograd(
        lambda ctx, gradient: (gradient * ctx.factor, None), setup_context=keep
    )
    x = torch.ones(3, device="cuda", requires_grad=True)
    scaled(x, 2.0).sum().backward()
    assert x.grad.tolist() == [2, 2, 2] and x.grad.is_cuda


@pytest.mark.skipif(
    not hasattr(nn.functional, "linear_cross_entropy"),
    reason="this torch has no linear_cross_entropy",
)
def test_pytorchs_own_operators_in_python_run_so_too():
    x, weight, k = torch.randn(64, 16), torch.randn(50, 16), torch.randint(50, (64,))
    expected = nn.functional.linear_cross_entropy(x, weight, k)
    got = nn.functional.linear_cross_entropy(
        x.cuda().bfloat16(), weight.cuda().bfloat16(), k.cuda()
    )
    torch.testing.assert_close(got.cpu().float(), expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    "write",
    [
        lambda x: torch._foreach_add_([x], 1.0),
        lambda x: torch._foreach_copy_([x], [torch.zeros_like(x)]),
    ],
)
def test_an_operator_on_lists_counts_what_it_writes(write):
    w = torch.ones(4, device="cuda", requires_grad=True)
    loss = (w * w).sum()
    with torch.no_grad():
        write(w)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_a_step_between_forward_and_backward_is_noticed(optimizer):
    w = torch.ones(4, device="cuda", requires_grad=True)
    loss, w.grad = (w * w).sum(), torch.ones_like(w)
    optimizer([w], lr=0.1).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
