"""The memory of a training step, as virtual GPUs measure it, against what real ones measured."""

import pytest

import labkit
from benchmarks.training_memory import TEN_SETTINGS, peak_of
from labkit.labs.experiment import recorded_result

NEAR = 0.005


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize("setting", TEN_SETTINGS, ids=str)
def test_a_virtual_gpu_measures_what_a_real_one_did(setting):
    [recorded] = recorded_result("training_memory").column("measured", setting=str(setting))
    used = labkit.use(gpus=setting.gpus, like="H200", virtual=True, quiet=True)
    with used, used.without_values():
        assert peak_of(setting) == pytest.approx(recorded, rel=NEAR)
