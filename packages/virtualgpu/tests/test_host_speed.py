"""The host's speed is measured in the same way as that of the recorded H200s."""

import pytest

import virtualgpu
from virtualgpu import host_speed as host


@pytest.mark.parametrize("times", [1.0, 2.5])
def test_a_virtual_gpus_training_step_gives_the_host_that_it_was_given(times, monkeypatch):
    monkeypatch.setattr(host, "ROUNDS", 1)
    monkeypatch.setattr(host, "STEPS", 1)
    with virtualgpu.use(1, like="T4", values=False, host=times):
        assert host.measure_host(virtualgpu.host_time) == pytest.approx(times, rel=0.01)


def test_without_a_gpu_it_is_what_a_small_operator_takes_on_the_cpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    ticks = iter(range(100))
    seconds = 1000 * host.RECORDED.cpu_launch_seconds
    assert host.measure_host(lambda: 3 * seconds * next(ticks)) == pytest.approx(3)
    assert 0.01 < host.measure_host() < 100
