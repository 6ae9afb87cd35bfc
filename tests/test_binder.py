"""Binder's configuration, as repo2docker reads it, agrees with environment.yml."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from tools.binder_image import base_packages, commands, copy_tree, dockerfile

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def built() -> str:
    pytest.importorskip(
        "repo2docker", reason="repo2docker is not installed: run `make test-binder`"
    )
    return dockerfile()


def options(text: str) -> dict[str, list[str]]:
    """Return the options and requirements in a list for pip, without the list's folder."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if asked := re.match(r"^(?:\s*- )?(--[\w-]+) (\S+)$", line):
            found.setdefault(asked[1], []).append(asked[2].removeprefix("../"))
    return found


@pytest.mark.slow
def test_repo2docker_builds_from_the_binder_folder(built):
    """Check that Binder takes no other environment, and installs the kit from the repository."""
    before, _, after = built.partition("COPY --chown=0:0 src/ ${REPO_DIR}/")
    assert 'pip install --no-cache-dir -r "binder/requirements.txt"' in after
    assert "pip install" not in before
    assert "src/environment.yml" not in built and "mamba env update" not in built
    # as runtime.txt says
    assert "environment-2epy-2d3-2e12" in built or "environment.py-3.12" in built


@pytest.mark.slow
def test_the_commands_of_the_image_are_known_to_who_builds_without_docker(built):
    ran = commands(built)
    assert ran == [
        '${KERNEL_PYTHON_PREFIX}/bin/pip install --no-cache-dir -r "binder/requirements.txt"',
        "chmod +x binder/postBuild",
        "./binder/postBuild",
        'chmod +x "${REPO_DIR}/binder/start"',
    ]
    assert 'R2D_ENTRYPOINT="${REPO_DIR}/binder/start"' in built
    assert any(package.startswith("jupyterlab==") for package in base_packages())
    with pytest.raises(ValueError, match="does not copy the repository"):
        commands("FROM nothing")


def test_binder_and_conda_take_the_same_kit_with_the_same_versions_and_python():
    """repo2docker reads only `binder/`, and not environment.yml."""
    conda = options((ROOT / "environment.yml").read_text())
    binder = options((ROOT / "binder" / "requirements.txt").read_text())
    assert conda["--constraint"] == binder["--constraint"] == ["constraints.txt"]
    # Binder's image brings JupyterLab, and nobody tests there.
    assert (conda.pop("--editable"), binder.pop("--editable")) == ([".[lab,test]"], ["."])
    assert set(conda) == {"--constraint"} and set(binder) == {"--constraint", "--extra-index-url"}
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert [re.split(r"[><=]", need)[0] for need in extra["lab"]] == ["jupyterlab"]
    python = re.search(r"- python=([\d.]+)", (ROOT / "environment.yml").read_text())
    assert (ROOT / "binder" / "runtime.txt").read_text().strip() == f"python-{python[1]}"


def test_binders_pytorch_has_no_cuda():
    asked = (ROOT / "binder" / "requirements.txt").read_text()
    assert "--extra-index-url https://download.pytorch.org/whl/cpu" in asked


def test_learners_open_copies_without_outputs():
    assert "python -m labkit lessons --to work" in (ROOT / "binder" / "postBuild").read_text()
    page = (ROOT / "docs" / "platforms.md").read_text(encoding="utf-8")
    assert "urlpath=lab/tree/work/LESSON" in page and "lab/tree/notebooks" not in page


def test_scripts_stop_at_the_first_thing_that_fails():
    for name, words in {"postBuild": "set -euo pipefail", "start": 'exec "$@"'}.items():
        path = ROOT / "binder" / name
        assert words in path.read_text() and path.stat().st_mode & 0o111
        subprocess.run(["bash", "-n", path], check=True)


def test_a_copy_has_what_git_has_and_what_it_would(tmp_path):
    copy_tree(tmp_path)
    assert (tmp_path / "binder" / "start").stat().st_mode & 0o111
    assert (tmp_path / "labkit" / "machine.py").is_file()
    assert not (tmp_path / ".git").exists() and not list(tmp_path.glob(".venv*"))
