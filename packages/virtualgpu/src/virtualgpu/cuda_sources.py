"""Refusal of CUDA code in `torch.utils.cpp_extension`, because a virtual GPU cannot run it."""

import inspect
from collections.abc import Callable, Iterator
from functools import wraps
from types import ModuleType
from typing import Any

from virtualgpu.errors import outermost, unsupported

MODULE = "torch.utils.cpp_extension"
_FUNCTIONS = ("load", "load_inline")


def refusals(module: ModuleType) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield `torch.utils.cpp_extension` with replacements for its functions that compile CUDA code.

    The replacements refuse CUDA code. `module` is the imported module.
    """
    yield module, {name: _without_cuda(getattr(module, name)) for name in _FUNCTIONS}


def _without_cuda(load: Callable[..., Any]) -> Callable[..., Any]:
    """Return `load`, changed so that it refuses CUDA code.

    `load` compiles source files. C++ code for the host is still compiled.
    """
    signature = inspect.signature(load)

    @outermost
    @wraps(load)
    def loading(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        sources = given.get("sources") or ()
        files = [sources] if isinstance(sources, str) else list(sources)
        has_cuda_file = any(str(file).endswith((".cu", ".cuh")) for file in files)
        if given.get("cuda_sources") or given.get("with_cuda") or has_cuda_file:
            raise unsupported(f"{MODULE}.{load.__name__} of CUDA code")
        return load(*args, **kwargs)

    return loading
