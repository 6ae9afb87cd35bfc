"""What this machine has, what the kit will run on, and what to do about anything missing: `python -m labkit doctor`."""

import os
import platform
import re
import sys
import warnings
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from gputrace.tables import aligned
from labkit import nvidia
from labkit.machine import virtual_by_default
from virtualgpu.host_memory import host_memory

GIB = 1 << 30
PYTHON = (3, 11)
# The least version of each package that the lessons use; "" where any will do. A test holds this to pyproject.toml.
LESSONS_NEED = {
    "torch": "2.10",
    "numpy": "",
    "ipywidgets": "7.7.1",
    "matplotlib": "",
    "nvidia-ml-py": "",
    "GPUtil": "",
    "filelock": "",
    "psutil": "",
    "cloudpickle": "",
    "jinja2": "",
    "jupyterlab": "4.2",
}
TESTS_NEED = ("nbval", "pytest", "hypothesis", "ruff")
OTHER_FRONT_ENDS = ("notebook", "google-colab")  # they open a lesson as well as JupyterLab
COMFORT = 2 * GIB  # bytes: a kernel takes up to 1 GiB, JupyterLab and a browser need the rest


@dataclass(frozen=True)
class Torch:
    """PyTorch as this process sees it. `cuda` is the CUDA version that it was built for, "" in a CPU build."""

    version: str
    cuda: str
    gpus: tuple[str, ...] = ()
    trouble: str = ""


@dataclass(frozen=True)
class Facts:
    """All that the advice depends on."""

    system: str
    python: tuple[int, ...]
    memory: int  # bytes that this process may use: the machine's, or its container's limit
    available: int  # bytes of it that are free now
    limited: bool  # a container's limit holds
    torch: Torch | None  # None: not importable
    nvml: nvidia.Answer
    packages: dict[str, str | None]  # installed versions
    pins: dict[str, str] = field(default_factory=dict)
    visible: str | None = None  # CUDA_VISIBLE_DEVICES
    virtual: bool = False  # LABKIT_VIRTUAL
    clone: bool = True  # the kit runs from its repository, whose Makefile installs packages


@dataclass(frozen=True)
class Advice:
    """One thing to do; `blocking` where a lesson could not run without."""

    text: str
    blocking: bool = False


def main() -> int:
    """Print the report; 1 if a lesson could not run here, else 0."""
    facts = gather()
    advice = advise(facts)
    print(report(facts, advice))
    return int(any(item.blocking for item in advice))


# What there is


def gather() -> Facts:
    try:
        memory, available, limited = host_memory()
    except ImportError:  # psutil is missing: the table of packages says so
        memory, available, limited = 0, 0, False
    return Facts(
        system=f"{platform.system()} {platform.release()}, {platform.machine()}, {os.cpu_count()} cores",
        python=sys.version_info[:3],
        memory=memory,
        available=available,
        limited=limited,
        torch=ask_torch(),
        nvml=nvidia.ask_nvml(),
        packages={name: installed(name) for name in (*LESSONS_NEED, *OTHER_FRONT_ENDS, "ipykernel", *TESTS_NEED)},
        pins=pinned_versions(),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        virtual=virtual_by_default(),
        clone=(Path(__file__).parents[1] / "Makefile").is_file(),
    )


def installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def pinned_versions() -> dict[str, str]:
    """The versions that the tests ran with, by lower-case name: their list lies in an installed package, or beside it in a clone."""
    found = next(filter(Path.exists, (folder / "constraints.txt" for folder in Path(__file__).parents[:2])), None)
    pins = re.findall(r"^([\w.-]+)==([\w.]+)", found.read_text(encoding="utf-8"), re.MULTILINE) if found else []
    return {name.lower(): version for name, version in pins}


def ask_torch() -> Torch | None:
    """PyTorch's own view of the GPUs; what it warns of while it looks is its trouble."""
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


# What to do


def advise(facts: Facts) -> list[Advice]:
    return [*_about_python(facts), *_about_packages(facts), *_about_gpus(facts), *_about_memory(facts)]


REINSTALL_TORCH = "`pip install --force-reinstall torch`"
ANEW = "`make clean`, then `make lab`"  # install everything again, in a clone of the repository


def _about_python(facts: Facts) -> list[Advice]:
    if facts.python >= PYTHON:
        return []
    then = f"run {ANEW}" if facts.clone else "install the kit there"
    return [Advice(f"Python 3.11 or newer is needed: install one and {then}.", blocking=True)]


def _about_packages(facts: Facts) -> list[Advice]:
    advice = []
    for name, least in LESSONS_NEED.items():
        version = facts.packages.get(name)
        if version is None:
            advice += _about_missing(facts, name, least)
        elif older(version, least):
            how = ANEW if facts.clone else _pip(name, least)
            advice.append(Advice(f"{name} {version} is too old: {least} or newer is needed. {how}.", True))
    missing = [name for name in TESTS_NEED if not facts.packages.get(name)]
    if missing and facts.clone:
        advice.append(Advice(f"To run `make test` you also need {', '.join(missing)}; `make test` installs them. Lessons run without."))
    if facts.torch is None and facts.packages.get("torch"):
        how = ANEW if facts.clone else REINSTALL_TORCH
        advice.append(Advice(f"PyTorch is installed but cannot be imported: {how}.", True))
    return advice


