"""A report on this machine, which `python -m labkit doctor` prints.

It says what the machine has, what the kit will run on, and what to do about anything missing.
"""

import os
import platform
import re
import warnings
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from gputrace.tables import aligned
from labkit import nvidia
from labkit.machine import virtual_by_default
from virtualgpu.host_memory import host_memory

GIB = 1 << 30
# The oldest version that works of each package that the lessons use, "" for any version. A test
# compares this table with pyproject.toml.
LESSONS_NEED = {
    "torch": "2.10",
    "numpy": "",
    "ipywidgets": "7.7.1",
    "matplotlib": "",
    "nvidia-ml-py": "11.515",
    "GPUtil": "",
    "filelock": "",
    "psutil": "",
    "cloudpickle": "",
    "jinja2": "",
    "jupyterlab": "4.2",
}
# Bytes of free memory that are enough. A kernel takes up to 1 GiB, and JupyterLab and a browser
# need the rest.
COMFORT = 2 * GIB


@dataclass(frozen=True)
class Torch:
    """The installed PyTorch.

    Attributes:
        version: its version, "" if PyTorch does not load.
        cuda: the CUDA version that it was built for, "" if it was built without CUDA.
        gpus: the names of the GPUs that it can use.
        trouble: an error or a warning of PyTorch, without a full stop, "" if there is none.
    """

    version: str
    cuda: str
    gpus: tuple[str, ...] = ()
    trouble: str = ""


@dataclass(frozen=True)
class Facts:
    """All facts that the advice depends on.

    Attributes:
        system: the operating system, the processor and the number of cores, as text.
        python: the version of Python, as text.
        memory: how many bytes this process may use. The limit of a container counts.
        available: how many of these bytes are free now.
        limited: whether `memory` is the limit of a container.
        torch: the installed PyTorch, or None if it cannot be imported.
        nvml: what NVIDIA's driver reports.
        packages: the installed version of each package that the lessons use, None for missing ones.
        pins: the versions that the tests ran with, by lower-case name.
        visible: the environment variable CUDA_VISIBLE_DEVICES.
        virtual: whether the environment variable LABKIT_VIRTUAL asks for virtual GPUs.
        clone: whether the kit runs from its repository, whose Makefile installs packages.
    """

    system: str
    python: str
    memory: int
    available: int
    limited: bool
    torch: Torch | None
    nvml: nvidia.Answer
    packages: dict[str, str | None]
    pins: dict[str, str] = field(default_factory=dict)
    visible: str | None = None
    virtual: bool = False
    clone: bool = True


@dataclass(frozen=True)
class Advice:
    """A sentence about something to do. It is `blocking` if a lesson cannot run without it."""

    text: str
    blocking: bool = False


def main() -> int:
    """Print the report. Return 1 if a lesson could not run here, else 0."""
    facts = gather()
    advice = advise(facts)
    print(report(facts, advice))
    return int(any(item.blocking for item in advice))


# The facts


def gather() -> Facts:
    """Return the facts about this machine."""
    try:
        memory, available, limited = host_memory()
    except ImportError:  # psutil is missing: the table of packages says so
        memory, available, limited = 0, 0, False
    cores = os.cpu_count()
    return Facts(
        system=f"{platform.system()} {platform.release()}, {platform.machine()}, {cores} cores",
        python=platform.python_version(),
        memory=memory,
        available=available,
        limited=limited,
        torch=ask_torch(),
        nvml=nvidia.ask_nvml(),
        packages={name: installed(name) for name in LESSONS_NEED},
        pins=pinned_versions(),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        virtual=virtual_by_default(),
        clone=(Path(__file__).parents[1] / "Makefile").is_file(),
    )


