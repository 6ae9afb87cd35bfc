"""Copies between devices: to, cuda and cpu, modules, pinned memory, and gradients of copies."""

from functools import partial

import pytest
import torch
from torch import nn

# torch.autograd.grad(is_grads_batched=True) uses it
from torch._vmap_internals import (
    _vmap,
)
from torch.autograd import forward_ad

from virtualgpu import errors


@pytest.fixture(autouse=True)
def used(machine):
    return machine


FORMS = [
    (("cuda",), {}, "cuda:0", torch.float32),
    ((1,), {}, "cuda:1", torch.float32),
    ((torch.device("cuda", 2),), {}, "cuda:2", torch.float32),
    ((torch.device("cuda:3"), torch.half), {}, "cuda:3", torch.float16),
    (("cuda", torch.half, True, True), {}, "cuda:0", torch.float16),
    (("cuda", None), {}, "cuda:0", torch.float32),
    ((torch.half,), {}, "cpu", torch.float16),
    ((torch.half, True), {}, "cpu", torch.float16),
    ((None, torch.half), {}, "cpu", torch.float16),
    ((None,), {}, "cpu", torch.float32),
    ((), {"device": "cuda:2"}, "cuda:2", torch.float32),
    ((), {"device": 1, "dtype": torch.double}, "cuda:1", torch.float64),
    ((), {"dtype": torch.int32}, "cpu", torch.int32),
    (("cuda",), {"non_blocking": True, "copy": True}, "cuda:0", torch.float32),
    (("cuda",), {"memory_format": torch.contiguous_format}, "cuda:0", torch.float32),
]


@pytest.mark.parametrize(("args", "kwargs", "device", "dtype"), FORMS)
def test_to_in_all_its_forms(args, kwargs, device, dtype):
    x = torch.arange(3.0)
    y = x.to(*args, **kwargs)
    assert (y.device, y.dtype, y.tolist()) == (torch.device(device), dtype, [0, 1, 2])
    assert (x.device.type, x.dtype) == ("cpu", torch.float32)


def test_to_another_tensors_place():
    model = torch.zeros(1, device="cuda:1", dtype=torch.half)
    for y in (torch.ones(2).to(model), torch.ones(2).to(other=model), torch.ones(2).type_as(model)):
        assert (y.device, y.dtype) == (model.device, model.dtype)


@pytest.mark.parametrize(
    "place", [None, 0, "cuda", "cuda:0", torch.device("cuda"), torch.device("cuda", 0)]
)
def test_cuda_in_all_its_forms(place):
    assert torch.ones(2).cuda(place).device == torch.device("cuda:0")
    assert torch.ones(2).cuda(device=place, non_blocking=True).device == torch.device("cuda:0")


def test_cuda_goes_to_the_current_device():
    with torch.cuda.device(2):
        assert (
            torch.ones(2).cuda().device == torch.ones(2).to("cuda").device == torch.device("cuda:2")
        )
        assert torch.ones(2, device="cuda:1").cuda().device == torch.device("cuda:2")


def test_no_copy_where_nothing_changes():
    x, y = torch.ones(2, device="cuda"), torch.ones(2)
    assert (
        x.cuda() is x
        and x.to("cuda") is x
        and x.to(0) is x
        and x.to(torch.float) is x
        and y.cpu() is y
    )
    assert x.to("cuda", copy=True) is not x and x.cuda(1) is not x and x.cpu() is not x


@pytest.mark.parametrize(
    ("mistake", "error", "text"),
    [
        (lambda x: x.cuda(9), errors.AcceleratorError, "CUDA error: invalid device ordinal"),
        (lambda x: x.to("cuda:4"), errors.AcceleratorError, "CUDA error: invalid device ordinal"),
        (
            lambda x: torch.ones(1, device="cuda:4"),
            errors.AcceleratorError,
            "CUDA error: invalid device ordinal",
        ),
        (lambda x: x.cuda("cpu"), RuntimeError, "Invalid device, must be cuda device"),
        (lambda x: x.to("cuda", bogus=1), TypeError, "invalid combination of arguments"),
        (lambda x: x.to("cuda", torch.half, True, True, 1), TypeError, r"to\(\)"),
        (lambda x: x.to("gpu"), RuntimeError, "(?i)device"),
        (
            lambda x: x.cuda().pin_memory(),
            RuntimeError,
            "cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned",
        ),
        (
            lambda x: torch.ones(2, device="cuda", pin_memory=True),
            RuntimeError,
            "Only dense CPU tensors can be pinned",
        ),
    ],
)
def test_mistakes_are_told_in_cudas_words(mistake, error, text):
    with pytest.raises(error, match=text):
        mistake(torch.ones(2))


