"""What CUDA's libraries take of a GPU's memory beside the tensors of a program, for whoever plans memory or tells what a block is for."""

from virtualgpu.ops.blas import workspace_bytes as cublas_bytes
from virtualgpu.ops.blas import workspace_lt_bytes as cublaslt_bytes
from virtualgpu.ops.convolution import figures as convolution_bytes
from virtualgpu.ops.reductions import MAX_THREADS as REDUCTION_THREADS
from virtualgpu.ops.reductions import launch_buffers as reduction_bytes

__all__ = ["REDUCTION_THREADS", "convolution_bytes", "cublas_bytes", "cublaslt_bytes", "reduction_bytes"]
