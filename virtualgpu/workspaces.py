"""The GPU memory that CUDA's libraries take besides a program's tensors."""

from virtualgpu.ops.blas import workspace_bytes as cublas_bytes
from virtualgpu.ops.blas import workspace_lt_bytes as cublaslt_bytes
from virtualgpu.ops.nn.convolution import figures as convolution_bytes
from virtualgpu.ops.reductions import MAX_THREADS as REDUCTION_THREADS
from virtualgpu.ops.reductions import launch_buffers as reduction_bytes

__all__ = ["REDUCTION_THREADS", "convolution_bytes", "cublas_bytes", "cublaslt_bytes", "reduction_bytes"]