DIFFERENT = (
    "Expected all tensors to be on the same device, but found at least two devices, {} and {}!"
)
# The words of kernels that name the argument, and of cuDNN.
NAMED = (
    r"Expected all tensors to be on the same device, but .* \(when checking argument .*in method "
    r"wrapper_CUDA_\w+\)"
)
RECURRENT = (
    "Input and parameter tensors are not at the same device, found input tensor at cuda:0 and "
    "parameter tensor at cpu"
)


@pytest.mark.parametrize(
    "mistake",
    [
        lambda c, x: x + c, lambda c, x: c + x, lambda c, x: x @ c.T, lambda c, x: x.add_(c),
        lambda c, x: c.add_(x), lambda c, x: torch.cat([x, c]), lambda c, x: torch.add(x, 1, out=c),
        lambda c, x: torch.add(c, 1, out=x), lambda c, x: nn.functional.mse_loss(x, c), lambda c,
        x: nn.Linear(3, 2)(x), lambda c, x: nn.Linear(3, 2).cuda()(c), lambda c, x: c + x.sum(),
        lambda c, x: torch.where(x > 0, x, c), lambda c, x: torch.tensor(1.0).add_(x.sum()),
        lambda c, x: nn.LSTM(3, 2)(x), lambda c, x: nn.BatchNorm1d(3)(x), lambda c,
        x: nn.functional.cross_entropy(x, torch.tensor([0, 1])),
    ],
)  # fmt: skip
def test_cpu_and_gpu_do_not_mix(mistake):
    with pytest.raises(
        RuntimeError, match=f"{DIFFERENT.format('cuda:0', 'cpu')}|{NAMED}|{RECURRENT}"
    ):
        mistake(torch.ones(2, 3), torch.ones(2, 3, device="cuda"))


def test_two_gpus_do_not_mix():
    with pytest.raises(RuntimeError, match=DIFFERENT.format("cuda:0", "cuda:1")):
        torch.ones(2, device="cuda:0") + torch.ones(2, device="cuda:1")


def test_numbers_on_the_cpu_join_in():
    x, number = torch.ones(2, device="cuda:1"), torch.tensor(2.0)
    for y in (
        x + number,
        number + x,
        number * x.sum(),
        torch.where(x > 0, number, x),
        x.clone().mul_(number),
    ):
        assert y.device == x.device
    assert (x + number).tolist() == [3, 3]


@pytest.mark.parametrize(
    ("here", "there", "named"), [("cpu", "cuda", "cpu"), ("cuda:0", "cuda:1", "cuda:0")]
)
def test_indices_come_from_the_cpu_or_the_same_device(here, there, named):
    x = torch.arange(3, device="cuda")
    assert x[torch.tensor([1])].tolist() == [1]
    text = (
        rf"indices should be either on cpu or on the same device as the indexed tensor \({named}\)"
    )
    with pytest.raises(RuntimeError, match=text):
        torch.arange(3, device=here)[torch.tensor([1], device=there)]


def test_copy_and_assignment_cross_devices():
    x = torch.zeros(4, device="cuda")
    x[:2] = torch.ones(2)
    x[2:].copy_(torch.full((2,), 5, device="cuda:1", dtype=torch.int32))
    assert x.tolist() == [1, 1, 5, 5]
    assert torch.zeros(4).copy_(x).tolist() == [1, 1, 5, 5]


# Autograd


