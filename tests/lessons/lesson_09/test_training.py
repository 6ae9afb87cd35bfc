"""The memory of a training step, as virtual GPUs measure it, against what real ones measured."""

from dataclasses import replace

import pytest

from benchmarks.training_memory import TEN_SETTINGS
from gpulessons.lesson_09.training import Setting, fits, measured, room
from gpulessons.networks import GPT, MLP
from labkit.labs.experiment import recorded_result
from virtualgpu import profiles

NEAR = 0.005


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize("setting", TEN_SETTINGS, ids=str)
def test_a_virtual_gpu_measures_what_a_real_one_did(setting):
    [recorded] = recorded_result("training_memory").column("measured", setting=str(setting))
    assert measured(setting, "H200").peak == pytest.approx(recorded, rel=NEAR)


@pytest.mark.slow
def test_the_memory_follows_the_setting():
    plain = Setting(GPT(256, 4, 4, 256, 1000), 64)
    found = measured(plain, "A100")
    parameters = found.terms["parameters"]
    assert found.phase == "backward"
    assert found.terms["optimizer state"] == pytest.approx(2 * parameters, rel=0.05)
    assert measured(replace(plain, optimizer="SGD"), "A100").terms["optimizer state"] == 0
    half = measured(replace(plain, micro_batches=2), "A100").terms
    assert half["activations"] == pytest.approx(found.terms["activations"] / 2, rel=0.05)
    assert half["gradients"] == pytest.approx(parameters, rel=0.05)
    assert measured(replace(plain, micro_batches=4), "A100").peak < measured(replace(plain, micro_batches=2), "A100").peak
    assert measured(replace(plain, checkpointing=True), "A100").terms["activations"] < found.terms["activations"] / 2
    shared = measured(replace(plain, gpus=4), "A100").terms
    assert shared["other"] == pytest.approx(parameters + 64 * 256 * 16 / 4, rel=0.05)  # buckets, tokens and targets
    assert shared["activations"] == pytest.approx(found.terms["activations"] / 4, rel=0.05)


@pytest.mark.slow
def test_large_weights_are_fullest_in_the_optimizers_step():
    assert measured(Setting(MLP(4096, 4), 1), "T4").phase == "step"


@pytest.mark.slow
def test_more_memory_than_the_gpu_has_is_measured_too():
    found = measured(Setting(MLP(16384, 12), 64), "T4")
    assert found.peak > room("T4") and not fits(found, "T4")


def test_the_room_of_a_gpu_is_its_memory_without_the_context():
    profile = profiles.load("L4")
    assert room("L4") == profile.total_memory - profile.context_bytes


def test_unknown_gpus_are_refused():
    for ask in (room, lambda model: measured(Setting(MLP(), 8), model)):
        with pytest.raises(ValueError, match="no profile of a GPU named 'K80'; choose one of T4"):
            ask("K80")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"precision": "float8"}, "precision='float8': choose one of 'float32', 'autocast bfloat16', 'autocast float16'"),
        ({"optimizer": "Lion"}, "optimizer='Lion': choose one of 'SGD'"),
        ({"batch": 0}, "batch=0: give a whole number from 1"),
        ({"batch": 2.0}, "batch=2.0"),
        ({"gpus": 17}, "gpus=17: give a whole number from 1 to 16"),
        ({"gpus": 4, "micro_batches": 4}, "batch=8: 4 GPU\\(s\\) and 4 micro-batch\\(es\\) need a row each"),
        ({"spread": "FSDP"}, "spread='FSDP': choose one of 'DataParallel', 'DDP'"),
    ],
)
def test_a_setting_that_is_none_is_refused(change, said):
    with pytest.raises(ValueError, match=said):
        replace(Setting(MLP(), 8), **change)
