"""Making recordings, and the report of them beside virtual GPUs; real GPUs are pretended here."""

import re

import nbformat
import pytest

from benchmarks import measure, measured_report
from gpulessons.lesson_01.labs import copy_speed
from labkit import machine
from labkit.labs import Result

CELLS = ["import labkit\nlabkit.use(gpus=2)", "assert False, 'a | b'", "raise KeyError(1)", "1 + 1"]


def test_an_unknown_experiment_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match="there is no experiment 'nothing'; there are .*copy_speed"
    ):
        measure.measure(["nothing"], tmp_path)


def test_without_real_gpus_nothing_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(machine, "real_gpus", lambda: 0)
    with pytest.raises(
        RuntimeError, match="made on real GPUs: copy_speed need 1, and PyTorch sees 0"
    ):
        measure.measure(["copy_speed"], tmp_path / "new")
    assert not (tmp_path / "new").exists()
    assert measure.main(["--output", str(tmp_path / "new")]) == 2
    assert "recordings are made on real GPUs" in capsys.readouterr().err


def test_every_experiment_of_the_kit_can_be_recorded():
    """Check all recordings, except those with fingerprints, which benchmarks/record.py makes."""
    from labkit import courses

    recordings = [Result.from_json(file.read_text()) for file in courses.files("recordings/*.json")]
    assert {each.name for each in recordings if each.code is None} <= set(measure.EXPERIMENTS)


@pytest.mark.gpu
def test_a_recording_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(
        measure.EXPERIMENTS,
        "copy_speed",
        measure.Recorded(lambda: copy_speed(sizes=[4096], repeats=1)),
    )
    (file,) = measure.measure(["copy_speed"], tmp_path)
    recording = Result.from_json(file.read_text())
    assert recording.badge.startswith("recorded on NVIDIA") and len(recording.rows) == 4
    assert machine.current() is None


# The report


def two_copies():
    """Return a result of the experiment with a small and a large copy."""
    return copy_speed(sizes=[4 << 10, 16 << 20], repeats=1)


@pytest.fixture
def lesson(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_VIRTUAL", "1")
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(source, id=f"c{i}") for i, source in enumerate(CELLS)]
    )
    notebook.cells[2].metadata["tags"] = ["raises-exception"]
    nbformat.write(notebook, tmp_path / "00_short.ipynb")
    return tmp_path / "00_short.ipynb"


@pytest.fixture
def pretended(monkeypatch, lesson):
    """Pretend that there is one real GPU, with three experiments of one lesson."""
    use = machine.use
    monkeypatch.setattr(machine, "real_gpus", lambda: 1)
    monkeypatch.setattr(
        machine,
        "use",
        lambda gpus, like="H200", virtual=None, quiet=True: use(
            gpus, like=like, virtual=True, quiet=True
        ),
    )
    monkeypatch.setattr(measure, "_give_back", lambda: None)  # what only a build for CUDA has
    monkeypatch.setattr(measured_report, "lessons", lambda: [lesson])

    def broken():
        raise RuntimeError("CUDA error | here")

    some = {"copy_speed": measure.Recorded(two_copies), "ddp_seconds": measure.Recorded(broken)}
    monkeypatch.setattr(
        measure, "EXPERIMENTS", some | {"pipeline_step": measure.Recorded(broken, gpus=4)}
    )


@pytest.mark.slow
def test_a_report_says_how_everything_went(pretended, tmp_path, capsys):
    assert measure.main(["--report", "--output", str(tmp_path / "out")]) == 0
    recording, page = (
        tmp_path / "out" / name for name in ("copy_speed_h200.json", "report_h200_x1.md")
    )
    assert capsys.readouterr().out == f"wrote {recording}\nwrote {page}\n"
    assert machine.current() is None
    assert Result.from_json(recording.read_text()).name == "copy_speed"
    text = page.read_text()
    assert text.startswith("# Measured on NVIDIA H200\n")
    assert (
        "| copy_speed | 1 | a large copy moves far more bytes a second than a small one | yes | "
        "yes |" in text
    )
    assert "| ddp_seconds | 1 | *failed: RuntimeError: CUDA error \\| here* |  |  |" in text
    assert "| pipeline_step | 4 | *needs 4 GPUs* |  |  |" in text
    assert "| copy_speed | seconds | 8 | 1.00 | 1.00 | 1.00 |" in text
    assert (
        "| 00_short | 4 | cell c1: AssertionError: a \\| b |" in text and "2 virtual GPUs" in text
    )


