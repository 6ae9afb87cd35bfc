"""Functions and modules scripted by torch.jit run on a virtual GPU as on the CPU."""

import io
import warnings

import pytest
import torch
from torch import nn

from virtualgpu.tensor import VirtualTensor


@pytest.fixture(autouse=True)
def used(machine):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer versions warn about torch.jit
        yield machine


def repeat(x: torch.Tensor, times: int) -> torch.Tensor:
    y = torch.zeros_like(x)
    for i in range(times):
        y = y + x if i % 2 == 0 else y * x + torch.ones(x.shape, device=x.device)
    return y


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def test_a_scripted_function():
    x = torch.arange(6.0).view(2, 3)
    got = torch.jit.script(repeat)(x.to("cuda:1"), 4)
    assert got.device == torch.device("cuda:1")
    assert torch.equal(got.cpu(), repeat(x, 4))


def test_a_scripted_module_and_its_gradients():
    plain, moved = network(), network()
    moved.load_state_dict(plain.state_dict())
    scripted = torch.jit.script(moved.cuda())
    x = torch.randn(3, 4)
    for _ in range(3):  # the second call is optimized
        expected, got = plain(x), scripted(x.cuda())
        expected.sum().backward()
        got.sum().backward()
        torch.testing.assert_close(got.cpu(), expected)
    for a, b in zip(moved.parameters(), plain.parameters(), strict=True):
        assert a.grad.is_cuda
        torch.testing.assert_close(a.grad.cpu(), b.grad, rtol=1e-4, atol=1e-5)


# by PyTorch's own batch norm
@pytest.mark.filterwarnings("ignore:Converting a tensor:torch.jit.TracerWarning")
def test_a_trace_is_made_on_the_cpu_alone():
    x = torch.randn(3, 4)
    traced = torch.jit.trace(network(), x)
    assert traced(x).shape == (3, 2)
    for module, example in (
        (network().cuda(), x.cuda()),
        (network().cuda(), x),
        (torch.tanh, x.cuda()),
        (torch.tanh, (x.cuda(),)),
    ):
        with pytest.raises(
            NotImplementedError,
            match="torch.jit.trace of CUDA tensors .* is not supported by the virtual GPU",
        ):
            torch.jit.trace(module, example)


def test_a_script_moves():
    plain = torch.jit.script(network().eval())
    x = torch.randn(3, 4)
    expected = plain(x)
    moved = plain.to("cuda:1")
    assert {str(y.device) for y in (*moved.parameters(), *moved.buffers())} == {"cuda:1"}
    torch.testing.assert_close(moved(x.to("cuda:1")).cpu(), expected)
    assert moved.cpu()(x).equal(expected)
    assert torch.cuda.memory_allocated(1) == 0


@pytest.mark.parametrize("place", ["cuda:1", "cpu", None, torch.device("cuda:2")])
def test_a_script_is_saved_and_loaded(place):
    module, file = network().eval().cuda(), io.BytesIO()
    x = torch.randn(3, 4)
    torch.jit.save(torch.jit.script(module), file)
    file.seek(0)
    loaded = torch.jit.load(file, map_location=place)
    device = torch.device(place or "cpu")
    assert {y.device for y in loaded.state_dict().values()} == {device}
    torch.testing.assert_close(loaded(x.to(device)).cpu(), module(x.cuda()).cpu())


def test_a_script_names_devices():
    unit = torch.jit.CompilationUnit("""
    def made(n: int):
        zeros = torch.zeros(n, device=torch.device("cuda:1"))
        on_host = torch.tensor([1.0], device="cpu")
        return zeros + torch.arange(n, device="cuda:1"), on_host
    """)
    x, y = unit.made(3)
    assert (x.device, y.device, x.tolist(), y.tolist()) == (
        torch.device("cuda:1"),
        torch.device("cpu"),
        [0, 1, 2],
        [1],
    )


@pytest.mark.parametrize("move", ["x.cuda()", "x.to('cuda:0')", "x.to(torch.device('cuda'))"])
def test_a_copy_to_a_gpu_inside_a_script_is_refused_where_there_is_none(used, move):
    unit = torch.jit.CompilationUnit(f"def moved(x):\n    return {move}\n")
    if used.real_gpus:
        x = unit.moved(torch.ones(2))
        assert (type(x), x.device, x.tolist()) == (
            VirtualTensor,
            torch.device("cuda:0"),
            [1.0, 1.0],
        )
        return
    with pytest.raises(
        NotImplementedError,
        match=r"a copy to a GPU inside torch.jit.script is not supported by the virtual GPU",
    ):
        unit.moved(torch.ones(2))
