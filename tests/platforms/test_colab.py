"""Lessons on a fresh runtime of Colab, as far as it can be imitated.

tools/constraints-classic.txt has Colab's packages. The first cell, which is in docs/platforms.md,
installs the kit from the repository's address. Here Git finds that address in a copy of this tree,
and pip may not use the network. So what the kit needs has to be installed, as it is on Colab.
"""

import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from benchmarks import lesson_runs
from benchmarks.platforms import PAGE, Figures
from tools.binder_image import copy_tree

from ..colab_runtime import kernel_settings, runtime

pytestmark = pytest.mark.platform

ADDRESS = "https://github.com/OWNER/NAME"  # of the repository, in the documentation
INSTALL = re.search(rf"^%pip install .*{ADDRESS}$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)[
    0
]
LESSONS = [path.name for path in lesson_runs.lessons()]
# a lesson may not bring its own
KEPT = (
    "torch",
    "numpy",
    "matplotlib",
    "ipywidgets",
    "ipython",
    "ipykernel",
)


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """A Git copy of this repository whose lessons begin with a cell that installs the kit."""
    tree = tmp_path_factory.mktemp("tree")
    copy_tree(tree)
    for path in (tree / "notebooks").glob("*.ipynb"):
        notebook = nbformat.read(path, as_version=4)
        notebook.cells.insert(0, nbformat.v4.new_code_cell(INSTALL, id="install"))
        nbformat.write(notebook, path)
    author = [
        "-c",
        "user.name=tests",
        "-c",
        "user.email=tests@localhost",
        "-c",
        "commit.gpgsign=false",
    ]
    for command in (
        ["init", "--quiet", "--initial-branch", "main"],
        ["add", "--all"],
        [*author, "commit", "--quiet", "-m", "all"],
    ):
        subprocess.run(["git", *command], cwd=tree, check=True)
    return tree


@pytest.fixture(scope="module")
def colab(tree, tmp_path_factory) -> Iterator[dict[str, str]]:
    """The environment variables of a fresh runtime, whose kernel is called "colab"."""
    python = runtime(tmp_path_factory.mktemp("runtime"))
    kernels = tmp_path_factory.mktemp("jupyter")
    variables = {
        **kernel_settings(tmp_path_factory.mktemp("ipython")),
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.file://{tree}.insteadOf",
        "GIT_CONFIG_VALUE_0": ADDRESS,
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # pip's way to say: build with the tools that are installed
        "LABKIT_VIRTUAL": "1",
    }
    specification = {
        "argv": [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": "Colab",
    }
    (kernels / "kernels" / "colab").mkdir(parents=True)
    (kernels / "kernels" / "colab" / "kernel.json").write_text(
        json.dumps(specification | {"language": "python", "env": variables})
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PATH", str(kernels))
        yield {"python": str(python), **variables}


@pytest.fixture(scope="module")
def content(tmp_path_factory) -> Path:
    """The folder in which lessons run. It does not contain the repository's files."""
    return tmp_path_factory.mktemp("content")


@pytest.fixture(scope="module")
def figures() -> Iterator[Figures]:
    """The lessons' time and memory, which are stored if LABKIT_FIGURES is set."""
    figures = Figures.of_this_machine("Colab stand-in")
    yield figures
    figures.store_if_asked("colab")


def test_this_environment_is_colabs_without_the_kit():
    packages = {distribution.name.lower(): distribution.version for distribution in distributions()}
    assert (
        packages["ipywidgets"] == "7.7.1"
        and "pytorch-gpu-lessons" not in packages
        and "jupyterlab" not in packages
    )


def test_installing_the_kit_replaces_nothing(colab):
    command = [
        colab["python"],
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--quiet",
        "--report",
        "-",
        f"git+{ADDRESS}",
    ]
    done = subprocess.run(command, env=os.environ | colab, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [item["metadata"]["name"] for item in json.loads(done.stdout)["install"]] == [
        "pytorch-gpu-lessons"
    ]


def test_the_first_cell_sets_up_the_runtime(colab, content, figures):
    """Check that a lesson still uses Colab's packages after the first cell."""
    told = (
        "import importlib.metadata, json, sys, labkit\n"
        f"versions = {{name: importlib.metadata.version(name) for name in {KEPT}}}\n"
        "print(json.dumps([labkit.__file__, 'google.colab' in sys.modules, versions]))"
    )
    before = {
        name: next(d.version for d in distributions() if d.name.lower() == name) for name in KEPT
    }
    start = time.perf_counter()
    cells = [nbformat.v4.new_code_cell(source) for source in (INSTALL, told)]
    NotebookClient(
        nbformat.v4.new_notebook(cells=cells),
        kernel_name="colab",
        resources={"metadata": {"path": str(content)}},
    ).execute()
    figures.setup_seconds = time.perf_counter() - start
    file, loaded, versions = json.loads(cells[1].outputs[0].text)
    assert Path(file).is_relative_to(Path(colab["python"]).parents[1])
    assert loaded and versions == before


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", LESSONS)
def test_the_lesson_runs_whole(tree, colab, content, figures, name):
    figures.lessons[Path(name).stem] = lesson_runs.run(tree / "notebooks" / name, content, "colab")


def test_in_the_end_the_kit_alone_was_installed(colab):
    places = sorted(Path(colab["python"]).parents[1].glob("lib/*/site-packages/*.dist-info"))
    assert [place.name.partition("-")[0] for place in places] == ["pytorch_gpu_lessons"]
