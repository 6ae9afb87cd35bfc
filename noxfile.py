"""Environments that nox makes in `.nox`, beside `.venv`.

They are those of Binder, Colab, nbgrader, and other versions of torch.

`make test-binder` and its like use them. `nox --list` lists the sessions. A session that exists is
brought up to date, not made again. `nox --session binder --install-only` only makes it.
"""

import json
import os
import re
import shutil
import sys
import tomllib
from pathlib import Path

import nox

ROOT = Path(__file__).parent
PINS = ROOT / "constraints.txt"
CLASSIC_PINS = ROOT / "tools" / "constraints-classic.txt"
PYTHON = os.environ.get("PYTHON")  # the Python that makes the environments
TORCH_INDEX = os.environ.get("TORCH_INDEX", "")
VERSIONS = os.environ.get("VERSIONS", "oldest pinned newest").split()
TESTS = ("tests", "packages")
PARALLEL = ("-n", "auto", "--maxprocesses", "4")
PYTEST = ("python", "-m", "pytest", "-q", "--timeout", "300")
# Run in a session: the names of torch and of what torch needs.
NEEDED_BY_TORCH = """
import json, re
from importlib.metadata import PackageNotFoundError, requires

names = ["torch"]
for name in names:  # the list grows
    try:
        lines = [line for line in requires(name) or () if "extra ==" not in line]
    except PackageNotFoundError:  # needed on another system
        continue
    needed = [re.match(r"[\\w.-]+", line)[0] for line in lines]
    names += [new for new in needed if new not in names]
print(json.dumps(names))
"""
COUNT_GPUS = "import torch; print(torch.cuda.device_count())"
# A notebook prints what is stored only on virtual GPUs and with one thread.
AS_STORED = {"LABKIT_VIRTUAL": "1", "LABKIT_PROGRESS": "", "OMP_NUM_THREADS": "1"}

nox.options.default_venv_backend = "venv"
nox.options.reuse_venv = "yes"
nox.options.sessions = []  # each session takes minutes, so none runs unless it is named


@nox.session(python=PYTHON)
def classic(session: nox.Session) -> None:
    """Make an environment like Colab's, with its packages and the classic notebook 6.5."""
    pins = ("--constraint", str(CLASSIC_PINS))
    session.install(*torch_index(session), *pins, "--editable", ".[test,browser]", "notebook")
    # Colab has no labkit: the first cell of a lesson installs it there.
    kit = "pytorch-gpu-lessons"
    session.run_install("python", "-m", "pip", "uninstall", "--quiet", "--yes", kit)


@nox.session(python=PYTHON)
def nbgrader(session: nox.Session) -> None:
    """Make an environment with nbgrader. As on a hub, its kernels are those of `.venv`."""
    session.install("nbgrader==0.9.6")


@nox.session(python=PYTHON)
def binder(session: nox.Session) -> None:
    """Build what mybinder.org would build: a copy of the repository, and its packages."""
    sys.path.append(str(ROOT))
    from tools import binder_image

    repository = Path(session.virtualenv.location, "repo")
    shutil.rmtree(repository, ignore_errors=True)
    binder_image.copy_tree(repository)
    session.install(*binder_image.base_packages())
    places = {"KERNEL_PYTHON_PREFIX": session.virtualenv.location, "REPO_DIR": str(repository)}
    with session.chdir(repository):
        for command in binder_image.commands(binder_image.dockerfile(repository)):
            session.run_install("bash", "-c", command, env=places, external=True)


