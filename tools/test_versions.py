"""Run the unit tests and the lessons on several versions of torch, each in a virtual environment that is kept.

    python tools/test_versions.py [VERSION …]        (default: oldest pinned newest)

A VERSION is `oldest` (the lower bound in pyproject.toml), `pinned` (constraints.txt), `newest` (of the package index), a number such as
2.8, or `installed`, which installs nothing and takes the Python that runs this. Where torch sees a GPU, the tests run twice: with it in
sight, and hidden. The lessons run on virtual GPUs and print what is stored; on `oldest`, which words some errors in another way, they run
to their ends. Ends with one line a version, and with status 1 if any of them failed.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENTS = ROOT / ".venv-versions"
PYTHONS = [sys.executable, *(f"python3.{minor}" for minor in (14, 13, 12, 11))]  # an older torch has no wheel for the newest Python
PYTEST = ("-m", "pytest", "-q", "--timeout", "300")
UNIT = ("--everything", "tests", "packages")
LESSONS = (
    "--nbval-current-env",
    "--nbval-cell-timeout=240",
    "--nbval-sanitize-with=tests/notebooks/sanitize.cfg",
    "--dist",
    "loadfile",
    "notebooks",
)
AS_STORED = {"LABKIT_VIRTUAL": "1", "LABKIT_PROGRESS": "", "OMP_NUM_THREADS": "1"}
PARALLEL = ("-n", "auto", "--maxprocesses", "4")
# Asked inside an environment: what torch brought with it, and what torch there is.
BROUGHT = """
import json, re
from importlib.metadata import PackageNotFoundError, requires
names = ["torch"]
for name in names:  # it grows
    try:
        needed = [re.match(r"[\\w.-]+", line)[0] for line in requires(name) or () if "extra ==" not in line]
    except PackageNotFoundError:  # needed on another system
        continue
    names += [new for new in needed if new not in names]
print(json.dumps(names))
"""
DESCRIBE = """
import json, platform, torch
print(json.dumps([torch.__version__, platform.python_version(), torch.version.cuda is not None, torch.cuda.device_count()]))
"""


def main(versions: list[str]) -> int:
    versions = versions or ["oldest", "pinned", "newest"]
    wanted = [requirement(version) for version in versions]
    lines = [tested(*pair) for pair in zip(versions, wanted, strict=True)]
    print("", *lines, sep="\n")
    return int(any(line.startswith("FAILED") for line in lines))


def tested(version: str, wanted: str) -> str:
    """The summary of this version: what passed and what failed, with the GPU in sight and without."""
    try:
        python = Path(sys.executable) if version == "installed" else installed(version, wanted)
        torch, own, has_cuda, gpus = asked(python, DESCRIBE)
    except subprocess.CalledProcessError:
        return f"FAILED  {version}: the packages could not be installed, see above"
    name = f"{version}: torch {torch}, Python {own}"
    if gpus:
        found = {
            "on the GPU": ran(python, f"{name}, on the GPU", "-m", "gpu", *UNIT),  # some measure: one after another, and alone
            f"{gpus} GPU{'s' * (gpus > 1)} in sight": ran(
                python, f"{name}, GPU in sight", "-m", "not gpu and not browser", *PARALLEL, *UNIT
            ),
            "hidden": ran(python, f"{name}, GPU hidden", *PARALLEL, *UNIT, CUDA_VISIBLE_DEVICES=""),
        }
    else:
        found = {"without a GPU": ran(python, name, *PARALLEL, *UNIT)}
    compared = "--nbval-lax" if version == "oldest" else "--nbval"
    found["lessons"] = ran(python, f"{name}, lessons", compared, *PARALLEL, *LESSONS, **AS_STORED)
    result = "; ".join(f"{how}: {last}" for how, (_, last) in found.items())
    if not gpus:
        result += f"; with one in sight: LEFT OUT, {'torch sees no GPU here' if has_cuda else 'this torch is built for the CPU alone'}"
    return f"{'passed' if all(passed for passed, _ in found.values()) else 'FAILED'}  {name}; {result}"


def ran(python: Path, title: str, *options: str, **environment: str) -> tuple[bool, str]:
    """Whether the tests passed, and the line in which pytest counts them. What pytest says is passed on."""
    print(f"\n== {title}", flush=True)
    command = [python, *PYTEST, *options]
    last = ""
    with subprocess.Popen(command, cwd=ROOT, env=os.environ | environment, stdout=subprocess.PIPE, text=True) as running:
        for line in running.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
    return running.returncode == 0, last


def installed(version: str, wanted: str) -> Path:
    """The Python of this version's environment, made or brought up to date. Raises CalledProcessError if no Python here has a wheel."""
    folder = ENVIRONMENTS / f"torch-{version}"
    python = folder / "bin" / "python"
    pythons = [python] if has_pip(python) else [found for name in PYTHONS if (found := shutil.which(name))]
    for position, base in enumerate(pythons):
        try:
            if base != python:
                print(f"== making {folder.relative_to(ROOT)} with {base}", flush=True)
                subprocess.run([base, "-m", "venv", "--clear", folder], check=True)
            pip(python, "--upgrade", wanted)
            break
        except subprocess.CalledProcessError:
            if base != python:
                shutil.rmtree(folder, ignore_errors=True)
            if position == len(pythons) - 1:
                raise
    ours = ROOT / "constraints.txt"
    if version != "pinned":  # torch's own choices go before ours
        brought = set(map(normal, asked(python, BROUGHT)))
        pins = [line for line in ours.read_text().splitlines() if normal(re.split(r"[=\s]", line)[0]) not in brought]
        ours = folder / "constraints.txt"
        ours.write_text("\n".join(pins))
    pip(python, "--constraint", ours, "--editable", f"{ROOT}[lab,test]")
    return python


def requirement(version: str) -> str:
    """What to ask of pip. Raises SystemExit for a version that is none."""
    if version == "oldest":
        needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
        return next(line.replace(">=", "==") for line in needed if line.startswith("torch>="))
    if version == "pinned":
        return next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    if version in ("newest", "installed"):
        return "torch"
    if re.fullmatch(r"\d+(\.\d+)+", version):
        return f"torch=={version}" if version.count(".") > 1 else f"torch=={version}.*"
    raise SystemExit(f"no such version: {version}. Allowed: oldest, pinned, newest, installed, or a number such as 2.8")


def normal(name: str) -> str:
    """A package's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def has_pip(python: Path) -> bool:
    """Is this an environment that was made to the end?"""
    return python.exists() and subprocess.run([python, "-m", "pip", "--version"], capture_output=True).returncode == 0


def pip(python: Path, *arguments: str | Path) -> None:
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments], check=True)


def asked(python: Path, code: str) -> list:
    return json.loads(subprocess.run([python, "-W", "ignore", "-c", code], check=True, stdout=subprocess.PIPE, text=True).stdout)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
