"""Operators that CUDA computes in another order in each run.

They raise an error under `torch.use_deterministic_algorithms`. The names in the errors are those of
PyTorch's sources (`alertNotDeterministic` in aten/src/ATen/native/cuda).
"""

import os
from collections.abc import Callable
from typing import Any

import torch

from virtualgpu.ops.call import Call, Handler
from virtualgpu.source_lines import warn_as_cpp

# The names of CUDA's kernels for these operators.
ALERTS = {
    "_adaptive_avg_pool2d_backward": "adaptive_avg_pool2d_backward_cuda",
    "_adaptive_avg_pool3d_backward": "adaptive_avg_pool3d_backward_cuda",
    "adaptive_max_pool2d_backward": "adaptive_max_pool2d_backward_cuda",
    "avg_pool3d_backward": "avg_pool3d_backward_cuda",
    "bincount": "_bincount_cuda",
    "_ctc_loss_backward": "ctc_loss_backward_gpu",
    "cumsum": "cumsum_cuda_kernel",
    "cumsum_": "cumsum_cuda_kernel",
    "_embedding_bag_backward": "embedding_bag_backward_cuda_max",
    "_embedding_bag_dense_backward": "embedding_bag_backward_cuda_max",
    "fractional_max_pool2d_backward": "fractional_max_pool2d_backward_cuda",
    "fractional_max_pool3d_backward": "fractional_max_pool3d_backward_cuda",
    "grid_sampler_2d_backward": "grid_sampler_2d_backward_cuda",
    "grid_sampler_3d_backward": "grid_sampler_3d_backward_cuda",
    "histc": "_histc_cuda",
    "index_reduce": "index_reduce_cuda",
    "index_reduce_": "index_reduce_cuda",
    "median": "median CUDA with indices output",
    "nanmedian": "median CUDA with indices output",
    "nll_loss2d_forward": "nll_loss2d_forward_out_cuda_template",
    "put": "put_",
    "put_": "put_",
    "reflection_pad1d_backward": "reflection_pad1d_backward_out_cuda",
    "reflection_pad2d_backward": "reflection_pad2d_backward_cuda",
    "reflection_pad3d_backward": "reflection_pad3d_backward_out_cuda",
    "scatter_reduce": "scatter_reduce_cuda_prod_",
    "scatter_reduce_": "scatter_reduce_cuda_prod_",
    "upsample_bicubic2d_backward": "upsample_bicubic2d_backward_out_cuda",
    "upsample_bilinear2d_backward": "upsample_bilinear2d_backward_out_cuda",
    "upsample_linear1d_backward": "upsample_linear1d_backward_out_cuda",
    "upsample_trilinear3d_backward": "upsample_trilinear3d_backward_out_cuda",
}


def _of_fractions(call: Call) -> bool:
    """Return whether the result of a cumulative sum has a floating-point or complex dtype.

    Such sums are not deterministic on CUDA.
    """
    dtype = call.argument("dtype") or call.args[0].dtype
    return dtype.is_floating_point or dtype.is_complex


def _of_maxima(call: Call) -> bool:
    """Return whether a call of an embedding bag takes maxima and has dense gradients.

    Such calls are not deterministic on CUDA.
    """
    return call.argument("mode") == 2 and not call.argument("sparse")


def _by_product(call: Call) -> bool:
    """Return whether a call of a reduction computes a product.

    Such reductions are not deterministic on CUDA.
    """
    return call.argument("reduce") == "prod"


# The calls of these operators that are not deterministic. Other calls are.
ONLY: dict[str, Callable[[Call], bool]] = {
    "bincount": lambda call: call.argument("weights") is not None,
    "cumsum": _of_fractions,
    "cumsum_": _of_fractions,
    "_embedding_bag_backward": _of_maxima,
    "_embedding_bag_dense_backward": _of_maxima,
    "median": lambda call: "dim" in call.op.arguments,
    "nanmedian": lambda call: "dim" in call.op.arguments,
    "scatter_reduce": _by_product,
    "scatter_reduce_": _by_product,
}


def watched(name: str, handler: Handler) -> Handler:
    """Return `handler`, which runs the operator `name`, with a check for determinism.

    For a nondeterministic call, the check raises an error or warns, as PyTorch's settings say.
    """
    if name not in ALERTS:
        return handler
    meant = ONLY.get(name, lambda call: True)

    def run(call: Call) -> Any:
        if torch.are_deterministic_algorithms_enabled() and meant(call):
            alert(ALERTS[name])
        return handler(call)

    return run


def alert(kernel: str) -> None:
    """Raise RuntimeError, or warn, that the CUDA kernel of this name is not deterministic.

    PyTorch's settings decide which of the two.
    """
    if torch.is_deterministic_algorithms_warn_only_enabled():
        _say(
            f"{kernel} does not have a deterministic implementation, but you set "
            "'torch.use_deterministic_algorithms(True, warn_only=True)'. You can file an issue at "
            "https://github.com/pytorch/pytorch/issues to help us prioritize adding deterministic "
            "support for this operation."
        )
    else:
        _say(
            f"{kernel} does not have a deterministic implementation, but you set "
            "'torch.use_deterministic_algorithms(True)'. You can turn off determinism just for "
            "this operation, or you can use the 'warn_only=True' option, if that's acceptable for "
            "your application. You can also file an issue at "
            "https://github.com/pytorch/pytorch/issues to help us prioritize adding deterministic "
            "support for this operation."
        )


def require_fixed_workspaces() -> None:
    """Raise an error or warn if cuBLAS's workspaces do not have a fixed size.

    PyTorch's settings decide which of the two. With a fixed size, cuBLAS always sums in the same
    order.
    """
    if os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in (":4096:8", ":16:8"):
        _say(
            "Deterministic behavior was enabled with either "
            "`torch.use_deterministic_algorithms(True)` or "
            "`at::Context::setDeterministicAlgorithms(true)`, but this operation is not "
            "deterministic because it uses CuBLAS and you have CUDA >= 10.2. To enable "
            "deterministic behavior in this case, you must set an environment variable before "
            "running your PyTorch application: CUBLAS_WORKSPACE_CONFIG=:4096:8 or "
            "CUBLAS_WORKSPACE_CONFIG=:16:8. For more information, go to "
            "https://docs.nvidia.com/cuda/cublas/index.html#results-reproducibility"
        )


def _say(words: str) -> None:
    """Raise RuntimeError with the text `words`, or warn if PyTorch is set to warn only."""
    if not torch.is_deterministic_algorithms_warn_only_enabled():
        raise RuntimeError(words)
    warn_as_cpp(words)