def _about_missing(facts: Facts, name: str, least: str) -> list[Advice]:
    how = f"`make lab` installs it (elsewhere: {_pip(name, least)})" if facts.clone else _pip(name, least)
    if name != "jupyterlab":
        return [Advice(f"{name} is missing: {how}.", True)]
    if any(facts.packages.get(other) for other in OTHER_FRONT_ENDS):
        return []
    if facts.packages.get("ipykernel"):
        return [Advice(f"{name} is missing: {how}. An editor that opens notebooks itself does without.")]
    return [Advice(f"{name} is missing: {how}.", True)]


def _pip(name: str, least: str) -> str:
    """The command that installs a package, or a newer version of it."""
    return f"`pip install --upgrade '{name}>={least}'`" if least else f"`pip install {name}`"


def older(version: str, least: str) -> bool:
    """Whether the release `version` comes before `least`; local parts such as +cpu do not count."""

    def numbers(text: str) -> tuple[int, ...]:
        return tuple(int(number) for number in re.findall(r"\d+", text.split("+")[0])[:3])

    return numbers(version) < numbers(least)


def _about_gpus(facts: Facts) -> list[Advice]:
    torch, nvml = facts.torch, facts.nvml
    if torch is None:
        return []
    advice = [Advice(torch.trouble + ".", blocking=not torch.version)] if torch.trouble else []
    if not nvml.gpus or torch.gpus:
        return advice
    if not torch.cuda:
        how = f"{ANEW} without TORCH_INDEX" if facts.clone else REINSTALL_TORCH
        advice.append(Advice(f"There is an NVIDIA GPU, but this PyTorch is built without CUDA: {how}."))
    elif facts.visible is not None:
        advice.append(Advice(f"There is an NVIDIA GPU, but CUDA_VISIBLE_DEVICES={facts.visible!r} hides it: unset it to use the GPU."))
    else:
        driver = nvml.gpus[0].driver
        advice.append(
            Advice(f"There is an NVIDIA GPU, but PyTorch for CUDA {torch.cuda} cannot use it with driver {driver}: update the driver.")
        )
    return advice


def _about_memory(facts: Facts) -> list[Advice]:
    if not 0 < facts.available < COMFORT:
        return []
    return [Advice(f"Only {facts.available / GIB:.1f} GiB of memory are free: close other programs or notebooks if a kernel dies.")]


# The report


def report(facts: Facts, advice: list[Advice]) -> str:
    sections = {
        "This machine": _machine_rows(facts),
        "GPUs": _gpu_rows(facts),
        "Packages (installed, tested with)": _package_rows(facts),
        "The kit will run on": [runs_on(facts)],
        "What to do": [("! " if item.blocking else "- ") + item.text for item in advice] or ["Nothing: every lesson can run here."],
    }
    return "\n\n".join("\n".join([title, *(f"  {row}" for row in rows)]) for title, rows in sections.items())


def runs_on(facts: Facts) -> str:
    """In one sentence, what `labkit.use()` will take. The figures name it again in their badges."""
    if facts.torch is None or not facts.torch.version:
        return "nothing yet: PyTorch is missing or does not load (see below)"
    count = len(facts.torch.gpus)
    if count and not facts.virtual:
        return f"{count} × {facts.torch.gpus[0]}; lessons that ask for more GPUs than {count} run on virtual ones"
    return "virtual GPUs, modelled on NVIDIA T4, on this machine's CPU" + (" (LABKIT_VIRTUAL is set)" if count else "")


def _machine_rows(facts: Facts) -> list[str]:
    memory = (
        f"{facts.memory / GIB:.1f} GiB{' (the limit of this container)' if facts.limited else ''}, {facts.available / GIB:.1f} GiB free"
    )
    torch = facts.torch
    if torch is None or not torch.version:
        build = "does not load" if torch else "not installed"
    else:
        build = f"{torch.version}, built {f'for CUDA {torch.cuda}' if torch.cuda else 'without CUDA'}"
    rows = {
        "system": facts.system,
        "Python": ".".join(map(str, facts.python)),
        "memory": memory if facts.memory else "unknown",
        "PyTorch": build,
    }
    if facts.visible is not None:
        rows["CUDA_VISIBLE_DEVICES"] = repr(facts.visible)
    return aligned(list(rows.items()))


def _gpu_rows(facts: Facts) -> list[str]:
    rows: list[tuple[str, ...]] = [("NVML", _describe(gpu)) for gpu in facts.nvml.gpus]
    if not rows:
        rows = [("NVML", facts.nvml.trouble or "no GPU")]
    names = facts.torch.gpus if facts.torch else ()
    rows += [("PyTorch", f"{index}: {name}") for index, name in enumerate(names)] or [("PyTorch", "no GPU")]
    return aligned(rows)


def _describe(gpu: nvidia.GPUReading) -> str:
    memory = "memory unknown" if gpu.memory is None else f"{gpu.memory / GIB:.1f} GiB"
    used = "" if gpu.used is None else f", {gpu.used / GIB:.1f} GiB used"
    busy = "" if gpu.utilization is None else f", {gpu.utilization:.0%} busy"
    capability = "" if gpu.capability is None else ", compute capability {}.{}".format(*gpu.capability)
    return f"{gpu.index}: {gpu.name}, {memory}{used}{busy}, driver {gpu.driver}{capability}"


def _package_rows(facts: Facts) -> list[str]:
    names = [name for name in (*LESSONS_NEED, *TESTS_NEED)]
    return aligned([(name, facts.packages.get(name) or "missing", facts.pins.get(name.lower(), "")) for name in names])
