"""A program's own CUDA code and remote procedure calls are refused by name."""

import sys

import pytest
import torch
import torch.distributed.rpc

import virtualgpu
from virtualgpu.cuda_sources import MODULE, refusals
from virtualgpu.late_modules import LateModules


def test_cuda_code_is_refused_by_name(monkeypatch):
    # imported while the refusal is in place
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    refusal = LateModules({MODULE: refusals})
    refusal.begin()
    try:
        cpp_extension = __import__(MODULE, fromlist=["load_inline"])
        for load, arguments in (
            (
                cpp_extension.load_inline,
                {"cpp_sources": "", "cuda_sources": "__global__ void f() {}"},
            ),
            (cpp_extension.load, {"sources": ["kernel.cpp", "kernel.cu"]}),
        ):
            with pytest.raises(
                NotImplementedError,
                match=f"^{MODULE}.{load.__name__} of CUDA code is not supported by the virtual GPU",
            ):
                load(name="mine", **arguments)
        with pytest.raises(TypeError):
            cpp_extension.load_inline()
    finally:
        refusal.end()
    assert refusal not in sys.meta_path
    assert not hasattr(cpp_extension.load_inline, "__wrapped__")


def test_kernels_and_remote_procedure_calls_are_refused_by_name(machine):
    if hasattr(torch.cuda, "_compile_kernel"):
        with pytest.raises(
            NotImplementedError,
            match="^torch.cuda._compile_kernel, .* is not supported by the virtual GPU",
        ):
            torch.cuda._compile_kernel("__global__ void f() {}", "f")
    with pytest.raises(
        NotImplementedError,
        match="^torch.distributed.rpc.init_rpc is not supported by the virtual GPU",
    ):
        torch.distributed.rpc.init_rpc("worker", rank=0, world_size=1)


def test_nothing_is_refused_once_the_machine_is_gone():
    virtualgpu.use(None)
    virtualgpu.use(gpus=1, like="H200")
    virtualgpu.use(None)
    assert not any(isinstance(finder, LateModules) for finder in sys.meta_path)
    assert "refused" not in torch.distributed.rpc.init_rpc.__qualname__
