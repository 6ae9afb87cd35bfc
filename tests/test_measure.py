"""Making recordings: refused where there is no real GPU, whole where there is."""

import measure
import pytest

from labkit import machine
from labkit.experiments import Result, copy_speed


def test_an_unknown_experiment_is_refused(tmp_path):
    with pytest.raises(ValueError, match="there is no experiment 'nothing'; there are .*copy_overlap, copy_speed"):
        measure.measure(["nothing"], tmp_path)


def test_without_real_gpus_nothing_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(machine, "real_gpus", lambda: 0)
    with pytest.raises(RuntimeError, match="made on real GPUs: copy_speed need 1, and PyTorch sees 0"):
        measure.measure(["copy_speed"], tmp_path / "new")
    assert not (tmp_path / "new").exists()
    assert measure.main(["--output", str(tmp_path / "new")]) == 2
    assert "recordings are made on real GPUs" in capsys.readouterr().err


def test_every_experiment_of_the_kit_can_be_recorded():
    from labkit import recordings

    assert {stem.rsplit("_", 1)[0] for stem in recordings.names()} <= set(measure.EXPERIMENTS)


@pytest.mark.gpu
def test_a_recording_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(measure.EXPERIMENTS, "copy_speed", measure.Recorded(lambda: copy_speed(sizes=[4096], repeats=1)))
    (file,) = measure.measure(["copy_speed"], tmp_path)
    recording = Result.from_json(file.read_text())
    assert recording.badge.startswith("recorded on NVIDIA") and len(recording.rows) == 4
    assert machine.current() is None
