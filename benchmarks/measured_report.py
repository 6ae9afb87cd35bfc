"""Page that compares what a machine's GPUs measured with virtual GPUs.

`python benchmarks/measure.py --report` writes it.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from benchmarks import conclusions
from labkit import machine
from labkit.labs import Result, Run, collect, recorded_result
from virtualgpu import profiles

LESSONS = Path(__file__).resolve().parents[1] / "notebooks"
CELL_SECONDS = 120
COMPARED = ("seconds", "bytes")  # units of the columns whose figures are compared
TOLD = 90  # characters of an error
NOT_VIRTUAL = {  # experiments, and why only real GPUs can do them
    "ddp_beside_data_parallel": "its ranks are timed on real GPUs",
    "ddp_seconds": "its ranks are timed on real GPUs",
}


@dataclass(frozen=True)
class Outcome:
    """The run of a lesson: its code cells, errors, seconds, and the lines of `labkit.use`."""

    lesson: str
    cells: int
    failed: list[str]
    seconds: float
    banners: list[str]


def lessons() -> list[Path]:
    return sorted(LESSONS.glob("[0-9][0-9]_*.ipynb"))


def code_cells(path: Path) -> int:
    return sum(
        cell["cell_type"] == "code"
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]
    )


def run_lesson(path: Path) -> Outcome:
    """Run all cells of a lesson, on real GPUs if there are enough of them.

    A cell that fails does not stop the others. Raises ImportError without nbclient, which
    JupyterLab installs.
    """
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellControlSignal, DeadKernelError

    notebook = nbformat.read(path, as_version=4)
    start = perf_counter()
    client = NotebookClient(
        notebook,
        kernel_name="python3",
        timeout=CELL_SECONDS,
        allow_errors=True,
        resources={"metadata": {"path": str(path.parent)}},
    )
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    ended = []
    try:
        client.execute()
    except (
        CellControlSignal,
        DeadKernelError,
    ) as error:  # a cell took too long, or took the kernel with it
        ended.append(f"the lesson ended: {type(error).__name__}")
    said = "".join(
        output.text for cell in cells for output in cell.outputs if output.output_type == "stream"
    )
    banners = [
        line.removeprefix("labkit: ") for line in said.splitlines() if line.startswith("labkit: ")
    ]
    return Outcome(
        path.stem,
        len(cells),
        [*_failures(cells), *ended],
        perf_counter() - start,
        list(dict.fromkeys(banners)),
    )


def _failures(cells: Iterable[Any]) -> Iterator[str]:
    for cell in cells:
        if "raises-exception" not in cell.metadata.get("tags", []):
            for output in cell.outputs:
                if output.output_type == "error":
                    yield f"cell {cell.id}: {output.ename}: {output.evalue}"[:TOLD].splitlines()[0]


@dataclass(frozen=True)
class Pair:
    """An experiment's results on real and on virtual GPUs of one model, or why there are none."""

    experiment: str
    gpus: int
    measured: Result | str
    virtual: Result | str


def virtually(experiment: str, function: Callable[[], Run], gpus: int, model: str) -> Result | str:
    """Return the experiment's result on this many virtual GPUs of a model.

    If virtual GPUs cannot run it, return the reason as text.
    """
    if experiment in NOT_VIRTUAL:
        return NOT_VIRTUAL[experiment]
    try:
        profiles.load(model)
    except ValueError:
        return "no profile of this GPU"
    with machine.use(gpus, like=model, virtual=True, quiet=True):
        collect(function())  # as on real GPUs, the second of two runs counts
        return collect(function())


def kind(origin: dict[str, Any]) -> dict[str, Any]:
    """Return the part of an origin that recordings on other numbers of the same GPUs share."""
    return {part: what for part, what in origin.items() if part not in ("machine", "program")}


