"""The public names of the kit, imported when first used: `import labkit` loads neither torch nor matplotlib."""

import importlib

__version__ = "0.1.0"

# Where each public function lives.
_FUNCTIONS = {
    "use": "labkit.machine",
    "gpus": "labkit.inventory",
    "host_time": "labkit.machine",
    "current": "labkit.machine",
    "check": "labkit.lessons",
}
_MODULES = ("experiments", "plots", "widgets")

__all__ = sorted([*_FUNCTIONS, *_MODULES])


def __getattr__(name: str) -> object:
    """Import what `labkit.<name>` stands for; called only for names that are not here yet."""
    if name in _FUNCTIONS:
        return getattr(importlib.import_module(_FUNCTIONS[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"labkit.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
