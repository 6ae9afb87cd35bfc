"""Mistakes raise the exceptions of a real H200, with its words (torch 2.11, CUDA 13.0).

They were recorded in November 2026.
"""

import json
import mmap
import re
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import virtualgpu
from virtualgpu import VirtualGPUs, errors

PROBE = Path(__file__).parents[1] / "benchmarks/fidelity/h200/probe.json"
ROWS = json.loads(PROBE.read_text())["rows"]
MISTAKES = {
    row["name"]: (row["expression"], *row["answer"])
    for row in ROWS
    if row["answer"][0] != "ok" and row["after"] is None
}
# It names other processes on that GPU. `tests/allocator/test_oom.py` checks its words.
del MISTAKES["oom"]
del MISTAKES["one_hot_range"]  # a device-side assert: tests/ops/test_faults.py
# Recorded on an H200 earlier.
CLAIMS = {
    "two devices in one op": (
        "torch.ones(3, device='cuda') + torch.ones(3)",
        "RuntimeError",
        MISTAKES["cpu_plus_cuda"][2],
    ),
    "numpy of a list of tensors": (
        "[torch.ones(1, device='cuda')][0].numpy()",
        "TypeError",
        MISTAKES["numpy"][2],
    ),
    "optimizer.to": (
        "torch.optim.SGD([torch.ones(1)], 0.1).to('cuda')",
        "AttributeError",
        "'SGD' object has no attribute 'to'",
    ),
    "empy_cache": (
        "torch.cuda.empy_cache()",
        "AttributeError",
        "module 'torch.cuda' has no attribute 'empy_cache'",
    ),
    "gpu_ids": (
        "nn.DataParallel(nn.Linear(1, 1), gpu_ids=[0])",
        "TypeError",
        "DataParallel.__init__() got an unexpected keyword argument 'gpu_ids'",
    ),
}
NAMES = {"torch": torch, "nn": nn, "F": F}
LIBRARIES = Path(torch.__file__).parent / "lib"


def as_said_here(expression: str, kind: str, words: str) -> tuple[str, str]:
    """Return the exception class and the text that the installed torch has for an expression.

    Errors that do not depend on the device have the CPU's class. `kind` and `words` are recorded.
    """
    try:
        eval(expression.replace("cuda", "cpu"), NAMES)
    except Exception as error:
        kind = type(error).__name__ if str(error) == words else kind
    if re.match(r"\"\w+\" not implemented for", words):  # the same macro on every device
        with pytest.raises(RuntimeError, match="not implemented for") as missing:
            torch.ones(2, dtype=torch.int).softmax(0)
        kind = missing.type.__name__
    return kind, words


@pytest.fixture(scope="module", autouse=True)
def one_gpu() -> Iterator[VirtualGPUs]:
    yield virtualgpu.use(gpus=1, like="H200")
    virtualgpu.use(None)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("name", MISTAKES | CLAIMS)
def test_a_mistake_gets_the_class_and_the_words_of_cuda(name: str):
    expression, *recorded = (MISTAKES | CLAIMS)[name]
    kind, words = as_said_here(expression, *recorded)
    with pytest.raises(BaseException, match=f"^{re.escape(words)}$") as caught:
        eval(expression, NAMES)
    assert caught.type.__name__ == kind


def test_enough_of_the_catalogue_was_found():
    assert len(MISTAKES) > 70


def is_in_library(name: str, words: bytes) -> bool:
    """Return whether the library `name` of the installed torch contains these words."""
    library = next(
        (
            LIBRARIES / (name + ending)
            for ending in (".so", ".dylib")
            if (LIBRARIES / (name + ending)).exists()
        ),
        None,
    )
    if library is None:
        pytest.skip(f"this build of torch has no {name}")
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        return text.find(words) >= 0


def test_the_installed_torch_says_it_in_these_words():
    assert is_in_library("libtorch_cpu", b", different from other tensors on ")


def test_the_installed_torch_advises_about_errors_of_cuda():
    assert is_in_library("libc10_cuda", b"in https://docs.nvidia.com/cuda/cuda-runtime-api/")


def argument_error(argument: str, here: str, there: str, method: str) -> str:
    return re.escape(
        errors.argument_differs(
            [("", torch.empty(0, device=there)), (argument, torch.empty(0, device=here))], method
        )
    )


