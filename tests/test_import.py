"""`import labkit` is quick, loads nothing heavy, and offers its public names."""

import ast
import shutil
import statistics
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import labkit

ROOT = Path(__file__).parents[1]
FOLDERS = {  # in which each package lies; each may import some of those before it
    "virtualgpu": ROOT / "packages/virtualgpu/src",
    "gputrace": ROOT / "packages/gputrace/src",
    "labkit": ROOT,
    "gpulessons": ROOT,
    "labcourse": ROOT / "packages/labcourse/src",
}
PACKAGES = tuple(FOLDERS)
# A module that is None in `sys.modules` cannot be imported, as if it were not installed.
MISSING = "import sys; sys.modules.update(dict.fromkeys(sys.argv[1].split(',')))\n"
JUPYTER = ("IPython", "ipykernel", "ipywidgets", "traitlets", "comm")
IN_A_BLOCK = """
import virtualgpu
with virtualgpu.use(2, like="H200"):
    import torch
    x = torch.ones(3, 3, device="cuda:1", requires_grad=True)
    (x @ x).sum().backward()
    print(torch.cuda.get_device_name(1), x.grad.sum().item(), torch.cuda.memory_allocated(1) > 0)
print(torch.cuda.is_available())
"""
RECORDED = """
import gputrace, virtualgpu
with virtualgpu.use(1):
    import torch
    with gputrace.record() as trace:
        kept = torch.ones(1 << 20, device="cuda")
    trace.plot_memory().save(sys.argv[2])
    print(trace.peak, len(trace.leaks()))
"""


def python(code: str, *arguments: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_import_loads_neither_torch_nor_matplotlib():
    heavy = python(
        "import labkit, sys; print(sorted("
        "{'torch', 'matplotlib', 'numpy', 'ipywidgets', 'IPython'} & set(sys.modules)))"
    )
    assert heavy == "[]"


def test_on_windows_the_import_says_where_to_go_on_one_line():
    said = python(
        "import sys; sys.platform = 'win32'\ntry: import labkit\n"
        "except ImportError as error: print(error)"
    )
    assert (
        said.startswith("labkit runs on Linux and macOS, not on Windows. Install WSL")
        and said.count("\n") == 0
    )
    page = (
        (ROOT / "docs" / "platforms.md")
        .read_text(encoding="utf-8")
        .partition("## Windows")[2]
        .partition("\n## ")[0]
    )
    assert (
        "\nwsl --install\n" in page
        and "make lab" in page
        and "#windows" in (ROOT / "README.md").read_text(encoding="utf-8")
    )


def test_import_takes_under_a_tenth_of_a_second_of_the_processor():
    code = (
        "import time; start = time.process_time(); import labkit; "
        "print(time.process_time() - start)"
    )
    assert statistics.median(float(python(code)) for _ in range(5)) < 0.1


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_loads_none_that_stands_on_it(package):
    above = PACKAGES[PACKAGES.index(package) + 1 :]
    assert python(f"import {package}, sys; print({above} and set({above}) & set(sys.modules))") in (
        "()",
        "set()",
    )


@pytest.mark.slow
def test_ranks_are_started_without_torch_in_the_process_that_waits():
    assert python("import labkit.ranks, sys; print('torch' in sys.modules)") == "False"


@pytest.mark.slow
def test_virtual_gpus_need_torch_alone():
    others = (
        "numpy",
        "psutil",
        "pynvml",
        "GPUtil",
        "matplotlib",
        "cloudpickle",
        *JUPYTER,
        "gputrace",
        "labkit",
        "gpulessons",
        "labcourse",
    )
    assert python(MISSING + IN_A_BLOCK, ",".join(others)).splitlines() == [
        "NVIDIA H200 54.0 True",
        "False",
    ]


@pytest.mark.slow
def test_recordings_need_no_jupyter(tmp_path):
    absent = (*JUPYTER, "psutil", "labkit", "gpulessons", "labcourse")
    assert python(
        MISSING + RECORDED, ",".join(absent), str(tmp_path / "memory.png")
    ).splitlines() == [f"{4 << 20} 1"]
    assert (tmp_path / "memory.png").stat().st_size > 1000


def pythons() -> list[str]:
    """Return this Python, and every other one from 3.11 on that can be started."""
    found = [sys.executable]
    for name in (f"python3.{minor}" for minor in range(11, 20) if minor != sys.version_info.minor):
        path = shutil.which(name)
        # pyenv's may stand for nothing
        if (
            path is not None
            and subprocess.run([path, "-c", ""], capture_output=True).returncode == 0
        ):
            found.append(path)
    return found


@pytest.mark.parametrize("python", pythons(), ids=lambda path: Path(path).name)
def test_import_is_silent_where_warnings_are_errors(python):
    code = "import sys; sys.path[:0] = sys.argv[1:]; import labkit; print(labkit.__version__)"
    done = subprocess.run(
        [python, "-B", "-W", "error", "-c", code, *map(str, FOLDERS.values())],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, labkit.__version__, "")


@pytest.mark.parametrize("python", pythons(), ids=lambda path: Path(path).name)
def test_all_source_is_without_warnings(python):
    code = (
        "import pathlib, sys; [compile(path.read_bytes(), str(path), 'exec') "
        "for path in pathlib.Path(sys.argv[1]).rglob('*.py')]"
    )
    for package, folder in FOLDERS.items():
        done = subprocess.run(
            [python, "-W", "error", "-c", code, str(folder / package)],
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stderr) == (0, "")


def test_every_public_name_is_there():
    for name in labkit.__all__:
        assert getattr(labkit, name) is not None
        assert name in dir(labkit)


def test_modules_are_the_modules():
    from labkit import labs

    assert labkit.labs is labs


def test_to_ask_for_a_result_imports_no_widget():
    code = (
        "import labkit.labs, sys; labkit.labs.Result; "
        "print(sorted(name for name in sys.modules if name.startswith('labkit.labs.')))"
    )
    assert python(code) == "['labkit.labs.experiment']"


def test_no_module_hides_a_public_name_of_labs():
    """An imported module is an attribute of its package.

    It would hide a function with its name.
    """
    assert not {path.stem for path in Path(labkit.labs.__file__).parent.glob("*.py")} & set(
        labkit.labs.__all__
    )


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'labkit' has no attribute 'fly'"):
        _ = labkit.fly
    with pytest.raises(ImportError, match="cannot import name 'fly'"):
        from labkit import fly  # noqa: F401


def test_version_is_the_installed_one():
    try:
        installed = metadata.version("labkit")
    except metadata.PackageNotFoundError:
        pytest.skip("labkit is on the path here, not installed")
    assert labkit.__version__ == installed


def test_the_program_that_is_checked_uses_every_public_name():
    tree = ast.parse(Path(__file__).with_name("typed_program.py").read_text())
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "labkit"
    }
    assert set(labkit.__all__) <= used