@pytest.mark.parametrize(
    "path", [("cuda",), ("cuda:1", "cuda:0"), ("cuda:1", "cpu", "cuda:2", "cuda:0")]
)
def test_gradients_return_to_their_device(path):
    x = torch.arange(3.0, requires_grad=True)
    y = x
    for place in path:
        y = y.to(place) * 2
    y.square().sum().backward()
    assert (x.grad.device.type, x.grad.tolist()) == (
        "cpu",
        [2 * k * 4 ** len(path) for k in range(3)],
    )


@pytest.mark.parametrize(
    ("here", "there"), [("cuda:0", "cuda:1"), ("cpu", "cuda:0"), ("cuda:1", "cpu")]
)
def test_gradients_come_back_from_a_copy_into_a_tensor_elsewhere(here, there):
    row = torch.ones(3, device=here, requires_grad=True)
    both = torch.zeros(2, 3, device=there)
    both[1].copy_(row)
    whole = torch.empty(2, 3, device=there, dtype=torch.float64).copy_(row, non_blocking=True)
    (2 * both + whole).sum().backward()
    assert (
        str(row.grad.device) == here
        and row.grad.dtype == torch.float32
        and row.grad.tolist() == [4.0] * 3
    )
    with torch.no_grad():
        assert not torch.empty(3, device=there).copy_(row).requires_grad


def test_a_copy_with_another_dtype_gives_the_gradient_back_in_its_own():
    x = torch.ones(3, requires_grad=True)
    x.to("cuda", torch.half).sum().backward()
    assert (x.grad.dtype, x.grad.device.type) == (torch.float32, "cpu")


def test_copies_keep_strides_or_take_the_format_asked_for():
    x = torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)
    assert x.cuda().is_contiguous(memory_format=torch.channels_last)
    assert torch.ones(2, 3).T.cuda().stride() == (1, 3)
    assert x.to("cuda", memory_format=torch.contiguous_format).is_contiguous()


def test_sparse_complex_and_nested_values_survive():
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(sparse.cuda(1).cpu().to_dense(), torch.eye(3))
    assert sparse.cuda(1).values().device == torch.device("cuda:1")
    z = torch.complex(torch.ones(2), torch.arange(2.0))
    assert torch.equal(z.conj().cuda().cpu(), z.conj())


# Modules


def test_module_moves_keep_objects_gradients_hooks_and_optimizers():
    layer = nn.Linear(3, 2)
    parameters = [id(parameter) for parameter in layer.parameters()]
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    seen = []
    layer.weight.register_hook(lambda gradient: seen.append(str(gradient.device)))
    layer.weight.register_post_accumulate_grad_hook(
        lambda parameter: seen.append(f"after {parameter.device}")
    )
    layer(torch.ones(1, 3)).sum().backward()
    assert layer.cuda() is layer
    assert [id(parameter) for parameter in layer.parameters()] == parameters
    assert (
        layer.weight.is_leaf
        and layer.weight.grad.tolist() == [[1] * 3] * 2
        and layer.weight.grad.is_cuda
    )
    before = layer.weight.tolist()
    layer(torch.ones(1, 3, device="cuda")).sum().backward()
    optimizer.step()
    assert layer.weight.tolist() != before
    layer.cpu()
    assert (layer.weight.device.type, layer.weight.grad.tolist()) == ("cpu", [[2] * 3] * 2)
    assert type(layer.weight) is nn.Parameter
    layer(torch.ones(1, 3)).sum().backward()
    assert seen == ["cpu", "after cpu", "cuda:0", "after cuda:0", "cpu", "after cpu"]
    layer.half().cuda(1)
    assert (layer.weight.dtype, layer.weight.grad.dtype, layer.bias.grad.device) == (
        torch.half,
        torch.half,
        torch.device("cuda:1"),
    )


def test_a_parameter_goes_and_comes_without_its_gradient():
    """Check what FullyShardedDataParallel does with a whole parameter and a shard's gradient."""
    parameter = nn.Parameter(torch.ones(2, device="cuda"))
    parameter.grad = torch.full((2,), 3.0, device="cuda")
    parameter.data = torch.full((4,), 5.0, device="cuda")
    parameter.data = parameter.cpu()
    assert (parameter.device.type, parameter.tolist()) == ("cpu", [5.0] * 4)
    parameter.data = parameter.cuda()
    assert (parameter.tolist(), parameter.grad.tolist(), str(parameter.grad.device)) == (
        [5.0] * 4,
        [3.0] * 2,
        "cuda:0",
    )


