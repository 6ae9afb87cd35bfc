"""Whether a training fits: plans, the figure of one, and the lab."""

from itertools import pairwise

import pytest
from learner import predict_and_run as run

import labkit
from labkit.lab_parts.budget import IN_USE, GpuMemory, Setting, gpu_of
from labkit.lab_parts.measured_memory import NOT_MEASURED, RAN_OUT
from labkit.labs import GPT, MLP, BudgetLab, Result, collect, memory_plan, plot_memory_plan
from labkit.labs.fitting import COLUMNS, TERMS, PlanStep, answer, plan
from labkit.labs.fitting import changes as changes_of

MEDIUM = GPT(width=1024, layers=24, heads=16)


def planned(setting: Setting, name: str) -> tuple[list[PlanStep], GpuMemory]:
    on = gpu_of(name)
    return list(plan(setting, on)), on


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
    assert answer(steps, on).startswith(said)


@pytest.mark.parametrize("name", ["T4", "L4", "A100", "H200"])
@pytest.mark.parametrize("batch", [1, 8, 64, 512])
def test_each_change_saves_memory_until_it_fits(name, batch):
    steps, on = planned(Setting(GPT(1600, 48, 25), batch), name)
    assert all(later.budget.peak < before.budget.peak for before, later in pairwise(steps))
    assert not any(on.holds(step.budget) for step in steps[:-1])
    assert all(step.setting.batch == batch and step.setting.network == steps[0].setting.network for step in steps)
    assert answer(steps, on).endswith("Even so it does not fit.") != on.holds(steps[-1].budget)


def test_a_plan_is_measured_where_it_can_be():
    with labkit.use(gpus=1, memory="1.5GiB", virtual=True, quiet=True):
        result = collect(memory_plan(Setting(MLP(4096, 4), 8192)))
        assert result.parameters["changes"] == result.column("change")
        assert result.column("measured")[0] == RAN_OUT and result.column("peak")[0] > result.column("room")[0]
        assert result.column("measured")[-1] == pytest.approx(result.column("peak")[-1], rel=0.05)
        for row in result.rows:
            assert sum(row[name] for name in TERMS) == row["peak"]
        elsewhere = collect(memory_plan(Setting(MLP(256, 2), 512), "L4"))
        assert elsewhere.column("measured") == [NOT_MEASURED] and elsewhere.parameters["gpu"] == "NVIDIA L4"
        assert elsewhere.badge == "by formula, for NVIDIA L4"
        assert collect(memory_plan(Setting(MLP(256, 2), 512, gpus=2))).column("measured") == [NOT_MEASURED]


def test_a_plan_for_what_is_not_there_is_refused():
    with labkit.use(virtual=True, quiet=True):
        with pytest.raises(ValueError, match="no profile of a GPU named"):
            memory_plan(Setting(MLP(), 8), "K80")
        with pytest.raises(ValueError, match="choose autocast float16"):
            memory_plan(Setting(GPT(), 8, "autocast bfloat16"), "T4")


def test_newer_gpus_are_told_to_take_bfloat16():
    changes = dict(changes_of(Setting(GPT(), 8), gpu_of("A100")))
    assert changes["autocast to bfloat16"].precision == "autocast bfloat16"
    assert "autocast to float16" in dict(changes_of(Setting(GPT(), 8), gpu_of("T4")))


def test_the_gpu_in_use_has_the_room_of_its_model():
    with labkit.use(gpus=1, like="L4", virtual=True, quiet=True):
        assert gpu_of() == gpu_of("L4")
    with labkit.use(gpus=1, like="L4", memory="4GiB", virtual=True, quiet=True):
        assert gpu_of().memory < 4 << 30


def test_unknown_gpus_are_refused():
    with pytest.raises(ValueError, match="no profile of a GPU named 'K80'; choose one of T4"):
        gpu_of("K80")
    with pytest.raises(RuntimeError, match="no GPU is in use"):
        gpu_of()


GIB = 1 << 30


