"""Where a recording was made: the machine, the versions and the date."""

import datetime
import platform
from dataclasses import replace
from typing import Any

import psutil

from labkit import machine, nvidia
from labkit.experiments.result import Result


def origin(used: machine.GPUsInUse, program: str) -> dict[str, Any]:
    """Return the machine, the versions, the date and the command that makes the recording."""
    import torch

    return {
        "machine": used.name if used.count == 1 else f"{used.count}x {used.name}",
        "cpu": platform.processor() or platform.machine(),
        "cores": psutil.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "driver": nvidia.ask_nvml().driver or None,
        "date": datetime.date.today().isoformat(),
        "program": program,
    }


def recording(result: Result, made: dict[str, Any]) -> Result:
    """Return the result as a recording with this origin."""
    version = ".".join(made["torch"].split(".")[:2])
    badge = f"recorded on {made['machine'].replace('x ', '× ')}, torch {version}"
    return replace(result, badge=badge, origin=made)


def model(name: str) -> str:
    """Return the model of a GPU's name for a file name: "h200" for "NVIDIA H200"."""
    return name.removeprefix("NVIDIA ").replace(" ", "-").lower()
