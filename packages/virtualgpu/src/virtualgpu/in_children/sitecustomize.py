"""Virtual GPUs for the Python programs that a script started with `run` starts.

Python imports this module first in these programs. They get the virtual GPUs when they import
torch.
"""

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

REQUEST = "VIRTUALGPU_REQUEST"  # the variable with the arguments of `use` for the script's machine
HERE = Path(__file__).resolve()


class WithTorch:
    """Import finder that puts the machine in use as soon as torch is loaded.

    If the kit itself imports torch, it does nothing, because the kit then uses another machine.
    """

    def __init__(self, request: dict[str, Any]) -> None:
        self.request = request

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """Find torch for Python's import system.

        The machine is put in use after torch is loaded.
        """
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        if (
            spec is not None
            and spec.loader is not None
            and "virtualgpu.hardware" not in sys.modules
        ):
            load = spec.loader.exec_module

            def load_and_use(module: Any) -> None:
                load(module)
                for folder in self.request.pop("places"):
                    if folder not in sys.path:
                        sys.path.append(folder)
                from virtualgpu import machines

                importlib.import_module(self.request.pop("front"))
                used = machines.use(**self.request, heeds_environment=True)
                # As in the process that `run` runs.
                used.machine.blanks_host = not used.request.values

            spec.loader.exec_module = load_and_use  # type: ignore[method-assign]
        return spec


def _import_next() -> None:
    """Import the module `sitecustomize` that Python would have imported without this one."""
    sys.path[:] = [folder for folder in sys.path if Path(folder).resolve() != HERE.parent]
    this = sys.modules.pop("sitecustomize")
    if importlib.util.find_spec("sitecustomize") is not None:
        importlib.import_module("sitecustomize")
    else:
        sys.modules["sitecustomize"] = this


if __name__ == "sitecustomize" and REQUEST in os.environ:
    sys.meta_path.insert(0, WithTorch(json.loads(os.environ[REQUEST])))
    _import_next()
