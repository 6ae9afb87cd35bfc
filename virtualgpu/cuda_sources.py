"""Refusal of CUDA code in `torch.utils.cpp_extension`, because nothing here can run it.

That module takes a second to import, so it is changed when the program imports it.
"""

import importlib.abc
import importlib.machinery
import inspect
import sys
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

from virtualgpu.errors import outermost, unsupported

MODULE = "torch.utils.cpp_extension"
_FUNCTIONS = ("load", "load_inline")


class CudaSources(importlib.abc.MetaPathFinder):
    """Refuses CUDA code from `begin` to `end`."""

    def __init__(self) -> None:
        self._changed: tuple[ModuleType, dict[str, Any]] | None = None

    def begin(self) -> None:
        if (module := sys.modules.get(MODULE)) is not None:
            self._change(module)
        else:
            sys.meta_path.insert(0, self)

    def end(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        if self._changed is not None:
            module, originals = self._changed
            vars(module).update(originals)
            self._changed = None

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_change(module: ModuleType) -> None:
                execute(module)
                self._change(module)

            spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec

    def _change(self, module: ModuleType) -> None:
        originals = {name: getattr(module, name) for name in _FUNCTIONS}
        vars(module).update({name: _without_cuda(original) for name, original in originals.items()})
        self._changed = module, originals


def _without_cuda(load: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with a refusal of CUDA code. C++ code for the host is compiled."""
    signature = inspect.signature(load)

    @outermost
    @wraps(load)
    def loading(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        sources = given.get("sources") or ()
        files = [sources] if isinstance(sources, str) else list(sources)
        if given.get("cuda_sources") or given.get("with_cuda") or any(str(file).endswith((".cu", ".cuh")) for file in files):
            raise unsupported(f"{MODULE}.{load.__name__} of CUDA code")
        return load(*args, **kwargs)

    return loading
