"""Record what a lesson's cells measure, on this machine's real GPUs.

    python benchmarks/record.py [--output FOLDER] NOTEBOOK ...
    python benchmarks/record.py --check

The cells of each notebook run in their order, up to the last one that calls `labkit.measure` or
makes a `labkit.Lab`. Each result becomes the file `lesson_NN/recordings/FUNCTION_GPU.json` in the
folder, which has the rows, the GPU, the versions, the date, the grid and the fingerprint of the
code. By default, the folder is the course's own. Jupyter is not needed.

`--check` measures nothing. It names the recordings of another version of their cells, and exits 1
if there are any. A recording exits 2 if nothing can be recorded.
"""

import argparse
import ast
import contextlib
import json
import linecache
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import torch

import labkit
from benchmarks.origin import model, origin, recording
from labkit import courses, machine
from labkit.experiments.fingerprints import fingerprint
from labkit.experiments.result import Result

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
MEASURES = re.compile(r"\blabkit\.(measure|Lab)\(")
# Statements of cells that measure nothing, and that a function may need.
DEFINITIONS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
# The value of a constant may be computed with these names.
BUILTINS = (dict, float, int, len, list, max, min, range, round, set, sorted, sum, tuple)
DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
ALLOWED = {
    **{function.__name__: function for function in BUILTINS},
    "torch": SimpleNamespace(device=torch.device, **DTYPES),
}
NEEDLESS = re.compile(r"\s*labkit\.(check|progress)\(")  # cells that measure nothing


def record(notebook: Path, folder: Path | None = None) -> Iterator[Path]:
    """Run a notebook's cells on real GPUs, and store what they measure. Yield each file.

    Raises RuntimeError if there are too few real GPUs or if the notebook measures nothing, and what
    a cell raises.
    """
    results = _measured(notebook)
    if not results:
        needed = _gpus_asked_for(notebook)
        raise RuntimeError(
            f"{notebook.name} measured nothing on real GPUs. It asks for {needed}, "
            f"and PyTorch sees {machine.real_gpus()}."
        )
    lesson = f"lesson_{notebook.name[:2]}"
    if folder is None:
        folder = courses.lessons()[notebook.name[:2]][1].parent
    for result in results:
        file = folder / lesson / "recordings" / f"{result.name}_{model(result.origin['gpu'])}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(result.to_json(), encoding="utf-8")
        yield file


def outdated() -> list[str]:
    """Return a sentence for each recording that belongs to another version of its cell."""
    found = []
    for number, (_, folder) in courses.lessons().items():
        for file in sorted((folder / "recordings").glob("*.json")):
            result = Result.from_json(file.read_text(encoding="utf-8"))
            if not result.code:  # an experiment of the library
                continue
            codes = {}
            for notebook in sorted(NOTEBOOKS.glob(f"{number}_*.ipynb")):
                codes |= fingerprints(notebook)
            if codes.get(result.name) != result.code:
                found.append(
                    f"{file.name} belongs to another version of {result.name} than lesson {number} "
                    "has. Record it again: python benchmarks/record.py."
                )
    return found


def fingerprints(notebook: Path) -> dict[str, str]:
    """Return the fingerprints of the functions that a notebook's cells define.

    Only imports, definitions and constants run. The last definition of a name counts.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    constants: dict[str, Any] = {"__builtins__": ALLOWED}
    for number, (cell, _) in enumerate(code_cells(notebook)):
        source, filename = listed(notebook, number, cell)
        for statement in ast.parse(source).body:
            is_constant = isinstance(statement, ast.Assign)
            if is_constant and not isinstance(statement.value, ast.Lambda):
                where = constants
            elif is_constant or isinstance(statement, DEFINITIONS):
                where = names
            else:
                continue
            module = ast.Module(body=[statement], type_ignores=[])
            with contextlib.suppress(Exception):  # it needs a statement that did not run
                exec(compile(module, filename, "exec"), where)
        names |= {name: value for name, value in constants.items() if name != "__builtins__"}
    own = [each for each in names.values() if isinstance(each, FunctionType)]
    return {each.__name__: fingerprint(each) for each in own if each.__module__ == "__main__"}


def listed(notebook: Path, number: int, cell: str) -> tuple[str, str]:
    """Return the Python code of a cell, and a file name under which Python finds its lines.

    IPython's magics and shell commands are left out.
    """
    filename = f"<cell {number} of {notebook.name}>"
    lines = cell.splitlines(keepends=True)
    if cell.lstrip().startswith("%%"):
        lines = []
    lines = ["\n" if line.startswith(("%", "!")) else line for line in lines]
    source = "".join(lines)
    linecache.cache[filename] = (len(source), None, lines, filename)
    return source, filename


def code_cells(notebook: Path) -> list[tuple[str, list[str]]]:
    """Return the source and the tags of each code cell."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return [
        ("".join(cell["source"]), cell["metadata"].get("tags", []))
        for cell in cells
        if cell["cell_type"] == "code"
    ]


