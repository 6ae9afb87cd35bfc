"""The doctor's advice for machines of every kind. It says which faults block a lesson."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from labkit import doctor, nvidia
from labkit.doctor import Facts, Torch

GIB = 1 << 30
ROOT = Path(__file__).parents[1]
NO_GPU = nvidia.Answer(trouble="none")
ONE_GPU = nvidia.Answer(("NVIDIA H200",), "570.1")
PACKAGES = {
    "torch": "2.13.0+cpu",
    "numpy": "2.4.6",
    "ipywidgets": "8.1.9",
    "matplotlib": "3.11.2",
    "nvidia-ml-py": "13.615.71",
    "GPUtil": "1.4.0",
    "filelock": "4.2.11",
    "psutil": "7.2.2",
    "cloudpickle": "3.1.2",
    "jinja2": "3.1.6",
    "jupyterlab": "4.6.6",
}


def facts(packages: dict[str, str | None] | None = None, **changes: object) -> Facts:
    """Return the facts about a laptop without a GPU and without faults, with these changes."""
    laptop = {
        "system": "Linux 6.1, x86_64, 4 cores",
        "python": "3.12.1",
        "memory": 16 * GIB,
        "available": 8 * GIB,
        "limited": False,
        "torch": Torch("2.13.0+cpu", ""),
        "nvml": NO_GPU,
        "packages": PACKAGES | (packages or {}),
    }
    return Facts(**(laptop | changes))


def only_advice(given: Facts) -> doctor.Advice:
    (advice,) = doctor.advise(given)
    return advice


def test_nothing_to_do_on_a_good_laptop():
    assert doctor.advise(facts()) == []
    text = doctor.report(facts(), [])
    assert (
        "virtual GPUs, modelled on NVIDIA T4" in text
        and "Nothing: every lesson can run here." in text
    )


def test_nothing_to_do_on_a_gpu_machine():
    given = facts(torch=Torch("2.13.0", "13.0", ("NVIDIA H200",)), nvml=ONE_GPU)
    assert doctor.advise(given) == []
    text = doctor.report(given, [])
    assert "1 × NVIDIA H200" in text
    assert "NVML     NVIDIA H200, driver 570.1" in text


def test_labkit_virtual_is_named_where_it_hides_a_gpu():
    given = facts(torch=Torch("2.13.0", "13.0", ("NVIDIA H200",)), nvml=ONE_GPU, virtual=True)
    assert "virtual GPUs" in doctor.runs_on(given) and "LABKIT_VIRTUAL is set" in doctor.runs_on(
        given
    )


@pytest.mark.parametrize("package", sorted(set(doctor.LESSONS_NEED) - {"jupyterlab"}))
def test_a_missing_package_blocks(package):
    advice = only_advice(facts({package: None}))
    assert advice.blocking and f"{package} is missing" in advice.text


@pytest.mark.parametrize(
    ("package", "version"),
    [("torch", "2.5.1+cu124"), ("ipywidgets", "7.6.5"), ("jupyterlab", "3.6.8")],
)
def test_an_old_package_blocks(package, version):
    advice = only_advice(facts({package: version}))
    assert advice.blocking and f"{package} {version} is too old" in advice.text


WITH_CUDA = Torch("2.13.0", "13.0")
OLD_DRIVER = "The NVIDIA driver on your system is too old (found version 11040)"


@pytest.mark.parametrize(
    ("changes", "blocking", "text"),
    [
        ({"torch": None}, True, ""),
        (
            {
                "torch": Torch(
                    "", "", trouble="PyTorch is installed but does not load: libgomp.so.1"
                )
            },
            True,
            "libgomp",
        ),
        ({"packages": PACKAGES | {"jupyterlab": None}}, False, "use another front end"),
        ({"nvml": ONE_GPU}, False, "built without CUDA"),
        (
            {"nvml": ONE_GPU, "torch": WITH_CUDA, "visible": ""},
            False,
            "CUDA_VISIBLE_DEVICES='' hides it",
        ),
        ({"nvml": ONE_GPU, "torch": WITH_CUDA}, False, "with driver 570.1: update the driver"),
        (
            {"torch": Torch("2.13.0", "13.0", trouble=OLD_DRIVER)},
            False,
            "too old (found version 11040)",
        ),
        (
            {
                "nvml": ONE_GPU,
                "torch": Torch("2.13.0", "13.0", ("P100",), "P100 is not compatible"),
            },
            False,
            "P100 is not compatible.",
        ),
        ({"available": GIB}, False, "Only 1.0 GiB"),
    ],
)
def test_the_one_thing_to_do(changes, blocking, text):
    advice = only_advice(facts(**changes))
    assert advice.blocking is blocking and text in advice.text


def test_advice_names_make_only_where_there_is_a_makefile():
    wrong = {
        "torch": None,
        "packages": PACKAGES | {"numpy": None, "ipywidgets": "7.6.5", "jupyterlab": None},
    }
    for changes in (wrong, wrong | {"torch": Torch("2.13.0+cpu", ""), "nvml": ONE_GPU}):
        installed, cloned = (
            "\n".join(item.text for item in doctor.advise(facts(clone=clone, **changes)))
            for clone in (False, True)
        )
        assert "make" not in installed and "`make lab`" in cloned
        assert "numpy is missing: run `pip install --upgrade 'numpy'`." in installed
        how = "run `pip install --upgrade 'ipywidgets>=7.7.1'`"
        assert f"ipywidgets 7.6.5 is too old, because the lessons need 7.7.1: {how}." in installed
    assert doctor.gather().clone


def test_without_torch_the_kit_runs_on_nothing():
    assert "nothing yet" in doctor.runs_on(facts(torch=Torch("", "", trouble="does not load")))


@pytest.mark.parametrize(
    ("version", "least", "older"),
    [
        ("2.13.0+cpu", "2.10", False),
        ("2.9.1", "2.10", True),
        ("7.7.1", "7.7.1", False),
        ("1", "", False),
    ],
)
def test_older(version, least, older):
    assert doctor.older(version, least) is older


# This machine, and the files that must agree


@pytest.mark.slow
def test_doctor_runs_here():
    result = subprocess.run(
        [sys.executable, "-m", "labkit", "doctor"], capture_output=True, text=True, timeout=280
    )
    assert result.returncode == 0, result.stdout
    assert result.stderr == ""
    titles = [line for line in result.stdout.splitlines() if line and not line.startswith(" ")]
    assert titles == [
        "This machine",
        "GPUs",
        "Packages (installed, tested with)",
        "The kit will run on",
        "What to do",
    ]


def test_a_blocking_advice_is_the_exit_status(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "gather", lambda: facts({"matplotlib": None}))
    assert doctor.main() == 1
    assert "! matplotlib is missing" in capsys.readouterr().out


def test_needs_are_those_of_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = [*project["dependencies"], *project["optional-dependencies"]["lab"]]
    assert {
        re.split("[>=]+", line)[0]: "".join(re.split("[>=]+", line)[1:]) for line in declared
    } == doctor.LESSONS_NEED


def test_every_dependency_is_pinned():
    pins = doctor.pinned_versions()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [
        line
        for lines in project["optional-dependencies"].values()
        for line in lines
        if not line.startswith("pytorch-gpu-lessons[")
    ]
    assert {
        re.split("[>=; ]+", line)[0].lower() for line in [*project["dependencies"], *extras]
    } <= set(pins)
