"""What an image on mybinder.org would hold, built without Docker, into a folder.

    python tools/build_binder.py FOLDER [PYTHON]
    python tools/build_binder.py --refresh FOLDER

repo2docker writes the commands with which it would build the image. Those of this repository run here: on a copy of it, in `FOLDER/repo`,
in a clean virtual environment, `FOLDER/environment`. This takes the place of Binder's own, and gets from the ordinary package index what
that has: JupyterLab and its companions. PYTHON makes it (default: the one that runs this). With --refresh only the copy is made anew, which
is what the environment uses. Linux and macOS.
"""

import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
AS_ON_BINDER = "--Repo2Docker.default_buildpack=None"  # mybinder.org builds nothing that does not say what it needs
CALLED = {"jupyterhub-singleuser": "jupyterhub"}  # conda-forge's name of a package, and the package index's
NOT_PIPS = ("python", "nodejs", "pip")


def main(arguments: list[str]) -> None:
    refresh = arguments[:1] == ["--refresh"]
    folder, python = [*arguments[refresh:], sys.executable][:2]
    target = Path(folder).resolve()
    repository, environment = target / "repo", target / "environment"
    if target.is_dir() and not {path.name for path in target.iterdir()} <= {"repo", "environment", "installed"}:
        sys.exit(f"{target} holds other files, which would be removed: choose a new folder")
    shutil.rmtree(repository if refresh else target, ignore_errors=True)
    copy_tree(repository)
    if refresh:
        return
    subprocess.run([python, "-m", "venv", environment], check=True)
    pip = [environment / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *base_packages()], check=True)
    places = {"KERNEL_PYTHON_PREFIX": str(environment), "REPO_DIR": str(repository)}
    variables = os.environ | places | {"PATH": f"{environment / 'bin'}:{os.environ['PATH']}"}
    for command in commands(dockerfile(repository)):
        print(f"+ {command}", flush=True)
        subprocess.run(["bash", "-c", command], cwd=repository, env=variables, check=True)


def copy_tree(target: Path) -> None:
    """The files that git tracks, or would: as they stand here."""
    listed = subprocess.run(["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():  # not deleted since
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def dockerfile(repository: Path = ROOT) -> str:
    """What repo2docker would build the image with. Raises CalledProcessError where it refuses the repository."""
    command = [sys.executable, "-m", "repo2docker", "--no-build", "--debug", AS_ON_BINDER, str(repository)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stderr + done.stdout


def commands(text: str) -> list[str]:
    """Those that a Dockerfile runs once the repository has been copied into the image."""
    _, copied, after = text.partition("COPY --chown=0:0 src/ ${REPO_DIR}/")
    if not copied:
        raise ValueError("repo2docker's Dockerfile does not copy the repository where it used to")
    return re.findall(r"^RUN (.*)$", after, re.MULTILINE)


def base_packages() -> list[str]:
    """What every image of repo2docker has, in the words of its own list, for pip."""
    file = next(file for file in metadata.files("jupyter-repo2docker") if file.name == "environment.yml" and "conda" in file.parts)
    listed = re.findall(r"^\s+- ([\w-]+)(\S*)", file.read_text(), re.MULTILINE)
    return [CALLED.get(name, name) + version for name, version in listed if name not in NOT_PIPS and version]


if __name__ == "__main__":
    main(sys.argv[1:])
