"""`torch.cuda.tunable`, which times cuBLAS's kernels one against another: off, as on every GPU. Switching it on is refused.

What a program sets while it is off has no effect on a GPU either, and is answered (PyTorch's cuda/tunable/Tunable.cpp).
"""

import os
from typing import Any

from virtualgpu.errors import unsupported
from virtualgpu.hardware import Machine

_PREFIX = "PYTORCH_TUNABLEOP_"


def answers(machine: Machine) -> dict[str, Any]:
    kept: dict[str, Any] = {"tuning": True, "untuned": False, "duration": 30, "iterations": 100, "filename": ""}

    def enable(on: bool) -> None:
        if on:
            raise unsupported("torch.cuda.tunable, which times cuBLAS's kernels one against another,")

    def is_enabled() -> bool:
        enable(os.environ.get(f"{_PREFIX}ENABLED") == "1")
        return False

    def limit(variable: str, name: str) -> int:
        """The variable of the environment goes before what the program has set."""
        return max(int(os.environ.get(f"{_PREFIX}MAX_TUNING_{variable}", kept[name])), 0)

    def set_filename(name: str, insert_device_ordinal: bool = False) -> None:
        """Each GPU's file has its number in place of %d, or before the last dot, or at the end."""
        if name and insert_device_ordinal:
            number = str(machine.selected.device)
            stem, dot, ending = name.rpartition(".")
            name = name.replace("%d", number, 1) if "%d" in name else f"{stem}{number}{dot}{ending}" if dot else f"{name}{number}"
        kept["filename"] = name

    return {
        "_cuda_tunableop_enable": enable,
        "_cuda_tunableop_is_enabled": is_enabled,
        "_cuda_tunableop_tuning_enable": lambda on: kept.update(tuning=on),
        "_cuda_tunableop_tuning_is_enabled": lambda: kept["tuning"] and os.environ.get(f"{_PREFIX}TUNING") != "0",
        "_cuda_record_untuned_enable": lambda on: kept.update(untuned=on),
        "_cuda_record_untuned_is_enabled": lambda: kept["untuned"] or os.environ.get(f"{_PREFIX}RECORD_UNTUNED") == "1",
        "_cuda_tunableop_set_max_tuning_duration": lambda milliseconds: kept.update(duration=milliseconds),
        "_cuda_tunableop_get_max_tuning_duration": lambda: limit("DURATION_MS", "duration"),
        "_cuda_tunableop_set_max_tuning_iterations": lambda number: kept.update(iterations=number),
        "_cuda_tunableop_get_max_tuning_iterations": lambda: limit("ITERATIONS", "iterations"),
        "_cuda_tunableop_set_filename": set_filename,
        "_cuda_tunableop_get_filename": lambda: kept["filename"],
    }
