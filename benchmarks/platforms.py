"""Write the time and memory of each lesson on each platform's stand-in into docs/platforms.md.

    python benchmarks/platforms.py            write the table from benchmarks/platforms/
    python benchmarks/platforms.py --run      run every lesson here first, as after `make lab`

The figures of Binder and Colab come from `LABKIT_FIGURES=1 make test-binder SIZE=--everything` and
`LABKIT_FIGURES=1 make test-classic SIZE=--everything`.
"""

import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "benchmarks" / "platforms"
PAGE = ROOT / "docs" / "platforms.md"
MARKS = ("<!-- figures -->\n", "<!-- end of figures -->\n")  # around what is written
ORDER = ("here", "binder", "colab")
PACKAGES = ("torch", "ipywidgets", "ipykernel")
VERSIONS = (
    "import platform; from importlib.metadata import version; "
    "print(', '.join(['Python ' + platform.python_version(), "
    "*(name + ' ' + version(name) for name in {packages})]))"
)


@dataclass
class Figures:
    """Seconds and peak memory of the lessons on one platform. The memory is in bytes.

    `setup_seconds` is the time before the first lesson can be used: until the installing cell has
    run, or from the server's start until the page is open.
    """

    platform: str
    machine: str
    versions: str
    day: str
    lessons: dict[str, tuple[float, int]] = field(default_factory=dict)
    setup_seconds: float | None = None

    @classmethod
    def of_this_machine(
        cls, name: str, python: str = sys.executable, cores: int | None = None
    ) -> "Figures":
        """Return an empty record of this machine, with the versions that `python` has."""
        cores = cores or os.cpu_count() or 1
        versions = subprocess.check_output(
            [python, "-c", VERSIONS.format(packages=PACKAGES)], text=True
        ).strip()
        return cls(
            name,
            f"{cores} core{'s' * (cores > 1)} of {processor()}",
            versions,
            date.today().isoformat(),
        )

    def store_if_asked(self, name: str) -> None:
        """Write the figures to `benchmarks/platforms/NAME.json` if LABKIT_FIGURES is set.

        Figures of other lessons are kept if their versions, machine and day are the same.
        """
        if not os.environ.get("LABKIT_FIGURES") or not self.lessons:
            return
        FOLDER.mkdir(exist_ok=True)
        file = FOLDER / f"{name}.json"
        told = asdict(self)
        if file.is_file():
            earlier = json.loads(file.read_text())
            if all(
                earlier[what] == told[what] for what in ("platform", "machine", "versions", "day")
            ):
                told["lessons"] = earlier["lessons"] | told["lessons"]
                told["setup_seconds"] = told["setup_seconds"] or earlier["setup_seconds"]
        file.write_text(json.dumps(told, indent=1, sort_keys=True) + "\n")


def processor() -> str:
    """Return the operating system's name for this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )


def stored(folder: Path = FOLDER) -> list[Figures]:
    """Read the figures of each platform that has some, in the order of the table."""
    files = [folder / f"{name}.json" for name in ORDER]
    return [Figures(**json.loads(file.read_text())) for file in files if file.is_file()]


def table(all_figures: list[Figures]) -> str:
    """Return the table as Markdown, followed by the machine behind each platform's figures."""
    lessons = sorted({lesson for figures in all_figures for lesson in figures.lessons})
    head = [
        "lesson",
        *(f"{figures.platform}: {what}" for figures in all_figures for what in ("time", "memory")),
    ]
    rows = [head, ["---", *("---:" for _ in head[1:])]]
    for lesson in lessons:
        rows.append(
            [
                lesson,
                *(cell for figures in all_figures for cell in _cells(figures.lessons.get(lesson))),
            ]
        )
    rows.append(
        [
            "before the first lesson",
            *(cell for figures in all_figures for cell in (_seconds(figures.setup_seconds), "")),
        ]
    )
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return (
        "\n".join(
            [
                *lines,
                "",
                *(f"- **{f.platform}**: {f.day}, {f.machine}; {f.versions}." for f in all_figures),
            ]
        )
        + "\n"
    )


def _cells(figures: tuple[float, int] | None) -> tuple[str, str]:
    if figures is None:
        return ("", "")
    return (_seconds(figures[0]), f"{figures[1] / (1 << 20):.0f} MiB")


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds:.0f} s"


def written(page: str, all_figures: list[Figures]) -> str:
    """Insert the table into the page and return it.

    Raises ValueError if the page has no place for it.
    """
    before, begin, rest = page.partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not begin or not end:
        raise ValueError(
            f"docs/platforms.md needs the lines {MARKS[0].strip()} and {MARKS[1].strip()}"
        )
    return f"{before}{begin}\n{table(all_figures)}\n{end}{after}"


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--run"]):
        print(f"{' '.join(arguments)}: choose --run, or nothing", file=sys.stderr)
        return 2
    if arguments:
        from benchmarks import lesson_runs

        os.environ |= {"LABKIT_VIRTUAL": "1", "LABKIT_FIGURES": "1"}
        figures = Figures.of_this_machine("JupyterLab")
        for path in lesson_runs.lessons():
            figures.lessons[path.stem] = lesson_runs.run(path)
        figures.store_if_asked("here")
    PAGE.write_text(written(PAGE.read_text(), stored()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