def test_a_gradient_held_elsewhere_moves_with_its_parameter():
    layer = nn.Linear(3, 2)
    layer(torch.ones(1, 3)).sum().backward()
    gradient = layer.weight.grad
    layer.cuda()
    assert layer.weight.grad is gradient and gradient.is_cuda


def test_a_graph_made_before_the_move_is_not_silently_cut_off():
    layer = nn.Linear(3, 2)
    loss = layer(torch.ones(1, 3, requires_grad=True)).sum()
    layer.cuda()
    with pytest.raises(RuntimeError):
        loss.backward()


def test_module_to_takes_the_forms_of_tensor_to():
    layer = nn.Linear(2, 2)
    assert layer.to("cuda", torch.half).weight.dtype == torch.half
    assert layer.to(torch.ones(1)).weight.device.type == "cpu"
    assert layer.to(device=2, non_blocking=True).bias.device == torch.device("cuda:2")
    assert layer.to(torch.double).weight.device == torch.device("cuda:2")
    assert layer.to("cpu").weight.device.type == "cpu"


def test_shared_parameters_buffers_and_lazy_modules():
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    both = nn.Sequential(first, second, nn.BatchNorm1d(3)).cuda(1)
    assert first.weight is second.weight and len(list(both.parameters())) == 5
    assert {str(buffer.device) for buffer in both.buffers()} == {"cuda:1"}
    with torch.device("meta"):
        empty = nn.Linear(3, 3)
    assert empty.to_empty(device="cuda").weight.is_cuda
    lazy = nn.LazyLinear(3).cuda()
    assert {str(parameter.device) for parameter in lazy.parameters()} == {"cuda:0"}
    assert lazy(torch.ones(2, 4, device="cuda")).is_cuda and lazy.weight.shape == (3, 4)


def test_assigning_data_changes_the_device():
    x = torch.ones(1000, device="cuda")
    x.data = torch.zeros(5)
    assert (x.device.type, torch.cuda.memory_allocated()) == ("cpu", 0)
    x.data = torch.ones(3, device="cuda:2")
    assert (x.device, x.tolist()) == (torch.device("cuda:2"), [1, 1, 1])


# Pinned memory


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_data_can_not_be_deleted(device):
    with pytest.raises(RuntimeError, match="Deleting tensor data is not allowed"):
        del torch.ones(2, device=device).data


def test_pinned_memory_is_known_by_its_address():
    x = torch.ones(8).pin_memory()
    assert torch.from_numpy(x.numpy()).is_pinned() and torch.from_numpy(x.numpy()[3:]).is_pinned()
    assert not torch.zeros(3, pin_memory=True).share_memory_().is_pinned()
    array = x.numpy().copy()
    del x
    assert not torch.from_numpy(array).is_pinned()
    assert not torch.zeros(0, pin_memory=True).is_pinned()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.filterwarnings("ignore:Sparse CSC tensor support is in beta state")
def test_the_parts_of_a_sparse_tensor_are_pinned():
    dense = torch.eye(4)
    for sparse in (dense.to_sparse(), dense.to_sparse_csr(), dense.to_sparse_csc()):
        assert not sparse.is_pinned()
        pinned = sparse.pin_memory()
        assert pinned.is_pinned() and pinned.layout is sparse.layout
        assert torch.equal(pinned.cuda().to_dense().cpu(), dense)


def test_pinned_memory():
    x = torch.ones(4).pin_memory()
    assert x.is_pinned() and x[:1].is_pinned() and x.pin_memory() is x
    assert not x.clone().is_pinned() and not torch.ones(4).is_pinned() and not x.cuda().is_pinned()
    assert (
        torch.ones(2, pin_memory=True).is_pinned()
        and torch.tensor([1], pin_memory=True).is_pinned()
    )
    assert torch.empty_like(torch.ones(2), pin_memory=True).is_pinned()
    assert x.cuda(non_blocking=True).tolist() == [1] * 4