@pytest.mark.slow
def test_a_report_goes_on_where_it_was_and_tries_again_what_failed(
    pretended, lesson, tmp_path, monkeypatch
):
    monkeypatch.setattr(measured_report, "virtually", lambda *asked: "not asked here")
    out = tmp_path / "out"
    list(measure.report(out))
    made = measured_report.Report(out / "report_h200_x1.json")
    assert made.failures == {"ddp_seconds": "RuntimeError: CUDA error | here"} and [
        len(outcome.failed) for outcome in made.outcomes
    ] == [1]
    measure.EXPERIMENTS["ddp_seconds"] = measure.Recorded(two_copies)
    assert [file.name for file in measure.report(out)] == [
        "ddp_seconds_h200.json",
        "report_h200_x1.md",
    ]
    assert not measured_report.Report(made.file).failures
    notebook = nbformat.read(lesson, as_version=4)
    del notebook.cells[1]
    nbformat.write(notebook, lesson)
    assert [file.name for file in measure.report(out)] == ["report_h200_x1.md"]
    assert [outcome.failed for outcome in measured_report.Report(made.file).outcomes] == [[]]
    assert "failed: " not in (out / "report_h200_x1.md").read_text()


@pytest.mark.slow
def test_a_report_of_another_day_is_made_anew(pretended, tmp_path, monkeypatch):
    monkeypatch.setattr(measured_report, "virtually", lambda *asked: "not asked here")
    list(measure.report(tmp_path))
    for name in ("copy_speed_h200.json", "report_h200_x1.json"):
        text = (tmp_path / name).read_text()
        (tmp_path / name).write_text(re.sub(r'"date": ?"[-0-9]+"', '"date": "2020-02-02"', text))
    assert [file.name for file in measure.report(tmp_path)] == [
        "copy_speed_h200.json",
        "report_h200_x1.md",
    ]
    assert "2020" not in "".join(file.read_text() for file in tmp_path.glob("*_*.*"))


@pytest.mark.slow
def test_a_report_does_not_write_over_the_recordings_of_another_machine(
    pretended, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(measured_report, "virtually", lambda *asked: "not asked here")
    list(measure.report(tmp_path))
    made, other = tmp_path / "report_h200_x1.json", tmp_path / "report_h200_x4.json"
    other.write_text(
        made.read_text().replace('"machine": "NVIDIA H200"', '"machine": "4x NVIDIA H200"')
    )
    # the same machine on another number of its GPUs
    assert [file.name for file in measure.report(tmp_path)] == ["report_h200_x1.md"]
    other.write_text(other.read_text().replace('"cores": ', '"cores": 9'))
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    assert measure.main(["--report", "--output", str(tmp_path)]) == 2
    assert f"{other} is of another machine" in capsys.readouterr().err
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


@pytest.mark.slow
def test_where_no_gpu_is_the_page_is_written_anew_beside_todays_virtual_gpus(
    pretended, monkeypatch, tmp_path
):
    *_, page = measure.report(tmp_path)
    said = page.read_text()
    page.write_text("")
    monkeypatch.setattr(machine, "real_gpus", lambda: 0)
    assert list(measure.report(tmp_path)) == [page] and page.read_text() == said


def test_without_real_gpus_there_is_no_report(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(machine, "real_gpus", lambda: 0)
    assert measure.main(["--report", "--output", str(tmp_path / "new")]) == 2
    assert "made on real GPUs. PyTorch sees none, and" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_report_is_of_all_experiments(capsys):
    assert measure.main(["--report", "copy_speed"]) == 2
    assert "a report is of all experiments: name none" in capsys.readouterr().err


def test_a_gpu_without_a_profile_has_nothing_beside_it():
    assert (
        measured_report.virtually("copy_speed", two_copies, 1, "NVIDIA GeForce GTX 480")
        == "no profile of this GPU"
    )


def test_a_conclusion_that_differs_stands_out(monkeypatch):
    pairs = [measured_report.Pair("data_parallel_step", 4, steps(2.0), steps(0.2))]
    text = measured_report.page(
        "Measured",
        "today",
        pairs,
        [measured_report.Outcome("00_here", 3, [], 2.0, [])],
        ["01_next"],
    )
    assert text.endswith(
        "| 00_here | 3 | none | 2 |  |\n| 01_next |  | *not run as it is now* |  |  |\n"
    )
    assert "The lessons" not in measured_report.page("Measured", "today", pairs, [])
    assert (
        "| data_parallel_step | 4 | DataParallel is slower than one GPU for the small model | yes "
        "| **no** |" in text
    )
    assert "| data_parallel_step | seconds | 4 | 0.55 | 0.10 | 1.00 |" in text


def steps(seconds: float) -> Result:
    """Return steps on four GPUs that take this long. On one GPU they take a second."""
    rows = [
        {"gpus": gpus, "model": model, "seconds": seconds if gpus == 4 else 1.0}
        for model in ("small", "large")
        for gpus in (1, 4)
    ]
    return Result(
        "data_parallel_step", {}, {"gpus": "", "model": "", "seconds": "seconds"}, rows, ""
    )


def test_other_rows_are_not_compared():
    other = steps(1.0)
    other.rows.pop()
    assert measured_report.ratios(steps(1.0), other) == {}
