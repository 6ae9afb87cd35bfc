"""Recordings of a lesson's cells. Real GPUs are pretended here."""

import json
from dataclasses import replace

import nbformat
import pytest

import labkit
from benchmarks import record
from labkit import courses, machine
from labkit.experiments.fingerprints import fingerprint
from labkit.experiments.result import Result
from virtualgpu import machines

CELLS = [
    "import torch\n\nimport labkit\n\nlabkit.use(gpus=2)\nROWS = 64",
    "def step_seconds(gpus):\n    batch = torch.ones(ROWS, 64, device=f'cuda:{gpus - 1}')\n\n"
    "    def step():\n        batch @ batch.T\n\n    return labkit.seconds(step)\n",
    "times = labkit.measure(step_seconds, {'gpus': [1]}, values=False)\n"
    "display(times.plot('gpus', 'step_seconds'))",
    "%time labkit.check('03.1', None)",
    "raise ValueError('this is meant to fail')",
    "labkit.check('03.1', undefined)",
    "labkit.Lab(step_seconds, {'gpus': [1, 2]}, question='How long?', predict='step_seconds')",
    "raise AssertionError('nothing is measured from here on')",
]


@pytest.fixture
def lesson(tmp_path, monkeypatch):
    """A lesson with a notebook, in a course of its own."""
    cells = [nbformat.v4.new_code_cell(source, id=f"c{n}") for n, source in enumerate(CELLS)]
    cells[4].metadata["tags"] = ["raises-exception"]
    path = tmp_path / "03_lesson.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    course = tmp_path / "course"
    (course / "lesson_03").mkdir(parents=True)
    monkeypatch.setattr(
        courses, "lessons", lambda: {"03": ("course.lesson_03", course / "lesson_03")}
    )
    monkeypatch.setattr(record, "NOTEBOOKS", tmp_path)
    return path


@pytest.fixture
def pretended(monkeypatch):
    """Virtual GPUs that pretend to be real ones."""
    monkeypatch.setenv("LABKIT_VIRTUAL", "1")
    monkeypatch.setattr(machines.VirtualGPUs, "virtual", False)


def test_each_function_has_one_recording_with_its_origin_grid_and_fingerprint(
    lesson, pretended, capsys
):
    assert record.main([str(lesson)]) == 0
    file = lesson.parent / "course" / "lesson_03" / "recordings" / "step_seconds_tesla-t4.json"
    assert capsys.readouterr().out.splitlines()[-1] == f"wrote {file}"
    recording = Result.load(file)
    assert recording.badge.startswith("recorded on 2× Tesla T4, torch 2.")
    assert recording.column("gpus") == [1, 2] and recording.parameters == {"gpus": [1, 2]}
    assert {"torch", "cuda", "driver", "date", "gpu", "program"} <= set(recording.origin)
    assert recording.code and machine.current() is None
    assert record.outdated() == []
    assert callable(labkit.measure) and isinstance(labkit.Lab, type)


def test_a_recording_of_another_version_of_the_cell_is_found(lesson, pretended, capsys):
    assert record.main([str(lesson)]) == 0
    for old, new in (("ROWS = 64", "ROWS = 128"), ("batch @ batch.T", "batch + batch")):
        text = lesson.read_text()
        assert old in text
        lesson.write_text(text.replace(old, new))
        [said] = record.outdated()
        assert said.startswith(
            "step_seconds_tesla-t4.json belongs to another version of step_seconds"
        )
        assert record.main(["--check"]) == 1
        lesson.write_text(text)
    assert record.main(["--check"]) == 0


CONSTANTS = [
    "%load_ext labkit\nimport math\n\nimport torch\n\nWIDTH = 64\nSIZES = [2**n for n in range(3)]",
    "%%gpu_memory\nnot Python",
    "class Net(torch.nn.Module):\n    def forward(self):\n        return WIDTH\n",
    "double = lambda n: 2 * n\nkinds = {'half': [torch.float16]}",
    "raise AssertionError('only definitions run')",
    "def helper(n):\n    return math.sqrt(n) + len(SIZES) + len(kinds)\n",
    "def step(n):\n    return 1\n",
    "def step(n):\n    return helper(n) + Net().forward() + double(n)\n",
]


def test_cells_that_do_not_run_have_the_fingerprints_of_a_running_notebook(tmp_path):
    path = tmp_path / "03_lesson.ipynb"
    cells = [nbformat.v4.new_code_cell(source) for source in CONSTANTS]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    names = {"__name__": "__main__"}
    for number, cell in enumerate(CONSTANTS):
        if "only definitions" not in cell:
            source, filename = record.listed(tmp_path / "running", number, cell)
            exec(compile(source, filename, "exec"), names)
    expected = {name: fingerprint(names[name]) for name in ("helper", "step")}
    found = record.fingerprints(path)
    assert all(expected.values()) and {name: found[name] for name in expected} == expected


def test_the_result_of_the_same_cells_finds_its_recording(lesson, pretended, monkeypatch):
    files = list(record.record(lesson))
    monkeypatch.setattr(courses, "files", lambda pattern: files)
    recording = Result.load(files[0])
    assert replace(recording, badge="virtual").recorded() == recording


def test_without_real_gpus_nothing_is_recorded(lesson, capsys):
    assert record.main(["--output", str(lesson.parent / "out"), str(lesson)]) == 2
    assert (
        "03_lesson.ipynb measured nothing on real GPUs. It asks for 2, and PyTorch sees"
        in capsys.readouterr().err
    )
    assert not (lesson.parent / "out").exists()


def test_two_measurements_that_differ_need_two_names():
    first = Result(
        "step", {"n": [1]}, {"n": "", "step": ""}, [{"n": 1, "step": 2}], "on paper", code="a"
    )
    with pytest.raises(ValueError, match="step is measured twice.*another name"):
        record.joined(first, replace(first, code="b"))
    second = replace(
        first, parameters={"n": [2, 1]}, rows=[{"n": 2, "step": 3}, {"n": 1, "step": 4}]
    )
    assert record.joined(first, second).rows == [{"n": 1, "step": 4}, {"n": 2, "step": 3}]


def test_the_recordings_of_the_kit_belong_to_its_lessons():
    assert record.outdated() == []


@pytest.mark.gpu(2)
def test_on_real_gpus_the_cells_are_recorded(lesson):
    [file] = record.record(lesson, lesson.parent / "out")
    assert json.loads(file.read_text())["origin"]["machine"].startswith("2x NVIDIA")
