"""`labkit.gpus()`: the GPUs in use, and where each figure about them comes from."""

from dataclasses import dataclass
from html import escape

from labkit import machine, nvidia


@dataclass(frozen=True)
class Table:
    """Rows of text with a header; prints as plain text and as HTML."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str

    def __repr__(self) -> str:
        lines = [self.header, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.header))]
        text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
        return "\n".join([self.caption, *text])

    def _repr_html_(self) -> str:
        head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in self.header)
        body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in self.rows)
        return f"<table><caption>{escape(self.caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def gpus() -> Table:
    """A table of the GPUs in use: name, memory, driver, compute capability and multiprocessors, and the source of the figures."""
    used = machine.current()
    if used is None:
        return Table(("device",), (), "No GPUs are in use: labkit.use(gpus=1) gives you one.")
    import torch

    header = ("device", "name", "memory", "capability", "multiprocessors", "driver", "source")
    driver, source = _virtual_source() if used.virtual else _real_source()
    rows = []
    for index in range(used.count):
        figures = torch.cuda.get_device_properties(index)
        rows.append(
            (
                f"cuda:{index}",
                figures.name,
                machine.gibibytes(figures.total_memory),
                f"{figures.major}.{figures.minor}",
                str(figures.multi_processor_count),
                driver,
                source,
            )
        )
    return Table(header, tuple(rows), used.badge)


def _virtual_source() -> tuple[str, str]:
    from labkit.vgpu import hardware

    return hardware.machine().profile.driver_version, "labkit's profile of the model"


def _real_source() -> tuple[str, str]:
    answer = nvidia.ask_nvml()
    if answer.gpus:
        return answer.gpus[0].driver, "CUDA; driver: NVML"
    return f"unknown ({answer.trouble})", "CUDA"
