"""Does it fit, and what to change first."""

from itertools import pairwise

import pytest

import labkit
from labkit.experiments import fit
from labkit.experiments.budget import Setting
from labkit.experiments.networks import GPT, MLP

MEDIUM = GPT(width=1024, layers=24, heads=16)


def planned(setting: Setting, name: str) -> tuple[list[fit.Step], fit.Gpu]:
    on = fit.gpu(name)
    return list(fit.plan(setting, on)), on


@pytest.mark.parametrize(
    ("setting", "name", "changes", "said"),
    [
        (Setting(GPT(), 8), "T4", [], "It fits."),
        (Setting(MEDIUM, 8), "T4", ["4 micro-batches"], "It does not fit. First change: 4 micro-batches."),
        (Setting(MEDIUM, 1), "T4", [], "It fits."),
        (Setting(MLP(16384, 3), 64), "T4", ["a fused Adam"], "It does not fit. First change: a fused Adam."),
        (Setting(MLP(16384, 12), 64), "A100", ["momentum instead of Adam"], "It does not fit. First change: momentum instead of Adam."),
        (
            Setting(GPT(1600, 48, 25), 8),
            "L4",
            ["8 micro-batches", "momentum instead of Adam", "checkpointing"],
            "It does not fit. First change: 8 micro-batches; then momentum instead of Adam, checkpointing.",
        ),
        (Setting(MLP(65536, 2), 64, optimizer="SGD"), "T4", [], "It does not fit, and none of these changes helps"),
    ],
)
def test_the_plan_says_what_to_change_first(setting, name, changes, said):
    steps, on = planned(setting, name)
    assert [step.change for step in steps[1:]] == changes
    assert fit.answer(steps, on).startswith(said)


@pytest.mark.parametrize("name", ["T4", "L4", "A100", "H200"])
@pytest.mark.parametrize("batch", [1, 8, 64, 512])
def test_each_change_saves_memory_until_it_fits(name, batch):
    steps, on = planned(Setting(GPT(1600, 48, 25), batch), name)
    assert all(later.budget.peak < before.budget.peak for before, later in pairwise(steps))
    assert not any(on.holds(step.budget) for step in steps[:-1])
    assert all(step.setting.batch == batch and step.setting.network == steps[0].setting.network for step in steps)
    assert fit.answer(steps, on).endswith("Even so it does not fit.") != on.holds(steps[-1].budget)


def test_newer_gpus_are_told_to_take_bfloat16():
    changes = dict(fit.changes(Setting(GPT(), 8), fit.gpu("A100")))
    assert changes["autocast to bfloat16"].precision == "autocast bfloat16"
    assert "autocast to float16" in dict(fit.changes(Setting(GPT(), 8), fit.gpu("T4")))


def test_the_gpu_in_use_has_the_room_of_its_model():
    with labkit.use(gpus=1, like="L4", virtual=True, quiet=True):
        assert fit.gpu() == fit.gpu("L4")
    with labkit.use(gpus=1, like="L4", memory="4GiB", virtual=True, quiet=True):
        assert fit.gpu().memory < 4 << 30


def test_unknown_gpus_are_refused():
    with pytest.raises(ValueError, match="no profile of a GPU named 'K80'; choose one of T4"):
        fit.gpu("K80")
    with pytest.raises(RuntimeError, match="no GPU is in use"):
        fit.gpu()
