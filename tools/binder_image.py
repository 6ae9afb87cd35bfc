"""Contents of an image on mybinder.org. `nox --session binder` builds it without Docker.

repo2docker writes a Dockerfile for this repository. Its commands that come after the copy of the
repository run on such a copy, in a virtual environment instead of Binder's own environment.
The packages that every image has come from the ordinary package index.
"""

import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# mybinder.org builds nothing that does not say what it needs.
AS_ON_BINDER = "--Repo2Docker.default_buildpack=None"
CALLED = {"jupyterhub-singleuser": "jupyterhub"}  # from conda-forge's name to the package index's
NOT_PIPS = ("python", "nodejs", "pip")


def copy_tree(target: Path) -> None:
    """Copy the files that git tracks or would track, as they are now."""
    command = ["git", "ls-files", "-z", "-co", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():  # not deleted since
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def dockerfile(repository: Path = ROOT) -> str:
    """Return the Dockerfile that repo2docker writes for this repository.

    Raises CalledProcessError if repo2docker refuses the repository.
    """
    repo2docker = [sys.executable, "-m", "repo2docker", "--no-build", "--debug", AS_ON_BINDER]
    done = subprocess.run(
        [*repo2docker, str(repository)], capture_output=True, text=True, check=True
    )
    return done.stderr + done.stdout


def commands(text: str) -> list[str]:
    """Return the commands that a Dockerfile runs after the repository has been copied."""
    _, copied, after = text.partition("COPY --chown=0:0 src/ ${REPO_DIR}/")
    if not copied:
        raise ValueError("repo2docker's Dockerfile does not copy the repository where it used to")
    return re.findall(r"^RUN (.*)$", after, re.MULTILINE)


def base_packages() -> list[str]:
    """Return the packages of every image, read from repo2docker's own list, for pip."""
    for file in metadata.files("jupyter-repo2docker") or ():
        if file.name == "environment.yml" and "conda" in file.parts:
            listed = re.findall(r"^\s+- ([\w-]+)(\S*)", file.read_text(), re.MULTILINE)
            break
    else:
        raise FileNotFoundError("repo2docker has no list of the packages of every image")
    pinned = ((name, version) for name, version in listed if name not in NOT_PIPS and version)
    return [CALLED.get(name, name) + version for name, version in pinned]
