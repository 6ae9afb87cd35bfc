"""The GPU memory that CUDA's libraries use in addition to a program's tensors."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from virtualgpu.hardware import Gpu
from virtualgpu.ops.blas import free_workspaces as free_cublas
from virtualgpu.ops.blas import held_workspaces as held_by_cublas
from virtualgpu.ops.blas import workspace_bytes as cublas_bytes
from virtualgpu.ops.blas import workspace_lt_bytes as cublaslt_bytes
from virtualgpu.ops.nn.recurrent import free_dropout_state, has_dropout_state

__all__ = ["cublas_bytes", "cublaslt_bytes", "freed_afterwards"]


@contextmanager
def freed_afterwards(gpus: Sequence[Gpu]) -> Iterator[None]:
    """Free the workspaces that cuBLAS and cuDNN allocate in the block, and no others."""
    before = [(gpu, held_by_cublas(gpu), has_dropout_state(gpu)) for gpu in gpus]
    try:
        yield
    finally:
        for gpu, cublas, dropout in before:
            free_cublas(gpu, kept=cublas)
            if not dropout:
                free_dropout_state(gpu)