def _gpus_asked_for(notebook: Path) -> str:
    for cell, _ in code_cells(notebook):
        asked = re.search(r"labkit\.use\((?:gpus=)?(\d+)", cell)
        if asked is not None:
            return asked[1]
    return "1"


# Running the cells


def _measured(notebook: Path) -> list[Result]:
    """Run the cells, and return the recordings, one for each function."""
    program = f"python benchmarks/record.py {notebook.name}"
    found: dict[str, Result] = {}
    measure = labkit.measure

    def measure_and_keep(
        function: Callable[..., Any], grid: Mapping[str, Any], **options: Any
    ) -> Result:
        result = measure(function, grid, **options)
        used = machine.in_use()
        if not used.virtual:
            made = {**origin(used, program), "gpu": used.name}
            kept = found.get(result.name)
            found[result.name] = recording(result if kept is None else joined(kept, result), made)
        return result

    def measure_whole_grid(
        function: Callable[..., Any], grid: Mapping[str, Any], **options: Any
    ) -> None:
        kept = {name: options[name] for name in ("values", "units") if name in options}
        measure_and_keep(function, grid, **kept)

    with _in_place_of(measure=measure_and_keep, Lab=measure_whole_grid):
        try:
            _run(notebook)
        finally:
            labkit.use(None)
    return list(found.values())


def _run(notebook: Path) -> None:
    cells = code_cells(notebook)
    measuring = [number for number, (cell, _) in enumerate(cells) if MEASURES.search(cell)]
    names = {"__name__": "__main__", "display": lambda *shown, **options: None}
    for number, (cell, tags) in enumerate(cells[: max(measuring, default=-1) + 1]):
        source, filename = listed(notebook, number, cell)
        if NEEDLESS.match(source):
            continue
        try:
            exec(compile(source, filename, "exec"), names)
        except Exception:
            if "raises-exception" not in tags:
                raise


@contextlib.contextmanager
def _in_place_of(**replacements: Callable[..., Any]) -> Iterator[None]:
    """Replace these names of `labkit` in the block."""
    for name, replacement in replacements.items():
        setattr(labkit, name, replacement)
    try:
        yield
    finally:
        for name in replacements:
            delattr(labkit, name)


def joined(first: Result, second: Result) -> Result:
    """Return one result with the rows of two measurements of the same function.

    Raises ValueError if they have other columns or other code.
    """
    if first.columns != second.columns or first.code != second.code:
        raise ValueError(
            f"{first.name} is measured twice, with other arguments or other code. Give one of the "
            "functions another name, so that each has a recording of its own."
        )
    rows = {
        tuple(row[name] for name in first.arguments): row for row in [*first.rows, *second.rows]
    }
    parameters = {
        name: list(dict.fromkeys([*first.parameters[name], *second.parameters[name]]))
        for name in first.parameters
    }
    failures = [*first.failures, *second.failures]
    return replace(first, rows=list(rows.values()), parameters=parameters, failures=failures)


def main(arguments: list[str]) -> int:
    """Record the notebooks that the command line names, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks/record.py",
        description="Record what the cells of lessons measure on real GPUs.",
    )
    parser.add_argument(
        "--output", metavar="FOLDER", type=Path, help="where lesson_NN/ is (default: the course)"
    )
    parser.add_argument(
        "--check", action="store_true", help="only name recordings of other versions"
    )
    parser.add_argument("notebooks", nargs="*", metavar="NOTEBOOK", type=Path)
    options = parser.parse_args(arguments)
    if options.check:
        found = outdated()
        print("\n".join(found) or "every recording belongs to its cell")
        if found:
            return 1
        return 0
    if not options.notebooks:
        parser.error("name at least one notebook, or use --check")
    failed = False
    for notebook in options.notebooks:
        try:
            for file in record(notebook, options.output):
                print(f"wrote {file}")
        except (RuntimeError, ValueError) as error:
            print(error, file=sys.stderr)
            failed = True
    if failed:
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
