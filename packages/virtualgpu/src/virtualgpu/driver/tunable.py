"""`torch.cuda.tunable`, which times cuBLAS's kernels and takes the fastest.

TunableOp is off, which is PyTorch's default, and cannot be switched on. A program can change the
settings and read them back, but they have no effect while TunableOp is off, as on a real GPU
(PyTorch's cuda/tunable/Tunable.cpp).
"""

import os
from typing import Any

from virtualgpu.errors import unsupported
from virtualgpu.hardware import Machine

_PREFIX = "PYTORCH_TUNABLEOP_"


def answers(machine: Machine) -> dict[str, Any]:
    """Return the functions of `torch._C` that torch.cuda.tunable calls."""
    kept: dict[str, Any] = {
        "tuning": True,
        "untuned": False,
        "duration": 30,
        "iterations": 100,
        "filename": "",
    }

    def enable(on: bool) -> None:
        """Raise NotImplementedError if `on` is true. Switching TunableOp off changes nothing."""
        if on:
            raise unsupported(
                "torch.cuda.tunable, which times cuBLAS's kernels one against another,"
            )

    def is_enabled() -> bool:
        """Return False. Raise NotImplementedError if the environment switches TunableOp on."""
        enable(os.environ.get(f"{_PREFIX}ENABLED") == "1")
        return False

    def limit(variable: str, name: str) -> int:
        """Return the limit of tuning with this name.

        The environment variable that ends in `variable` has priority over the program's setting.
        """
        return max(int(os.environ.get(f"{_PREFIX}MAX_TUNING_{variable}", kept[name])), 0)

    def tunes() -> bool:
        """Return whether tuning is enabled in the settings."""
        return kept["tuning"] and os.environ.get(f"{_PREFIX}TUNING") != "0"

    def records() -> bool:
        """Return whether the recording of untuned operators is enabled in the settings."""
        return kept["untuned"] or os.environ.get(f"{_PREFIX}RECORD_UNTUNED") == "1"

    def set_filename(name: str, insert_device_ordinal: bool = False) -> None:
        """Set the name of the file to which tuning results are written.

        With `insert_device_ordinal`, the number of the current GPU replaces %d. Without a %d, the
        number is put before the last dot, or at the end of a name without a dot.
        """
        if name and insert_device_ordinal:
            number = str(machine.selected.device)
            stem, dot, ending = name.rpartition(".")
            if "%d" in name:
                name = name.replace("%d", number, 1)
            elif dot:
                name = f"{stem}{number}{dot}{ending}"
            else:
                name = f"{name}{number}"
        kept["filename"] = name

    return {
        "_cuda_tunableop_enable": enable,
        "_cuda_tunableop_is_enabled": is_enabled,
        "_cuda_tunableop_tuning_enable": lambda on: kept.update(tuning=on),
        "_cuda_tunableop_tuning_is_enabled": tunes,
        "_cuda_record_untuned_enable": lambda on: kept.update(untuned=on),
        "_cuda_record_untuned_is_enabled": records,
        "_cuda_tunableop_set_max_tuning_duration": lambda limit_ms: kept.update(duration=limit_ms),
        "_cuda_tunableop_get_max_tuning_duration": lambda: limit("DURATION_MS", "duration"),
        "_cuda_tunableop_set_max_tuning_iterations": lambda count: kept.update(iterations=count),
        "_cuda_tunableop_get_max_tuning_iterations": lambda: limit("ITERATIONS", "iterations"),
        "_cuda_tunableop_set_filename": set_filename,
        "_cuda_tunableop_get_filename": lambda: kept["filename"],
    }
