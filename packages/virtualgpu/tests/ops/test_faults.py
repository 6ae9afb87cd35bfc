"""Device-side asserts are asynchronous and persistent, as on an H200 (fidelity/h200/probe.json)."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import virtualgpu
from virtualgpu import errors
from virtualgpu.ops import call

ROWS = json.loads((Path(__file__).parents[2] / "benchmarks/fidelity/h200/probe.json").read_text())[
    "rows"
]
ASSERTS = {
    row["name"]: row for row in ROWS if row["after"] is not None or row["name"] == "one_hot_range"
}
AcceleratorError = errors.AcceleratorError


@pytest.fixture(autouse=True)
def one_gpu():
    with virtualgpu.use(gpus=2, like="H200"):
        yield


def fail(device: str = "cuda") -> torch.Tensor:
    return torch.ones(3, device=device)[torch.tensor([7], device=device)]


def fills_at_an_index() -> bool:
    """Return whether `x[index] = number` calls `index_fill_`, as in newer versions of torch.

    Older versions call `index_put_`.
    """
    called = []

    class Heard(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            called.append(func)
            return func(*args, **kwargs or {})

    with Heard():
        torch.zeros(3)[torch.tensor([1])] = 1.0
    return torch.ops.aten.index_fill_.int_Scalar in called


@pytest.mark.parametrize("name", ASSERTS)
def test_an_assert_of_the_catalogue_surfaces_and_stays(name, capsys):
    row = ASSERTS[name]
    if name == "assert_then_alloc":
        row = row | {"expression": row["expression"].replace("__import__('time').sleep(1)", "None")}
    with pytest.raises(
        AcceleratorError, match="^CUDA error: device-side assert triggered"
    ) as caught:
        eval(row["expression"], {"torch": torch, "nn": nn, "F": F})
    assert str(caught.value) == row["answer"][1]
    assertion = row["stderr"].split("Assertion `")[1].split("` failed")[0]
    if name == "index_put_assert" and fills_at_an_index():
        assertion, _ = call.ASSERTIONS["index_fill_"]
    assert f"`{assertion}" in capsys.readouterr().err
    with pytest.raises(AcceleratorError, match="device-side assert"):
        torch.zeros(1, device="cuda").item()


@pytest.mark.parametrize(
    ("assertion", "work"),
    [
        ("0 <= p4 && p4 <= 1", lambda: torch.bernoulli(torch.tensor([1.5], device="cuda"))),
        (
            "0 <= p4 && p4 <= 1",
            lambda: torch.empty(1, device="cuda").bernoulli_(torch.tensor([-1.0], device="cuda")),
        ),
        ("lambda >= 0", lambda: torch.poisson(torch.tensor([-1.0], device="cuda"))),
        (
            "input[emb] < numRows",
            lambda: nn.EmbeddingBag(3, 2).cuda()(torch.tensor([[9]], device="cuda")),
        ),
        (
            "maxind >= 0 && maxind < outputImageSize",
            lambda: F.max_unpool2d(
                torch.ones(1, 1, 1, 1, device="cuda"), torch.full((1, 1, 1, 1), 9, device="cuda"), 2
            ),
        ),
    ],
)
def test_a_value_that_the_cpu_refuses_at_once_stops_the_gpu_later(assertion, work, capsys):
    """Check the assertions of PyTorch's kernels (ATen/native/cuda)."""
    work()
    with pytest.raises(AcceleratorError, match="device-side assert"):
        torch.cuda.synchronize()
    assert f"`{assertion}" in capsys.readouterr().err


def test_the_call_itself_returns():
    result = fail()
    assert result.shape == (1,)
    assert result.device == torch.device("cuda", 0)


@pytest.mark.parametrize(
    "wait",
    [
        lambda x, e: x.item(),
        lambda x, e: x.cpu(),
        lambda x, e: x.tolist(),
        lambda x, e: print(x),
        lambda x, e: torch.cuda.synchronize(),
        lambda x, e: torch.cuda.current_stream().synchronize(),
        lambda x, e: e.synchronize(),
        lambda x, e: torch.cuda.empty_cache(),
        lambda x, e: torch.ones(3).cuda(),
        lambda x, e: bool(x > 0),
        lambda x, e: [x + 1 for _ in range(2000)],
    ],
)
def test_what_waits_hears_of_it(wait):
    event = torch.cuda.Event()
    event.record()
    result = fail()
    with pytest.raises(AcceleratorError, match="device-side assert"):
        wait(result, event)


def test_work_queued_before_delays_it():
    x = torch.ones(3, device="cuda")
    torch.cuda._sleep(10**9)
    x.index_select(0, torch.full((1,), 7, device="cuda"))
    for _ in range(100):
        x = x + 1  # the host does not know about the error yet
    with pytest.raises(AcceleratorError):
        torch.cuda.synchronize()