@nox.session(python=PYTHON)
@nox.parametrize("version", VERSIONS, ids=VERSIONS)
def versions(session: nox.Session, version: str) -> None:
    """Run the unit tests and the lessons on a version of torch.

    A version is `oldest` (the lower bound in pyproject.toml), `pinned` (constraints.txt), `newest`
    (of the package index) or a number such as 2.11. If torch sees a GPU, the tests run with the
    GPU in sight and with the GPU hidden. The oldest version words some errors in another way, so
    there the lessons only have to run to their ends.
    """
    session.install(*torch_index(session), "--upgrade", requirement(version))
    pins = PINS
    if version != "pinned":
        pins = Path(session.create_tmp(), "constraints.txt")
        pins.write_text(pins_without_torch(session), encoding="utf-8")
    session.install(*torch_index(session), "--constraint", str(pins), "--editable", ".[lab,test]")
    gpus = session.run("python", "-W", "ignore", "-c", COUNT_GPUS, silent=True, stderr=None)
    if str(gpus).strip() == "0":
        session.run(*PYTEST, *PARALLEL, "--everything", *TESTS)
    else:  # tests that need a GPU run one after another, because some measure
        session.run(*PYTEST, "-m", "gpu", "--everything", *TESTS)
        others = ("-m", "not gpu and not browser and not platform")
        session.run(*PYTEST, *PARALLEL, *others, "--everything", *TESTS)
        hidden = {"CUDA_VISIBLE_DEVICES": ""}
        session.run(*PYTEST, *PARALLEL, "--everything", *TESTS, env=hidden)
    compare = "--nbval"
    if version == "oldest":
        compare = "--nbval-lax"
    options = ("--nbval-current-env", "--nbval-cell-timeout=240", "--dist", "loadfile")
    cleaned = "--nbval-sanitize-with=tests/notebooks/sanitize.cfg"
    lessons = (compare, *options, cleaned, *PARALLEL, "notebooks")
    session.run(*PYTEST, *lessons, env=AS_STORED)


@nox.session(python=PYTHON)
def pins(session: nox.Session) -> None:
    """Compile the pins. `nox --session pins -- --upgrade` takes the newest versions."""
    session.install("uv")
    # One file for all systems and Pythons, which pip-tools cannot compile.
    compiled = ("uv", "pip", "compile", "--quiet", "--universal", "--python-version", "3.11")
    own = ("--no-annotate", "--no-emit-package", "pytorch-gpu-lessons")
    project = (*compiled, *own, "pyproject.toml")
    told = {"UV_CUSTOM_COMPILE_COMMAND": "make pins"}
    everything = ("--all-extras", "--output-file", "constraints.txt", *session.posargs)
    session.run(*project, *everything, env=told)
    colab = ("tools/colab.in", "--extra", "test", "--extra", "browser")
    to_file = ("--output-file", "tools/constraints-classic.txt", *session.posargs)
    session.run(*project, *colab, *to_file, env=told)


def torch_index(session: nox.Session) -> list[str]:
    """Return pip's options for the index that PyTorch comes from."""
    command = ("python", "tools/torch_index.py", TORCH_INDEX)
    options = session.run_install(*command, silent=True, stderr=None)
    return str(options).split()


def requirement(version: str) -> str:
    """Return the requirement for pip. Raises ValueError if there is no such version."""
    if version == "oldest":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        lower_bounds = [need for need in project["dependencies"] if need.startswith("torch>=")]
        return lower_bounds[0].replace(">=", "==")
    if version == "pinned":
        pinned = PINS.read_text(encoding="utf-8").splitlines()
        return next(line for line in pinned if line.startswith("torch=="))
    if version == "newest":
        return "torch"
    if re.fullmatch(r"\d+\.\d+", version):
        return f"torch=={version}.*"
    if re.fullmatch(r"\d+\.\d+\.\d+", version):
        return f"torch=={version}"
    raise ValueError(f"no such version: {version}. Allowed: oldest, pinned, newest, or 2.11")


def pins_without_torch(session: nox.Session) -> str:
    """Return the pins without torch and its requirements, because each torch has its own.

    CUDA's packages have requirements that are not listed as torch's, so all of CUDA's packages are
    left out.
    """
    names = session.run_install("python", "-c", NEEDED_BY_TORCH, silent=True)
    needed = {normal(name) for name in json.loads(str(names))}
    kept = []
    for line in PINS.read_text(encoding="utf-8").splitlines():
        name = normal(re.split(r"[=\s]", line)[0])
        if name not in needed and not name.startswith(("cuda-", "nvidia-")):
            kept.append(line)
    return "\n".join(kept)


def normal(name: str) -> str:
    """Return a package's name in the normal form, in which package indexes compare names."""
    return re.sub(r"[-_.]+", "-", name).lower()
