"""The host's own work: data loaders, torch.func, and modes of autograd beside device tensors."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import virtualgpu


@pytest.fixture(autouse=True)
def used(machine):
    return machine


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_with_workers_and_pinned_memory(workers):
    data = TensorDataset(torch.arange(8.0), torch.arange(8))
    seen = 0.0
    for x, k in DataLoader(data, batch_size=4, shuffle=True, num_workers=workers, pin_memory=True):
        assert x.is_pinned() and k.is_pinned()
        seen += x.cuda(non_blocking=True).sum().item()
    assert seen == 28


class OnTheGpu(Dataset):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(2, device="cuda")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_worker_cannot_use_the_gpu():
    with pytest.raises(RuntimeError, match="Cannot re-initialize CUDA in forked subprocess"):
        list(DataLoader(OnTheGpu(), num_workers=1, multiprocessing_context="fork"))


class OnTheCpu(Dataset):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        one, before = torch.ones(2), virtualgpu.host_time()
        one.add(one)
        return one * (virtualgpu.host_time() - before)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 1])
def test_an_operator_of_a_forked_worker_is_not_modelled(workers):
    """Check this because nobody reads a worker's clock, and modelling slows it down."""
    torch.ones(1, device="cuda")
    context = "fork" if workers else None
    waited = torch.cat(
        list(DataLoader(OnTheCpu(), num_workers=workers, multiprocessing_context=context))
    )
    assert (waited > 0).all() == (workers == 0) and (waited == 0).all() == (workers == 1)


def test_inference_mode_and_no_grad():
    layer = nn.Linear(3, 2).cuda()
    with torch.inference_mode():
        y = layer(torch.ones(4, 3, device="cuda"))
        part = y[0].relu_()
    assert y.is_inference() and part.is_cuda and not y.requires_grad
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        layer.weight.sum() * y
    with torch.no_grad():
        assert not layer(torch.ones(4, 3, device="cuda")).requires_grad
    with torch.no_grad(), torch.enable_grad():
        assert layer(torch.ones(4, 3, device="cuda")).requires_grad


X = torch.tensor([0.5, -1.0, 2.0])
TRANSFORMS = {
    "grad": lambda x: torch.func.grad(lambda v: (v**3).sum())(x),
    "vmap": lambda x: torch.func.vmap(lambda v: v.sin() * 2)(x),
    "vmap of grad": lambda x: torch.func.vmap(torch.func.grad(lambda v: (v**3).sum()))(x[:, None]),
    "vjp": lambda x: torch.func.vjp(torch.sin, x)[1](torch.ones_like(x))[0],
    "jvp": lambda x: torch.func.jvp(torch.sin, (x,), (x,))[1],
    "jacrev": lambda x: torch.func.jacrev(lambda v: v**3)(x),
    "jacfwd": lambda x: torch.func.jacfwd(lambda v: v**3)(x),
    "hessian": lambda x: torch.func.hessian(lambda v: (v**3).sum())(x),
    "jacobian": lambda x: torch.autograd.functional.jacobian(lambda v: v**3, x),
}


# PyTorch's own error, also on the CPU
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_function_transforms(name):
    got = TRANSFORMS[name](X.to("cuda:1"))
    assert got.device == torch.device("cuda:1")
    torch.testing.assert_close(got.cpu(), TRANSFORMS[name](X))


def test_gradients_of_each_sample_by_functional_call():
    layer = nn.Linear(3, 2).cuda()
    weights = {name: value.detach() for name, value in layer.named_parameters()}

    def loss(weights: dict, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, weights, (x,)).square().sum()

    x = torch.arange(12.0, device="cuda").reshape(4, 3)
    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x)
    loss(dict(layer.named_parameters()), x).backward()
    assert each["weight"].shape == (4, 2, 3)
    torch.testing.assert_close(each["weight"].sum(0), layer.weight.grad)


def test_gradcheck():
    x = torch.linspace(-1, 1, 3, dtype=torch.double, device="cuda").requires_grad_()
    assert torch.autograd.gradcheck(lambda v: (v**3).sum(), x)
    assert torch.autograd.gradgradcheck(lambda v: (v**3).sum(), x)


def test_operators_of_the_host_take_host_time(machine):
    start = machine.host_time()
    torch.ones(1_000_000).add(1)
    assert 1e-5 < machine.host_time() - start < 1e-1


def test_a_view_of_the_host_s_memory_moves_no_bytes(machine):
    x = torch.ones(1 << 24)
    start = machine.host_time()
    x[5:].view(-1)
    assert machine.host_time() - start < 1e-4  # a copy of 64 MiB takes milliseconds


def test_operators_on_the_cpu_stay_there_beside_those_on_the_gpu():
    """Run the same line of Python for one device and then for the other."""
    for device in ("cuda", "cpu") * 2:
        x = torch.arange(4.0, device=device)
        made = (
            torch.zeros_like(x),
            x.new_zeros(2),
            torch.gradient(x)[0],
            torch.tril(x.outer(x)),
            nn.functional.one_hot(x.long()),
        )
        assert {y.device.type for y in made} == {device}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_the_engine_calls_when_a_backward_is_done_is_in_no_node(device):
    """Check callbacks at the end of a backward pass, in which DDP divides and waits."""
    weight, seen = torch.ones(2, device=device, requires_grad=True), []
    weight.register_hook(
        lambda gradient: torch.autograd.Variable._execution_engine.queue_callback(
            lambda: seen.append((gradient + 1).tolist())
        )
    )
    (weight * 3).sum().backward()
    assert seen == [[4.0, 4.0]]


def test_a_layer_on_the_host_stays_there_after_the_same_layer_on_a_gpu(machine):
    """Let both layers run the same instruction, in a Python frame at the same address."""
    layer = torch.nn.CircularPad1d(1)
    places = [
        layer(x).device.type for x in (torch.ones(1, 1, 3, device="cuda"), torch.ones(1, 1, 3))
    ]
    assert places == ["cuda", "cpu"]
