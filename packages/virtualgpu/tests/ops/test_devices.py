"""Operators whose tensors are on several devices give the same errors and results as on CUDA."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from virtualgpu.errors import VERSION

pytestmark = pytest.mark.usefixtures("machine")
SWEEP = Path(__file__).with_name("device_sweep.py")
TWO_DEVICES = (
    "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
)

# Differences between a virtual GPU and fake tensors, with the one that is right.
COPIES = (
    "C++ copies into a view of a clone, and a copy goes between devices. Fake tensors run a "
    "decomposition."
)
GENERATED = (
    "CUDA's generated code checks the arguments before the shared function whose words fake "
    "tensors have."
)
INDICES = (
    "The kernel of indexing checks devices itself. Fake tensors run a decomposition, which "
    "indexes otherwise."
)
EXCEPTIONS = {
    "linspace": "The database has the function from before virtual GPUs were in place.",
    "logspace": "The database has the function from before virtual GPUs were in place.",
    "as_strided_scatter": COPIES,
    "select_scatter": COPIES,
    "index_copy": GENERATED,
    "index_add": GENERATED,
    "_chunk_cat": GENERATED,
    "_unsafe_masked_index": INDICES,
    "_unsafe_masked_index_put_accumulate": INDICES,
    "__getitem__": INDICES,
    "index_put": INDICES,
    "nn.functional.binary_cross_entropy_with_logits": (
        "C++ multiplies `1 - target` in place by the input."
    ),
    "nn.functional.conv3d": (
        "The CPU's kernel is chosen by the input, and CUDA has none of that name."
    ),
    "linalg.pinv": "C++ gives the tolerances a dimension before it multiplies.",
}


@pytest.mark.slow
@pytest.mark.skipif(
    VERSION < (2, 13), reason="the words and the database are those of torch 2.13 and newer"
)
def test_every_operator_of_pytorchs_database_with_a_tensor_on_the_wrong_device():
    run = subprocess.run([sys.executable, str(SWEEP)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    report = json.loads(run.stdout.splitlines()[-1])
    assert report["calls"] > 2000
    found = {tuple(each[:4]): each[4:] for each in report["found"]}
    unexpected = {key: answers for key, answers in found.items() if key[0] not in EXCEPTIONS}
    assert not unexpected
    assert {name for name, *_ in found} == set(EXCEPTIONS)


def differs(argument: str, there: str, method: str, others: str = "cuda:0") -> str:
    return (
        f"Expected all tensors to be on the same device, but got {argument} is on {there}, "
        "different from "
        f"other tensors on {others} (when checking argument in method {method})"
    )


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, device="cuda")


def on_host(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


# Calls with CUDA's words, or None if CUDA takes the call.
CALLS = {
    # Generated code checks each argument, also numbers.
    "layer_norm": (
        lambda: functional.layer_norm(on_host(2, 3), (3,), ones(3), ones(3)),
        differs("weight", "cuda:0", "wrapper_CUDA__native_layer_norm", "cpu"),
    ),
    "gather": (
        lambda: ones(3).gather(0, torch.tensor(0)),
        differs("index", "cpu", "wrapper_CUDA_gather"),
    ),
    "index_select": (
        lambda: ones(3).index_select(0, torch.tensor(0)),
        differs("index", "cpu", "wrapper_CUDA__index_select"),
    ),
    "clamp": (
        lambda: ones(3).clamp(min=torch.tensor(0.0)),
        differs("min", "cpu", "wrapper_CUDA_clamp_Tensor"),
    ),
    "equal": (
        lambda: torch.equal(ones(), on_host()),
        differs("other", "cpu", "wrapper_CUDA__equal"),
    ),
    "linalg.solve": (
        lambda: torch.linalg.solve(on_host(2, 2), ones(2)),
        differs("B", "cuda:0", "wrapper_CUDA__linalg_solve_ex", "cpu"),
    ),
    # TensorIterator admits one number on the CPU.
    "add": (lambda: ones(3) + torch.tensor(1.0), None),
    "mse_loss": (lambda: functional.mse_loss(torch.tensor(0.0), ones()), None),
    "addcmul": (
        lambda: torch.addcmul(ones(3), on_host(), on_host()),
        "Trying to pass too many CPU scalars to non-CPU kernel!",
    ),
    "abs, out": (lambda: torch.abs(on_host(), out=ones()), TWO_DEVICES),
    "mean, out": (lambda: torch.mean(on_host(), 0, out=ones()), TWO_DEVICES),
    "det, out": (lambda: torch.linalg.det(on_host(2, 2), out=ones()), TWO_DEVICES),
    # Composite operators make their own checks.
    "meshgrid": (
        lambda: torch.meshgrid(ones(2), on_host(2), indexing="ij"),
        "meshgrid expects all tensors to have the same device",
    ),
    "cartesian_prod": (
        lambda: torch.cartesian_prod(ones(2), on_host(2)),
        "meshgrid expects all tensors to have the same device",
    ),
    "tensor_split": (
        lambda: torch.tensor_split(ones(4), torch.tensor(2, device="cuda")),
        "tensor_split expected tensor_indices_or_sections to be on cpu, but it's on cuda:0",
    ),
    "inner": (
        lambda: torch.inner(ones(2), on_host(2)),
        "Expected tensor to have cuda DeviceType, but got tensor with cpu DeviceType (while "
        "checking arguments for inner())",
    ),
    "take_along_dim": (
        lambda: torch.take_along_dim(ones(2), torch.tensor([0])),
        "Expected tensor to have cuda:0 Device, but got tensor with cpu Device (while checking "
        "arguments for torch.take_along_dim():)",
    ),
    "multi_dot": (
        lambda: torch.linalg.multi_dot([ones(2, 2), ones(2, 2), on_host(2, 2)]),
        "multi_dot(): all tensors must be on the same device but tensor 0 is on cuda:0 and tensor "
        "2 on cpu",
    ),
    "quantile": (
        lambda: torch.quantile(ones(3), torch.tensor([0.5])),
        "quantile() q tensor must be on the same device as the input tensor",
    ),
    "quantile, out": (
        lambda: torch.quantile(ones(3), 0.5, out=on_host()),
        "quantile() out tensor must be on the same device as the input tensor",
    ),
    "stft": (
        lambda: torch.stft(ones(64), 16, window=torch.ones(16), return_complex=True),
        "stft input and window must be on the same device but got self on cuda:0 and window on cpu",
    ),
    "istft": (
        lambda: torch.istft(ones(9, 5) + 0j, 16, window=torch.ones(16)),
        "istft input and window must be on the same device but got self on cuda:0 and window on "
        "cpu",
    ),
    "matrix_rank": (
        lambda: torch.linalg.matrix_rank(ones(2, 2), rtol=torch.tensor(0.1)),
        "torch.linalg.matrix_rank: Expected rtol and input tensors to be on the same device, but "
        "got rtol on cpu and input on cuda:0",
    ),
    "pinv": (lambda: torch.linalg.pinv(on_host(2, 2), rtol=ones()), TWO_DEVICES),
    "tensordot, out": (
        lambda: torch.tensordot(ones(2, 2), ones(2, 2), 1, out=on_host(2, 2)),
        "tensordot: Expected the output and input tensors to be on the same device, but got the "
        "output tensor on cpu, "
        "input tensor a on cuda:0, and input tensor b on cuda:0",
    ),
    "norm, out": (
        lambda: torch.linalg.norm(ones(2, 2), out=on_host()),
        "linalg.norm: Expected result and input tensors to be on the same device, but got result "
        "on cuda:0 and input on cpu",
    ),
    "cond, out": (
        lambda: torch.linalg.cond(ones(2, 2), out=on_host()),
        "linalg.cond: Expected result and input tensors to be on the same device, but got result "
        "on cpu and input on cuda:0",
    ),
    "gradient": (
        lambda: torch.gradient(on_host(3), spacing=(ones(3),)),
        "torch.gradient expected each tensor to be on the same device, but got devices cpu and "
        "cuda:0!",
    ),
    "multi_dot, out": (
        lambda: torch.linalg.multi_dot([ones(2, 2), ones(2, 2)], out=on_host(2, 2)),
        "multi_dot(): expected out tensor to be on device cuda:0 but got cpu",
    ),
    "ndtr, out": (lambda: torch.special.ndtr(ones(2), out=on_host(2)), TWO_DEVICES),
    "rms_norm": (lambda: functional.rms_norm(on_host(2, 3), (3,), ones(3)), TWO_DEVICES),
    # Copies between devices.
    "slice_scatter": (lambda: torch.slice_scatter(ones(2, 2), on_host(1, 2), 0, 0, 1), None),
    "select_scatter": (lambda: torch.select_scatter(on_host(2, 2), ones(2), 0, 0), None),
    "resize_as_": (lambda: ones(2).resize_as_(on_host(3, 4)), None),
    "index": (lambda: ones(3)[torch.tensor([0])], None),
    "ctc_loss": (
        lambda: functional.ctc_loss(ones(5, 1, 3).log_softmax(2), torch.tensor([[1, 2]]), [5], [2]),
        None,
    ),
    "embedding": (
        lambda: nn.Embedding(3, 2, device="cuda")(torch.tensor(1)),
        differs("index", "cpu", "wrapper_CUDA__index_select"),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_tensor_on_another_device(name):
    call, words = CALLS[name]
    if words is None:
        call()
        return
    with pytest.raises(RuntimeError) as refused:
        call()
    assert type(refused.value) is RuntimeError
    assert str(refused.value) == words


def test_limits_may_be_numbers_on_a_gpu():
    limit = torch.tensor(2.0, device="cuda")
    assert torch.linspace(0, limit, 3).tolist() == [0, 1, 2]
    assert torch.linspace(start=limit, end=limit, steps=1).device.type == "cpu"
    assert torch.logspace(0, limit, 2, device="cuda").tolist() == [1, 100]


def test_a_template_on_another_device_gives_size_and_format():
    template = torch.ones(1, 2, 3, 4).to(memory_format=torch.channels_last)
    x = torch.zeros(2, device="cuda").resize_as_(template, memory_format=torch.preserve_format)
    assert x.stride() == template.stride() and x.is_cuda
