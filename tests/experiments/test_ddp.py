"""DistributedDataParallel beside DataParallel: who is measured where, and the recording."""

import pytest

import labkit
from labkit import recordings
from labkit.experiments import collect, ddp_beside_data_parallel
from labkit.experiments.ddp import DATA_PARALLEL, DDP, ddp_gain

pytestmark = pytest.mark.slow


def test_without_gpus_the_ranks_take_the_cpu_and_a_model_for_it():
    with labkit.use(gpus=2, virtual=True, quiet=True):
        run = ddp_beside_data_parallel(gpus=[1, 2], models={"small": [64, 32]}, repeats=1, on_cpu=[16, 16])
        result = collect(run)
    assert len(result.rows) == run.total == 6
    assert result.column("model", way=DATA_PARALLEL) == ["tiny", "tiny", "small", "small"]
    assert [(row["model"], row["gpus"], row["device"]) for row in result.rows if row["way"] == DDP] == [
        ("tiny", 1, "CPU"),
        ("tiny", 2, "CPU"),
    ]
    assert all(0 < seconds < 60 for seconds in result.column("seconds"))
    assert result.badge.startswith("virtual GPU") and "2 ranks on the CPU, gloo" in result.badge
    assert ddp_gain(result, 2) == {}  # times of two clocks are not compared


def test_on_four_h200s_a_process_for_each_gpu_is_faster():
    recording = recordings.load("ddp_beside_data_parallel")
    assert ddp_gain(recording, 4) == {"small": pytest.approx(3.5, rel=0.1), "large": pytest.approx(1.15, rel=0.1)}
    with labkit.use(gpus=4, virtual=True, quiet=True):
        assert ddp_beside_data_parallel(repeats=1, on_cpu=[8, 8]).result().recorded().column("seconds") == recording.column("seconds")


def test_bad_arguments_and_no_gpu_are_refused():
    with pytest.raises(RuntimeError, match="no GPU is in use"):
        ddp_beside_data_parallel()
    with labkit.use(gpus=2, virtual=True, quiet=True):
        with pytest.raises(ValueError, match="whole numbers from 1 to 2"):
            ddp_beside_data_parallel(gpus=[4])
        with pytest.raises(ValueError, match="repeats=0"):
            ddp_beside_data_parallel(gpus=[1], repeats=0)


@pytest.mark.gpu(2)
def test_two_real_gpus_run_both_ways():
    with labkit.use(gpus=2, virtual=False, quiet=True):
        result = collect(ddp_beside_data_parallel(gpus=[1, 2]))
    assert set(result.column("device")) == {"GPU"} and len(result.rows) == 8
    assert ddp_gain(result, 2)["small"] > 1