@pytest.mark.parametrize(
    ("call", "argument", "method"),
    [
        (lambda x, i: torch.addmv(x[0], x, x[0].cpu()), "vec", "wrapper_CUDA_addmv"),
        (lambda x, i: torch.dot(x[0], x[0].cpu()), "tensor", "wrapper_CUDA__dot"),
        (lambda x, i: x.scatter(0, i.cpu(), x), "index", "wrapper_CUDA_scatter_src"),
        (lambda x, i: x.index_add(0, i[0].cpu(), x), "index", "wrapper_CUDA_index_add"),
        (
            lambda x, i: torch.linalg.solve_triangular(x, x.cpu(), upper=True),
            "B",
            "wrapper_CUDA__linalg_solve_triangular",
        ),
        (
            lambda x, i: F.group_norm(x[None], 2, x[0].cpu()),
            "weight",
            "wrapper_CUDA__native_group_norm",
        ),
    ],
)
def test_other_operators_name_argument_and_method_by_the_same_rule(
    call, argument: str, method: str
):
    x = torch.ones(2, 2, device="cuda")
    i = torch.zeros(2, 2, dtype=torch.long, device="cuda")
    with pytest.raises(RuntimeError, match=f"^{argument_error(argument, 'cpu', 'cuda', method)}$"):
        call(x, i)


def test_two_gpus_are_told_apart():
    virtualgpu.use(None)
    try:
        with virtualgpu.use(gpus=2, like="H200"):
            x, y = torch.ones(2, 2, device="cuda:0"), torch.ones(2, 2, device="cuda:1")
            with pytest.raises(RuntimeError, match=r"at least two devices, cuda:0 and cuda:1!$"):
                x + y
            with pytest.raises(
                RuntimeError,
                match=f"^{argument_error('mat2', 'cuda:1', 'cuda:0', 'wrapper_CUDA_mm')}$",
            ):
                x @ y
            with pytest.raises(
                RuntimeError,
                match=(
                    "gradient located on device with index '1' to a tensor located on device with "
                    "index '0'"
                ),
            ):
                x.grad = y
    finally:
        virtualgpu.use(gpus=1, like="H200")


def test_gradients_are_assigned_where_they_belong():
    x = torch.ones(2, device="cuda", requires_grad=True)
    x.grad = torch.ones(2, device="cuda")
    assert x.grad.tolist() == [1, 1]
    x.grad = None
    assert x.grad is None
    x.grad = torch.ones(2, device="cuda")
    del x.grad
    assert x.grad is None
    with pytest.raises(
        RuntimeError, match="gradient with device type 'cuda' to a tensor with device type 'cpu'"
    ):
        torch.ones(2).grad = torch.ones(2, device="cuda")


def test_cpu_errors_stay_the_cpu_s():
    with pytest.raises(IndexError, match="index 7 is out of bounds"):
        torch.ones(3)[torch.tensor([7])]
    with pytest.raises(RuntimeError, match="m1 and m2|mat1 and mat2"):
        torch.ones(2, 2) @ torch.ones(2, 2).half()


def calls(error: BaseException) -> list[str]:
    """Return the files of the calls in the error's traceback."""
    return [Path(call.filename).name for call in traceback.extract_tb(error.__traceback__)]


@pytest.mark.parametrize(
    "code",
    [
        "torch.zeros(1 << 40, device='cuda')",
        "torch.tensor([1.0], device='cuda:9')",
        "torch.ones(2).cuda(9)",
        "torch.ones(2).to('cuda:9')",
        "torch.ones(2, 2, device='cuda') @ torch.ones(2, 2)",
        "torch.ones(2, device='cuda')[2]",
    ],
)
def test_a_traceback_ends_in_the_users_code(code):
    with pytest.raises((IndexError, RuntimeError)) as caught:
        eval(compile(code, "<string>", "eval"), NAMES)
    assert calls(caught.value) == ["test_errors.py", "<string>"]


def test_a_traceback_through_the_users_own_code_is_whole():
    class Twice(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is torch.neg:
                raise ValueError("mine")
            return func(*args, **(kwargs or {}))

    with Twice(), pytest.raises(ValueError, match="mine") as caught:
        torch.neg(torch.ones(2, device="cuda"))
    assert calls(caught.value) == ["test_errors.py", "test_errors.py"]

    @torch.library.custom_op("labkit_tests::fails", mutates_args=())
    def fails(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine") as caught:
        fails(torch.ones(2, device="cuda"))
    assert calls(caught.value)[0] == calls(caught.value)[-1] == "test_errors.py"


def test_an_out_of_memory_error_keeps_no_calls_of_the_kit_alive():
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.zeros(1 << 40, device="cuda")
    assert caught.value.__context__ is None and caught.value.__cause__ is None


@pytest.mark.slow
def test_the_makers_of_the_kit_see_all_of_it():
    code = "import torch, virtualgpu\nvirtualgpu.use()\ntorch.zeros(1 << 40, device='cuda')"
    run = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert "OutOfMemoryError" in run.stderr and str(Path(errors.__file__).parent) in run.stderr


def test_gradients_of_many_directions_at_once():
    x = torch.ones(2, device="cuda", requires_grad=True)
    (found,) = torch.autograd.grad(x * x, x, torch.eye(2, device="cuda"), is_grads_batched=True)
    assert found.tolist() == [[2, 0], [0, 2]]


def test_a_storage_of_the_host_is_not_shared_as_cuda_memory():
    with pytest.raises(RuntimeError, match="_share_cuda_: only available on CUDA"):
        torch.ones(1).untyped_storage()._share_cuda_()
