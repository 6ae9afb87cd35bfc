"""GPUs as small tables with a curve a figure, in HTML: what the monitor shows.

The curves are inline SVG of some hundred bytes, because they are drawn twice a second; a picture would be a hundred times that.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import escape
from math import ceil

from labkit import units
from labkit.experiments.readings import PERIOD, RETRY, SPAN, GpuReading, Look, history
from labkit.plots import BLUE

WIDTH, HEIGHT = 120, 24  # of a curve, in pixels
GAP = PERIOD + RETRY  # seconds without a look after which a curve is broken


@dataclass(frozen=True)
class Gauge:
    """One of the figures: what a GPU says now, where its curve ends at the top, given the most that was seen, and its unit."""

    name: str
    now: Callable[[GpuReading], float | None]
    top: Callable[[GpuReading, float], float]
    text: Callable[[float], str]


def memory_scale(gpu: GpuReading, most: float) -> float:
    """The power of two from `most` up, 1 MiB to all memory: a small program's curve on a large GPU is no flat line."""
    scale = 1 << (max(ceil(most), 1 << 20) - 1).bit_length()
    return scale if gpu.total is None else min(scale, gpu.total)


GAUGES = (
    Gauge("memory", lambda gpu: gpu.used, memory_scale, units.byte_text),
    Gauge("utilization", lambda gpu: gpu.utilization, lambda gpu, most: 1.0, lambda share: f"{share * 100:.0f} %"),
    Gauge("power", lambda gpu: gpu.watts, lambda gpu, most: gpu.watts_limit or most, lambda watts: f"{watts:.0f} W"),
    Gauge("temperature", lambda gpu: gpu.celsius, lambda gpu, most: 100.0, lambda celsius: f"{celsius:.0f} °C"),
)
MEANING = {
    False: "Memory is that of all processes. Utilization: the share of the last moment (1/6 s to 1 s) during which a kernel ran.",
    True: "Utilization: the share of the next 1/6 s of the model's time for which work is queued.",
}
# A sheet of its own, sent once: what is drawn twice a second only names its classes. White, in dark themes too, as all figures are.
STYLE = """<style>
.labkit-gpus { display: flex; flex-wrap: wrap; gap: 8px; font-size: 13px; line-height: 1.4 }
.labkit-gpus table { background: white; color: black; border: 1px solid #999999; border-collapse: collapse; margin: 0 }
.labkit-gpus caption { background: white; color: black; text-align: left; font-weight: bold; padding: 2px 6px; caption-side: top }
.labkit-gpus th, .labkit-gpus td { background: white; text-align: left; font-weight: normal; padding: 1px 6px; white-space: normal }
.labkit-gpus th { color: #444444 }
.labkit-gpus td:nth-child(2) { min-width: 4em }
.labkit-gpus svg { display: block; background: #EEEEEE; fill: none; stroke: BLUE; stroke-width: 2; stroke-linejoin: round }
.labkit-gpus + p { font-size: 13px; line-height: 1.4; margin: 4px 0 }
</style>""".replace("BLUE", BLUE)


def cards(looks: tuple[Look, ...]) -> str:
    """A table a GPU, as HTML: what the last look saw, and the curves of the last minute. Empty if it saw no GPU."""
    if not looks or not looks[-1].gpus:
        return ""
    seen = history(looks)
    tables = "".join(_card(seen, place) for place in range(len(looks[-1].gpus)))
    kinds = sorted({gpu.virtual for gpu in looks[-1].gpus})
    notes = " ".join(MEANING[kind] for kind in kinds)
    return f'<div class="labkit-gpus">{tables}</div><p><em>{escape(badge(looks[-1].gpus))}</em>: {escape(notes)}</p>'


def badge(gpus: tuple[GpuReading, ...]) -> str:
    """Where the figures come from."""
    names = dict.fromkeys(
        (gpu.virtual, gpu.name if gpu.name.startswith("NVIDIA") else f"NVIDIA {gpu.name}") for gpu in gpus if not gpu.trouble
    )
    return ", ".join(f"virtual GPU, modelled on {name}" if virtual else f"measured on {name}" for virtual, name in names)


def _card(looks: tuple[Look, ...], place: int) -> str:
    gpu = looks[-1].gpus[place]
    if gpu.trouble:
        rows = f"<tr><td>no figures: {escape(gpu.trouble)}</td></tr>"
    else:
        heads = ("figure", "now", f"the last {SPAN:.0f} s", "up to")
        head = "".join(f'<th scope="col">{text}</th>' for text in heads)
        rows = f"<thead><tr>{head}</tr></thead><tbody>{''.join(_row(looks, place, gauge) for gauge in GAUGES)}</tbody>"
    size = "" if gpu.total is None else f", {units.byte_text(gpu.total)}"
    return f"<table><caption>GPU {gpu.index}: {escape(gpu.name)}{size}</caption>{rows}</table>"


def _row(looks: tuple[Look, ...], place: int, gauge: Gauge) -> str:
    gpu = looks[-1].gpus[place]
    head = f'<th scope="row">{gauge.name}</th>'
    now = gauge.now(gpu)
    if now is None:
        return f'<tr>{head}<td colspan="3">{"not modelled" if gpu.virtual else "not offered by this GPU"}</td></tr>'
    values = [(look.seconds - looks[-1].seconds, gauge.now(look.gpus[place])) for look in looks]
    known = [value for _, value in values if value is not None]
    top = gauge.top(gpu, max(known)) or 1.0
    words = f"{gauge.name} of GPU {gpu.index}: {gauge.text(min(known))} to {gauge.text(max(known))} in the last {SPAN:.0f} s"
    cells = "".join(f"<td>{cell}</td>" for cell in (gauge.text(now), _curve(values, top, words), gauge.text(top)))
    return f"<tr>{head}{cells}</tr>"


def _curve(values: list[tuple[float, float | None]], top: float, words: str) -> str:
    """The values over time (seconds before now, so negative) as a line between 0 and `top`."""
    lines = "".join(f'<polyline points="{" ".join(f"{x},{y}" for x, y in line)}"/>' for line in _lines(values, top))
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 -1 {WIDTH} {HEIGHT}"'
    return f'<svg {size} role="img" aria-label="{escape(words)}">{lines}</svg>'


def _lines(values: list[tuple[float, float | None]], top: float) -> Iterator[list[tuple[int, int]]]:
    """The points of each unbroken line, in pixels. Of a level stretch only the ends are kept, so that what rests is not sent again."""
    line: list[tuple[int, int]] = []
    before = 0.0
    for seconds, value in values:
        if value is None or (line and seconds - before > GAP):
            if line:
                yield line
            line = []
        before = seconds
        if value is None or seconds < -SPAN:
            continue
        point = round((1 + seconds / SPAN) * WIDTH), round((1 - min(value / top, 1.0)) * (HEIGHT - 2))
        if len(line) > 1 and line[-1][1] == line[-2][1] == point[1]:
            line.pop()
        line.append(point)
    if line:
        yield line
