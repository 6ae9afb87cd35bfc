"""Python imports this first, in programs that a script under `run` starts: they have its virtual GPUs once they import torch."""

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

REQUEST = "VIRTUALGPU_REQUEST"  # in the environment: what the script's machine was asked for
HERE = Path(__file__).resolve()


class WithTorch:
    """Finds torch, and puts the machine in place when it has been loaded; not where the kit itself asks for torch, for another machine."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.request = request

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.loader is not None and "virtualgpu.hardware" not in sys.modules:
            load = spec.loader.exec_module

            def load_and_use(module: Any) -> None:
                load(module)
                sys.path += [place for place in self.request.pop("places") if place not in sys.path]
                from virtualgpu import machines

                importlib.import_module(self.request.pop("front"))
                used = machines.use(**self.request, heeds_environment=True)
                used.machine.blanks_host = not used.request.values  # as in the process that `run` runs

            spec.loader.exec_module = load_and_use  # type: ignore[method-assign]
        return spec


def _import_next() -> None:
    """The module of this name that Python would have imported without this one."""
    sys.path[:] = [folder for folder in sys.path if Path(folder).resolve() != HERE.parent]
    this = sys.modules.pop("sitecustomize")
    if importlib.util.find_spec("sitecustomize") is not None:
        importlib.import_module("sitecustomize")
    else:
        sys.modules["sitecustomize"] = this


if __name__ == "sitecustomize" and REQUEST in os.environ:
    sys.meta_path.insert(0, WithTorch(json.loads(os.environ[REQUEST])))
    _import_next()