def installed(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def pinned_versions() -> dict[str, str]:
    """Return the versions that the tests ran with, by lower-case name.

    The file is in an installed package, or beside the package in a clone.
    """
    for folder in Path(__file__).parents[:2]:
        if (folder / "constraints.txt").exists():
            text = (folder / "constraints.txt").read_text(encoding="utf-8")
            pins = re.findall(r"^([\w.-]+)==([\w.]+)", text, re.MULTILINE)
            return {name.lower(): version for name, version in pins}
    return {}


def ask_torch() -> Torch | None:
    """Return what PyTorch reports about itself and the GPUs, or None if it is not installed.

    The first warning that PyTorch shows becomes its `trouble`.
    """
    try:
        import torch
    except ImportError:
        return None
    except OSError as error:  # a shared library of the package is missing or for another system
        return Torch("", "", trouble=f"PyTorch is installed but does not load: {error}")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        devices = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
        gpus = tuple(torch.cuda.get_device_name(device) for device in devices)
    trouble = " ".join(str(caught[0].message).split()) if caught else ""
    return Torch(torch.__version__, torch.version.cuda or "", gpus, trouble.rstrip("."))


# The advice


def advise(facts: Facts) -> list[Advice]:
    """Return advice on what to do about these facts, the most important first."""
    advice = _about_packages(facts)
    if facts.torch is not None:
        advice += _about_gpus(facts, facts.torch)
    if 0 < facts.available < COMFORT:
        free = f"Only {facts.available / GIB:.1f} GiB of memory are free"
        advice.append(Advice(f"{free}: close other programs or notebooks if a kernel dies."))
    return advice


def _remedy(facts: Facts, package: str, least: str = "") -> str:
    """Return how to install a package, or to update it to the version `least`."""
    if facts.clone:
        return "run `make clean`, then `make lab`"
    if least:
        package = f"{package}>={least}"
    return f"run `pip install --upgrade '{package}'`"


def _about_packages(facts: Facts) -> list[Advice]:
    """Return advice about packages that are missing or too old."""
    advice = []
    for name, least in LESSONS_NEED.items():
        version = facts.packages.get(name)
        how = _remedy(facts, name, least)
        if version is None and name == "jupyterlab":
            advice.append(Advice(f"{name} is missing: {how}, or use another front end."))
        elif version is None:
            advice.append(Advice(f"{name} is missing: {how}.", blocking=True))
        elif older(version, least):
            text = f"{name} {version} is too old, because the lessons need {least}: {how}."
            advice.append(Advice(text, blocking=True))
    if facts.torch is None and facts.packages.get("torch"):
        how = _remedy(facts, "torch")
        advice.append(Advice(f"PyTorch is installed but cannot be imported: {how}.", blocking=True))
    return advice


def older(version: str, least: str) -> bool:
    """Return whether a version is older than `least`. Local parts such as +cpu do not count."""

    def numbers(text: str) -> tuple[int, ...]:
        return tuple(int(number) for number in re.findall(r"\d+", text.split("+")[0])[:3])

    return numbers(version) < numbers(least)


def _about_gpus(facts: Facts, torch: Torch) -> list[Advice]:
    """Return advice about a GPU that PyTorch cannot use."""
    advice = []
    if torch.trouble:
        advice.append(Advice(f"{torch.trouble}.", blocking=not torch.version))
    if torch.gpus or not facts.nvml.gpus:
        return advice
    if not torch.cuda:
        why = "but this PyTorch is built without CUDA"
        how = f"{_remedy(facts, 'torch')}, without TORCH_INDEX"
    elif facts.visible is not None:
        why = f"but CUDA_VISIBLE_DEVICES={facts.visible!r} hides it"
        how = "unset it to use the GPU"
    else:
        driver = facts.nvml.driver
        why = f"but PyTorch for CUDA {torch.cuda} cannot use it with driver {driver}"
        how = "update the driver"
    return [*advice, Advice(f"There is an NVIDIA GPU, {why}: {how}.")]


# The report


def report(facts: Facts, advice: list[Advice]) -> str:
    """Return the whole report as text: the facts about this machine, and the advice."""
    to_do = [f"{'!' if item.blocking else '-'} {item.text}" for item in advice]
    sections = {
        "This machine": _machine_rows(facts),
        "GPUs": _gpu_rows(facts),
        "Packages (installed, tested with)": _package_rows(facts),
        "The kit will run on": [runs_on(facts)],
        "What to do": to_do or ["Nothing: every lesson can run here."],
    }
    texts = ["\n  ".join([title, *rows]) for title, rows in sections.items()]
    return "\n\n".join(texts)


def runs_on(facts: Facts) -> str:
    """Return which GPUs `labkit.use()` will give on this machine, in words.

    The badges of figures also name them.
    """
    if facts.torch is None or not facts.torch.version:
        return "nothing yet: PyTorch is missing or does not load (see below)"
    gpus = facts.torch.gpus
    if gpus and not facts.virtual:
        more = f"lessons that ask for more GPUs than {len(gpus)} run on virtual ones"
        return f"{len(gpus)} × {gpus[0]}; {more}"
    why = " (LABKIT_VIRTUAL is set)" if gpus else ""
    return f"virtual GPUs, modelled on NVIDIA T4, on this machine's CPU{why}"


def _machine_rows(facts: Facts) -> list[str]:
    memory = "unknown"
    if facts.memory:
        limit = " (the limit of this container)" if facts.limited else ""
        free = f"{facts.available / GIB:.1f} GiB free"
        memory = f"{facts.memory / GIB:.1f} GiB{limit}, {free}"
    build = "not installed"
    if facts.torch is not None and facts.torch.version:
        cuda = f"for CUDA {facts.torch.cuda}" if facts.torch.cuda else "without CUDA"
        build = f"{facts.torch.version}, built {cuda}"
    elif facts.torch is not None:
        build = "does not load"
    rows = {
        "system": facts.system,
        "Python": facts.python,
        "memory": memory,
        "PyTorch": build,
    }
    if facts.visible is not None:
        rows["CUDA_VISIBLE_DEVICES"] = repr(facts.visible)
    return aligned(list(rows.items()))


def _gpu_rows(facts: Facts) -> list[str]:
    nvml = [f"{name}, driver {facts.nvml.driver}" for name in facts.nvml.gpus]
    torch = facts.torch.gpus if facts.torch else ()
    rows = [("NVML", name) for name in nvml or [facts.nvml.trouble or "no GPU"]]
    rows += [("PyTorch", name) for name in torch or ["no GPU"]]
    return aligned(rows)


def _package_rows(facts: Facts) -> list[str]:
    rows = []
    for name in LESSONS_NEED:
        version = facts.packages.get(name) or "missing"
        rows.append((name, version, facts.pins.get(name.lower(), "")))
    return aligned(rows)