def result_of(*peaks: float, room: float = 4, measured: tuple[float, ...] = ()) -> Result:
    """A result_of whose steps have these peaks in GiB, all of it activations."""
    changes = ["as chosen", "checkpointing", "a fused Adam"][: len(peaks)]
    rows = []
    for place, (change, peak) in enumerate(zip(changes, peaks, strict=True)):
        terms = dict.fromkeys(TERMS, 0) | {"activations": round(peak * GIB)}
        seen = measured[place] if place < len(measured) else 0
        seen = seen if seen < 0 else round(seen * GIB)
        rows.append({"change": change, "moment": "forward of x", "peak": round(peak * GIB), "room": room * GIB, "measured": seen, **terms})
    parameters = {"setting": "MLP()", "gpu": "some GPU", "answer": "It fits.", "changes": changes}
    return Result("memory_plan", parameters, COLUMNS, rows, "measured on paper")


@pytest.mark.parametrize(
    ("result", "title"),
    [
        (result_of(1), "Needs 1 GiB, some GPU has 4 GiB: it fits"),
        (result_of(6, 3), "Needs 6 GiB, some GPU has 4 GiB: enough with checkpointing"),
        (result_of(6, 5, 3), "Needs 6 GiB, some GPU has 4 GiB: first change checkpointing"),
        (result_of(), "Not worked out yet: some GPU"),
    ],
)
def test_the_title_says_whether_it_fits_and_what_to_change(result, title, drawn):
    assert plot_memory_plan(result).title == title


def test_the_words_hold_terms_measurement_and_prediction():
    alt = plot_memory_plan(result_of(6, 3, measured=(-1, 2.9)), prediction=2.5).alt
    assert "As chosen: 6 GiB at forward of x: activations 6 GiB; memory ran out." in alt
    assert "Checkpointing: 3 GiB at forward of x: activations 3 GiB; measured 2.9 GiB." in alt
    assert "Predicted: 2.5 GiB." in alt


@pytest.fixture
def lab():
    with labkit.use(gpus=1, virtual=True, quiet=True):
        yield BudgetLab(MLP(256, 2), batch=512)


def test_what_fits_is_measured_on_the_gpu_in_use(lab):
    said = run(lab, "0.02")
    assert "The formula says 0.0208 GiB, at its fullest in" in said and "you predicted 0.02. A good prediction!" in said
    assert "When it was tried: 0.0208 GiB. Of 14.4 GiB on Tesla T4: It fits." in said
    assert "Predicted: 0.02 GiB." in lab.picture.value


def test_what_does_not_fit_is_told_what_to_change(lab):
    lab.network.value, lab.batch.value, lab.gpu.value = "GPT-2 medium", "8", "T4"
    assert lab.run_button.disabled
    assert "It does not fit. First change: 4 micro-batches." in run(lab, "9")
    assert "Measured" not in lab.message.value


def test_more_gpus_leave_less_on_each(lab):
    lab.network.value, lab.batch.value, lab.gpus.value, lab.gpu.value = "GPT-2 medium", "8", 4, "A100"
    run(lab, "9")
    assert lab.result.rows[0]["buckets"] > 0 and "It fits." in lab.message.value


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"batch": "many"}, "“many” is no batch: type a whole number of rows from 1 to 1048576."),
        ({"batch": "-3"}, "“-3” is no batch"),
        ({"batch": "²"}, "is no batch"),
        ({"batch": ""}, "“” is no batch"),
        ({"batch": "9" * 30}, "is no batch"),
        ({"batch": "2", "gpus": 4}, "4 GPU(s) and 1 micro-batch(es) need a row each"),
        ({"network": "GPT-2 small", "precision": "autocast bfloat16", "gpu": "T4"}, "choose autocast float16"),
    ],
)
def test_silly_input_is_answered_without_a_failure(lab, change, said):
    for name, value in change.items():
        getattr(lab, name).value = value
    answered = run(lab, "1")
    assert said in answered and "failed" not in answered and lab.picture.value == ""
    lab.network.value, lab.batch.value, lab.gpus.value, lab.precision.value, lab.gpu.value = "your own", "512", 1, "float32", IN_USE
    assert "It fits." in run(lab, "1")


def test_choices_are_locked_while_it_runs_and_a_change_asks_for_another_prediction(lab):
    lab.answer.value = "1"
    lab.predict_button.click()
    lab.checkpointing.value = True
    assert lab.prediction is None and lab.run_button.disabled
    lab._set_buttons(running=True)
    assert lab.network.disabled and lab.batch.disabled and lab.gpu.disabled


def test_a_run_that_stops_early_leaves_the_prediction_open(lab):
    nothing = memory_plan(lab.setting()).result()
    assert "stays open" in lab.verdict(nothing, 1.0)
