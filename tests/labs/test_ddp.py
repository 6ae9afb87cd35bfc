"""DistributedDataParallel beside DataParallel, measured and drawn."""

import pytest

import labkit
from labkit.labs import Result, collect, ddp_beside_data_parallel, plot_ddp_beside_data_parallel, recorded_result
from labkit.labs.ddp import COLUMNS, DATA_PARALLEL, DDP, ddp_gain


@pytest.mark.slow
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


@pytest.mark.slow
def test_on_four_h200s_a_process_for_each_gpu_is_faster():
    recording = recorded_result("ddp_beside_data_parallel")
    assert ddp_gain(recording, 4) == {"small": pytest.approx(3.5, rel=0.1), "large": pytest.approx(1.15, rel=0.1)}
    with labkit.use(gpus=4, virtual=True, quiet=True):
        assert ddp_beside_data_parallel(repeats=1, on_cpu=[8, 8]).result().recorded().column("seconds") == recording.column("seconds")


@pytest.mark.slow
def test_bad_arguments_and_no_gpu_are_refused():
    with pytest.raises(RuntimeError, match="no GPU is in use"):
        ddp_beside_data_parallel()
    with labkit.use(gpus=2, virtual=True, quiet=True):
        with pytest.raises(ValueError, match="whole numbers from 1 to 2"):
            ddp_beside_data_parallel(gpus=[4])
        with pytest.raises(ValueError, match="repeats=0"):
            ddp_beside_data_parallel(gpus=[1], repeats=0)


@pytest.mark.slow
@pytest.mark.gpu(2)
def test_two_real_gpus_run_both_ways():
    with labkit.use(gpus=2, virtual=False, quiet=True):
        result = collect(ddp_beside_data_parallel(gpus=[1, 2]))
    assert set(result.column("device")) == {"GPU"} and len(result.rows) == 8
    assert ddp_gain(result, 2)["small"] > 1


BADGE = "measured on paper"


def steps(times, badge=BADGE, **more) -> Result:
    """A result from {(model, way, device): {GPUs: seconds}}."""
    rows = [
        {"gpus": gpus, "model": model, "way": way, "device": device, "width": 8, "batch": 4, "seconds": seconds}
        for (model, way, device), values in times.items()
        for gpus, seconds in values.items()
    ]
    return Result("ddp_beside_data_parallel", {}, COLUMNS, rows, badge, **more)


HERE = steps({("tiny", DATA_PARALLEL, "GPU"): {1: 0.001, 2: 0.002}, ("tiny", DDP, "CPU"): {1: 0.004, 2: 0.003}}, "virtual GPU")


THERE = steps(
    {("small", DATA_PARALLEL, "GPU"): {1: 0.002, 4: 0.012}, ("small", DDP, "GPU"): {1: 0.002, 4: 0.003}},
    "recorded on 4× NVIDIA H200",
    origin={"machine": "4x NVIDIA H200"},
)


def test_times_of_two_clocks_are_not_compared_and_the_recorded_ones_are(drawn):
    figure = plot_ddp_beside_data_parallel(HERE, THERE)
    assert figure.title == "DDP on 4 GPUs: small model 4.0× as fast as DataParallel"
    assert "Tiny model, DataParallel: 1 ms on 1, 2 ms on 2; tiny model, DistributedDataParallel: 4 ms on 1, 3 ms on 2." in figure.alt
    assert "Recorded on 4× NVIDIA H200: small model, DataParallel: 2 ms on 1, 12 ms on 4" in figure.alt
    assert [[line.get_linestyle() for line in axes.lines] for axes in drawn[-1].axes] == [["--", "--", "-", "-"]] * 2
    assert [text.get_text() for text in drawn[-1].legends[0].get_texts()] == [
        "DataParallel (here: virtual GPUs)",
        "DDP (here: ranks on the CPU)",
        "recorded",
    ]


def test_what_was_measured_here_comes_before_what_was_recorded():
    measured = steps({("small", DATA_PARALLEL, "GPU"): {1: 0.002, 2: 0.006}, ("small", DDP, "GPU"): {1: 0.002, 2: 0.003}})
    assert plot_ddp_beside_data_parallel(measured, THERE).title == "DDP on 2 GPUs: small model 2.0× as fast as DataParallel"
    assert plot_ddp_beside_data_parallel(HERE).title == "Not measured yet: both ways on the same GPUs"
