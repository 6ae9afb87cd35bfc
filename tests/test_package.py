"""The wheel has all that the kit needs, and works from another folder."""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
import yaml

import labkit
from labkit import doctor

from .followed_links import dead_links

ROOT = Path(__file__).parents[1]
FOLDERS = {  # in which each package lies
    "virtualgpu": "packages/virtualgpu/src",
    "gputrace": "packages/gputrace/src",
    "labkit": ".",
    "gpulessons": ".",
    "labcourse": "packages/labcourse/src",
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# The keys at the root of a CITATION.cff, and of an author that is no person.
# They are in the guide to its schema, version 1.2.0,
# https://github.com/citation-file-format/citation-file-format/blob/1.2.0/schema-guide.md
CITATION_REQUIRED = {"authors", "cff-version", "message", "title"}
CITATION_ALLOWED = CITATION_REQUIRED | {
    *(
        "abstract",
        "commit",
        "contact",
        "date-released",
        "doi",
        "identifiers",
        "keywords",
        "license",
        "license-url",
        "preferred-citation",
    ),
    *(
        "references",
        "repository",
        "repository-artifact",
        "repository-code",
        "type",
        "url",
        "version",
    ),
}
ENTITY_ALLOWED = {
    *(
        "address",
        "alias",
        "city",
        "country",
        "date-end",
        "date-start",
        "email",
        "fax",
        "location",
        "name",
        "orcid",
        "post-code",
    ),
    *("region", "tel", "website"),
}
DATA = (
    f"pytorch_gpu_lessons-{labkit.__version__}.data/data"  # installed in the environment's folder
)
STARTUP = f"{DATA}/etc/ipython/startup/50-labkit.py"
SCRIPT = """
import sys, torch
three = torch.ones(3, device="cuda:1").sum().item()
print(torch.cuda.device_count(), torch.cuda.get_device_name(0), three, sys.argv[1])
"""
USE = """
import labkit
from labkit import doctor
from gpulessons.lesson_13 import articles
from labkit.labs import recorded_result
from virtualgpu import profiles
print(labkit.__file__)
print(len(articles.claims()), recorded_result("copy_speed", "H200").badge, profiles.load("T4").name)
"""


def built(target: str, source: Path, folder: Path) -> Path:
    """Build a wheel or source distribution of `source`, without the network."""
    command = [
        sys.executable,
        "-m",
        "hatchling",
        "build",
        "--target",
        target,
        "--directory",
        str(folder),
    ]
    subprocess.run(command, cwd=source, check=True, capture_output=True, text=True)
    [made] = folder.glob("*.whl" if target == "wheel" else "*.tar.gz")
    return made


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return built("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The folder into which pip installed the wheel, without its dependencies."""
    folder = tmp_path_factory.mktemp("installed")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-index",
        "--no-deps",
    ]
    subprocess.run([*command, "--target", str(folder), str(wheel)], check=True, capture_output=True)
    return folder


@pytest.fixture
def elsewhere(installed, tmp_path, monkeypatch) -> Path:
    """A working directory without the kit. Its programs import what was installed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(installed))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # it hides virtual GPUs too
    return tmp_path


def python(*arguments: str) -> str:
    """Run a program without modules in its working directory, and return what it prints."""
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def in_wheel(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def is_of_a_tool(path: Path) -> bool:
    """Return whether a path is a cache of Python or of another tool."""
    return any(part == "__pycache__" or part.startswith(".") for part in path.parts)


def sources() -> set[str]:
    """Return all files of the packages by their installed paths.

    The lessons, the glossary and the pins are installed within labkit.
    """
    files = (
        path.relative_to(ROOT / folder)
        for package, folder in FOLDERS.items()
        for path in (ROOT / folder / package).rglob("*")
        if path.is_file()
    )
    lessons = {
        f"labkit/{path.relative_to(ROOT).as_posix()}"
        for path in (ROOT / "notebooks").glob("*.ipynb")
    }
    return (
        lessons
        | {"labkit/constraints.txt", "labkit/docs/glossary.md", "pytest_virtual_gpus.py", STARTUP}
        | {path.as_posix() for path in files if not is_of_a_tool(path)}
    )


@pytest.mark.slow
def test_wheel_holds_every_file_of_the_packages_and_no_other(wheel):
    assert in_wheel(wheel) == sources()
    assert {f"{package}/py.typed" for package in FOLDERS} <= in_wheel(wheel)


@pytest.mark.slow
def test_wheel_says_what_it_is(wheel):
    with zipfile.ZipFile(wheel) as archive:
        told = f"pytorch_gpu_lessons-{labkit.__version__}.dist-info"
        metadata = message_from_bytes(archive.read(f"{told}/METADATA"))
        assert archive.read(f"{told}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
        entry_points = archive.read(f"{told}/entry_points.txt").decode()
    assert "labkit = labkit.cli:main" in entry_points
    assert "[labkit.lessons]\ngpulessons = gpulessons\n" in entry_points
    assert metadata["Version"] == labkit.__version__
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == PROJECT["license"]


@pytest.mark.slow
def test_wheel_of_the_source_distribution_is_the_same_byte_for_byte(wheel, tmp_path):
    """Build the wheel again, in another folder and from files of another age."""
    with tarfile.open(built("sdist", ROOT, tmp_path)) as archive:
        archive.extractall(tmp_path, filter="data")
    again = built("wheel", tmp_path / f"pytorch_gpu_lessons-{labkit.__version__}", tmp_path)
    assert in_wheel(again) == in_wheel(wheel)
    assert again.read_bytes() == wheel.read_bytes()


@pytest.mark.slow
def test_installed_package_finds_its_data(elsewhere, installed):
    place, data = python("-c", USE).splitlines()
    assert Path(place).is_relative_to(installed)
    count, rest = data.split(" ", 1)
    assert int(count) > 0
    assert rest == "recorded on NVIDIA H200, torch 2.11 Tesla T4"


@pytest.mark.slow
def test_every_link_of_a_lesson_arrives_in_the_wheel_and_in_copies_that_are_made_from_it(
    elsewhere, installed
):
    assert (
        dead_links(installed / "labkit", "notebooks/*.ipynb")
        + dead_links(installed / "labkit", "docs/glossary.md")
        == []
    )
    python("-m", "labkit", "lessons", "--to", "work")
    assert len(list(Path("work").glob("*.ipynb"))) > 14
    assert dead_links(elsewhere / "work") == []


@pytest.mark.slow
def test_installed_commands_work_in_another_folder(elsewhere):
    said = python("-m", "labkit", "doctor")
    assert "virtual GPU" in said
    [torch] = [line.split() for line in said.splitlines() if line.startswith("  torch ")]
    assert torch[2] == doctor.pinned_versions()["torch"]  # what the kit was tested with
    (elsewhere / "script.py").write_text(SCRIPT)
    assert (
        python(
            "-m", "labkit", "run", "--gpus", "2", "--like", "H200", "script.py", "7"
        ).splitlines()[-1]
        == "2 NVIDIA H200 3.0 7"
    )
    assert (
        python("-m", "virtualgpu", "run", "--gpus", "2", "--like", "H200", "script.py", "7")
        == "2 NVIDIA H200 3.0 7\n"
    )
    assert "collect" in python("-m", "labkit", "course", "--help")
    assert sorted(path.name for path in elsewhere.iterdir()) == ["script.py"]


@pytest.mark.slow
def test_installed_package_brings_its_lessons(elsewhere):
    python("-m", "labkit", "lessons", "--to", "mine")
    lessons = [path.name for path in (ROOT / "notebooks").glob("*.ipynb")]
    assert sorted(path.name for path in (elsewhere / "mine").iterdir()) == sorted(
        [*lessons, "index.ipynb", "glossary.ipynb"]
    )


def test_citation_is_a_valid_one_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert CITATION_REQUIRED <= set(citation) <= CITATION_ALLOWED
    assert (citation["cff-version"], citation["type"]) == ("1.2.0", "software")
    assert (citation["version"], " AND ".join(citation["license"])) == (
        labkit.__version__,
        PROJECT["license"],
    )
    assert citation["abstract"] == PROJECT["description"]
    assert citation["title"] == (ROOT / "README.md").read_text().splitlines()[0].removeprefix("# ")
    assert all(
        isinstance(text, str) and text for text in (citation["message"], *citation["keywords"])
    )
    assert all(set(author) <= ENTITY_ALLOWED for author in citation["authors"])
    assert citation["authors"] == PROJECT["authors"]


def test_changelog_begins_with_what_is_not_released_and_knows_this_version():
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## \[(.+?)\](?: - (.+))?$", text, re.MULTILINE)
    assert versions[0] == ("Unreleased", "")
    assert all(re.fullmatch(r"\d{4}-\d{2}-\d{2}", date) for _, date in versions[1:])
    assert (
        labkit.__version__ in {version for version, _ in versions}
        or f"What will be {labkit.__version__}" in text
    )
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security", "Known limits"}
    assert set(re.findall(r"^### (.+)$", text, re.MULTILINE)) <= kinds