def test_launch_blocking_puts_it_where_it_happened(monkeypatch):
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    with pytest.raises(AcceleratorError, match="device-side assert"):
        fail()


def test_the_other_gpu_goes_on():
    fail("cuda:0")
    assert torch.ones(2, device="cuda:1").sum().item() == 2
    with pytest.raises(AcceleratorError):
        torch.cuda.synchronize(0)


def test_a_new_machine_has_a_working_gpu():
    fail()
    with pytest.raises(AcceleratorError):
        torch.cuda.synchronize()
    virtualgpu.use(None)
    with virtualgpu.use(gpus=2, like="H200"):
        assert torch.ones(2, device="cuda").sum().item() == 2


def test_writing_in_place_returns_the_tensor():
    x = torch.zeros(3, device="cuda")
    assert x.scatter_(0, torch.tensor([7], device="cuda"), 1.0) is x


def test_shapes_that_do_not_fit_are_an_error_at_once():
    x = torch.ones(3, device="cuda")
    with pytest.raises(IndexError, match="Dimension out of range"):
        x.index_select(4, torch.tensor([0], device="cuda"))
    with pytest.raises(IndexError, match="too many indices|shape of the mask"):
        x[torch.ones(4, dtype=torch.bool, device="cuda")]
    assert x.sum().item() == 3


def test_the_loss_of_a_wrong_class_fails_in_training_too():
    logits = torch.zeros(2, 3, device="cuda", requires_grad=True)
    loss = F.cross_entropy(logits, torch.tensor([0, 3], device="cuda"))
    with pytest.raises(AcceleratorError):
        loss.backward()
        torch.cuda.synchronize()


def test_a_kernel_that_complains_by_its_name_has_cudas():
    with pytest.raises(
        RuntimeError,
        match=(
            r"max_pool3d_with_indices_out_cuda_template\(\): Expected input's non-batch dimensions"
        ),
    ):
        torch.nn.functional.max_pool3d(torch.empty(2, 1, 0, 1, 2, device="cuda"), (2, 2, 2))


FOREACH = {
    "_foreach_sqrt": lambda x: torch._foreach_sqrt(x),
    "_foreach_add, list": lambda x: torch._foreach_add(x, x, alpha=2),
    "_foreach_mul, scalars": lambda x: torch._foreach_mul(x, [2.0, 3.0, 4.0]),
    "_foreach_addcmul, scalars": lambda x: torch._foreach_addcmul(
        x, x, x, torch.tensor([2.0, 3.0, 4.0])
    ),
    "_foreach_norm": lambda x: torch._foreach_norm(x),
    "_foreach_neg_": lambda x: torch._foreach_neg_(x),
}


@pytest.mark.parametrize("name", FOREACH)
def test_lists_of_tensors_on_several_devices_are_taken_tensor_by_tensor(name):
    devices = ["cuda:1", "cpu", "cuda:0"]
    given = [torch.full((3,), 4.0 + i, device=device) for i, device in enumerate(devices)]
    expected = FOREACH[name]([x.cpu().clone() for x in given])
    found = FOREACH[name](given)
    assert [str(x.device) for x in found] == devices
    torch.testing.assert_close([x.cpu() for x in found], list(expected))


def test_scalars_in_a_tensor_of_the_cpu_are_numbers():
    x = [torch.ones(2, device="cuda") for _ in range(2)]
    assert [y.tolist() for y in torch._foreach_addcmul(x, x, x, torch.tensor([2.0, 3.0]))] == [
        [3, 3],
        [4, 4],
    ]


def test_a_list_is_copied_from_other_devices():
    targets = [torch.zeros(3, device="cuda:0"), torch.zeros(3), torch.zeros(3, device="cuda:1")]
    sources = [torch.ones(3, device="cuda:1"), torch.ones(3, device="cuda:0"), torch.ones(3)]
    torch._foreach_copy_(targets, sources)
    torch._foreach_copy_(targets[:1], sources[:1])
    assert all(x.tolist() == [1, 1, 1] for x in targets)


def test_lists_that_disagree_within_an_entry_are_refused():
    x, y = torch.ones(3, device="cuda:0"), torch.ones(3, device="cuda:1")
    with pytest.raises(
        RuntimeError,
        match=(
            "^Expected all tensors to be on the same device, but found at least two devices, "
            "cuda:0 and cuda:1!"
        ),
    ):
        torch._foreach_add([x, x], [x, y])
    with pytest.raises(
        RuntimeError, match="^Tensor lists must have the same number of tensors, got 2 and 1"
    ):
        torch._foreach_add([x, y], [x])


def test_gradients_through_a_list_on_several_devices():
    x, y = (
        torch.full((2,), 4.0, device=device, requires_grad=True) for device in ("cuda:0", "cuda:1")
    )
    a, b = torch._foreach_sqrt([x, y])
    (a.sum() + b.sum().to("cuda:0")).backward()
    assert x.grad.tolist() == y.grad.tolist() == [0.25, 0.25]