def test_a_bare_number_is_copied():
    x = torch.zeros(2, device="cuda")
    assert x.copy_(float("inf")).tolist() == [float("inf")] * 2


@pytest.mark.parametrize("there", ["cpu", "cuda:0", "cuda:1"])
@pytest.mark.parametrize("here", ["cpu", "cuda:0", "cuda:1"])
def test_moves_of_each_sample_under_vmap(here, there):
    samples = torch.arange(6.0, device=here).view(3, 2)
    got = torch.vmap(lambda sample: sample.to(there) * 2, in_dims=1, out_dims=1)(samples)
    assert got.device == torch.device(there)
    assert got.tolist() == [[0, 2], [4, 6], [8, 10]]


@pytest.mark.parametrize("there", ["cpu", "cuda:0", "cuda:1"])
@pytest.mark.parametrize("here", ["cpu", "cuda:0", "cuda:1"])
def test_moves_under_transforms_of_derivatives(here, there):
    x = torch.tensor([1.0, 2.0], device=here)
    gradient = torch.func.grad(lambda x: x.to(there).square().sum())(x)
    _, tangent = torch.func.jvp(lambda x: x.to(there).square(), (x,), (x,))
    assert (gradient.device, tangent.device) == (torch.device(here), torch.device(there))
    assert (gradient.tolist(), tangent.tolist()) == ([2, 4], [2, 8])


@pytest.mark.parametrize("there", ["cpu", "cuda:0", "cuda:1"])
@pytest.mark.parametrize("here", ["cpu", "cuda:0", "cuda:1"])
@pytest.mark.parametrize(
    "moved", [lambda x, there: x.to(there), lambda x, there: torch.zeros(2, device=there).copy_(x)]
)
def test_batched_gradients_return_to_their_device(here, there, moved):
    x = torch.tensor([1.0, 2.0], device=here, requires_grad=True)
    y = moved(x, there).square()
    (jacobian,) = torch.autograd.grad(
        y, x, torch.eye(2, device=there), is_grads_batched=True, create_graph=True
    )
    (second,) = torch.autograd.grad(jacobian.sum(), x)
    assert (jacobian.device, second.device) == (torch.device(here), torch.device(here))
    assert (jacobian.tolist(), second.tolist()) == ([[2, 0], [0, 4]], [2, 2])


def test_gradients_batched_twice_return_to_their_device():
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    y = x.cuda() * 3
    gradient_of = partial(torch.autograd.grad, y, x, retain_graph=True)
    (back,) = _vmap(_vmap(gradient_of))(torch.ones(2, 2, 2, device="cuda"))
    assert back.device.type == "cpu"
    assert back.tolist() == [[[3, 3]] * 2] * 2


@pytest.mark.parametrize(
    ("there", "here"), [("cpu", "cuda:0"), ("cuda:0", "cpu"), ("cuda:0", "cuda:1")]
)
def test_a_tangent_of_forward_mode_moves_with_its_tensor(there, here, machine):
    x = torch.tensor([1.0, 2.0], device=there)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, 5 * x)
        taken, given = (
            torch.zeros(2, device=here),
            forward_ad.make_dual(torch.zeros(2, device=here), torch.ones(2, device=here)),
        )
        for moved in (dual.to(here), taken.copy_(dual), given.copy_(dual)):
            values, tangent = forward_ad.unpack_dual(moved * 2)
            assert (values.device, tangent.device) == (torch.device(here),) * 2
            assert (values.tolist(), tangent.tolist()) == ([2.0, 4.0], [10.0, 20.0])
        assert forward_ad.unpack_dual(x.to(here)).tangent is None


def test_page_locked_memory_stays_so_while_it_is_copied():
    """Keep a lazy clone of the memory, whose address the next read would change."""
    x = torch.ones(3, 1024).pin_memory()
    clone = torch._lazy_clone(x)
    assert x.is_pinned() and not clone.is_pinned()
    with torch.cuda.stream(torch.cuda.Stream()):
        for row in x:
            row.cuda(non_blocking=True)
            assert row.is_pinned()
    torch.cuda.synchronize()
    x.add_(1)
    assert x.is_pinned()