class Report:
    """Folder with the measurements of one machine: a recording per experiment, and `file`.

    A recording of the same machine and day that is part of the kit is not stored again. `origin`
    says which machine, versions and day. `failures` has the error of each failed experiment. `file`
    has everything else.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        kept = {}
        if file.exists():
            kept = json.loads(file.read_text(encoding="utf-8"))
        self.origin: dict[str, Any] = kept.get("origin", {})
        self.failures: dict[str, str] = kept.get("failures", {})
        self.outcomes = [Outcome(**outcome) for outcome in kept.get("lessons", [])]

    def save(self) -> None:
        kept = {
            "origin": self.origin,
            "failures": self.failures,
            "lessons": [asdict(outcome) for outcome in self.outcomes],
        }
        self.file.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")

    def recording(self, experiment: str) -> Result | None:
        model = self.file.stem.split("_")[1]
        file = self.file.parent / f"{experiment}_{model}.json"
        if file.exists():
            return Result.from_json(file.read_text(encoding="utf-8"))
        shipped = recorded_result(experiment, model)
        if shipped is not None and kind(shipped.origin) == kind(self.origin):
            return shipped
        return None

    def _measured(self, experiment: str, gpus: int) -> Result | str:
        """Return the recording of an experiment on this many GPUs, or why there is none."""
        if gpus > int(self.origin["machine"].rpartition("x ")[0] or 1):
            return f"needs {gpus} GPUs"
        if experiment in self.failures:
            return f"failed: {self.failures[experiment]}"
        return self.recording(experiment) or "not measured"

    def write_page(self, experiments: Mapping[str, tuple[Callable[[], Run], int]]) -> Path:
        """Write the page about the experiments and lessons, and return its file.

        An experiment is a function and the number of GPUs that it needs.
        """
        origin = self.origin
        model = origin["machine"].rpartition("x ")[2]
        pairs = []
        for name, (function, gpus) in experiments.items():
            measured = self._measured(name, gpus)
            pairs.append(
                Pair(
                    name,
                    gpus,
                    measured,
                    "" if isinstance(measured, str) else virtually(name, function, gpus, model),
                )
            )
        versions = (
            f"{origin['date']}, torch {origin['torch']}, CUDA {origin['cuda']}, "
            f"driver {origin['driver']}, {origin['cores']} cores"
        )
        now = {path.stem: code_cells(path) for path in lessons()}
        run = [outcome for outcome in self.outcomes if outcome.cells == now.get(outcome.lesson)]
        left = sorted(set(now) - {outcome.lesson for outcome in run})
        file = self.file.with_suffix(".md")
        file.write_text(
            page(f"Measured on {origin['machine']}", versions, pairs, run, left), encoding="utf-8"
        )
        return file


def ratios(measured: Result, virtual: Result) -> dict[str, tuple[float, float, float]]:
    """Return median, minimum and maximum of virtual ÷ measured, by column of seconds or bytes.

    The dictionary is empty if the results have different rows.
    """
    varied = next(iter(measured.columns))
    if measured.column(varied) != virtual.column(varied):
        return {}
    found = {}
    for name, unit in measured.columns.items():
        if unit in COMPARED and name != varied:
            pairs = zip(virtual.column(name), measured.column(name), strict=True)
            if shares := [model / real for model, real in pairs if real]:
                found[name] = median(shares), min(shares), max(shares)
    return found


def page(
    title: str,
    versions: str,
    pairs: Iterable[Pair],
    outcomes: Iterable[Outcome],
    left: Iterable[str] = (),
) -> str:
    """Return the report as Markdown. `left` are the lessons that were not run."""
    pairs = list(pairs)
    lines = [
        f"# {title}",
        "",
        f"{versions}. Made by `python benchmarks/measure.py --report`.",
        "",
        "## What the experiments show",
        "",
        "| experiment | GPUs | conclusion | measured | virtual |",
        "|---|---|---|---|---|",
        *(line for pair in pairs for line in _conclusions(pair)),
        "",
        "## Their figures: virtual ÷ measured",
        "",
        "Ratios of seconds depend on the host, too. If launches or the CPU limit the time, as with "
        "small tensors,",
        "the ratio compares two hosts. It is well below 1 if the recorded host was slower than the "
        "modelled one.",
        "",
        "| experiment | figure | rows | median | least | most |",
        "|---|---|---|---|---|---|",
        *(line for pair in pairs for line in _figures(pair)),
    ]
    if outcomes := list(outcomes):
        lines += [
            "",
            "## The lessons",
            "",
            "| lesson | cells | failed | seconds | ran on |",
            "|---|---|---|---|---|",
        ]
        lines += [
            _row(
                x.lesson,
                x.cells,
                "<br>".join(x.failed) or "none",
                f"{x.seconds:.0f}",
                "<br>".join(x.banners),
            )
            for x in outcomes
        ]
        lines += [_row(lesson, "", "*not run as it is now*", "", "") for lesson in left]
    return "\n".join(lines) + "\n"


def _conclusions(pair: Pair) -> Iterator[str]:
    if isinstance(pair.measured, str):
        yield _row(pair.experiment, pair.gpus, f"*{pair.measured}*", "", "")
        return
    said = pair.virtual if isinstance(pair.virtual, str) else conclusions.drawn(pair.virtual)
    for sentence, true in conclusions.drawn(pair.measured).items():
        virtual = said if isinstance(said, str) else _said(said[sentence])
        differs = not isinstance(said, str) and said[sentence] != true
        yield _row(
            pair.experiment,
            pair.gpus,
            sentence,
            _said(true),
            f"**{virtual}**" if differs else virtual,
        )


def _said(true: bool) -> str:
    if true:
        return "yes"
    return "no"


def _figures(pair: Pair) -> Iterator[str]:
    if not isinstance(pair.measured, str) and not isinstance(pair.virtual, str):
        for name, shares in ratios(pair.measured, pair.virtual).items():
            yield _row(
                pair.experiment,
                name,
                len(pair.measured.rows),
                *(f"{share:.2f}" for share in shares),
            )


def _row(*cells: Any) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"
