"""`labkit.gpus()`: the GPUs in use, and where each figure about them comes from."""

import virtualgpu
from gputrace import Table
from labkit import machine, nvidia
from virtualgpu.machines import gibibytes


def gpus() -> Table:
    """A table of the GPUs in use: name, memory, driver, compute capability and multiprocessors, and the source of the figures."""
    used = machine.current()
    if used is None:
        return Table(("device",), (), "No GPUs are in use: labkit.use(gpus=1) gives you one.")
    import torch

    header = ("device", "name", "memory", "capability", "multiprocessors", "driver", "source")
    virtual = virtualgpu.current()
    driver, source = _real_source() if virtual is None else (virtual.profile.driver_version, "labkit's profile of the model")
    rows = []
    for index in range(used.count):
        figures = torch.cuda.get_device_properties(index)
        rows.append(
            (
                f"cuda:{index}",
                figures.name,
                gibibytes(figures.total_memory),
                f"{figures.major}.{figures.minor}",
                str(figures.multi_processor_count),
                driver,
                source,
            )
        )
    return Table(header, tuple(rows), used.badge)


def _real_source() -> tuple[str, str]:
    answer = nvidia.ask_nvml()
    if answer.gpus:
        return answer.gpus[0].driver, "CUDA; driver: NVML"
    return f"unknown ({answer.trouble})", "CUDA"
