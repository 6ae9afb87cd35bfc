"""Ways to divide a model among GPUs: the experiment, the figure, and the lab."""

import pytest

from gpulessons.lesson_11.labs import StrategiesLab, strategy_steps
from gpulessons.lesson_11.labs.strategies import COLUMNS, GPUS, MODELS, PER_NODE, WAYS, least, plot_strategy_steps
from labkit.labs import Result, collect

from ...learner import predict_and_run as run

PEAKS = {("FSDP", 8): 20, ("FSDP", 32): 16, ("tensor", 8): 32, ("DDP", 8): None}  # GiB by way and GPUs, on paper


def rows(settings):
    for way, gpus in settings:
        peak, named = PEAKS[way, gpus], {"setting": f"{way} on {gpus}", "way": way, "gpus": gpus}
        numbers = {"seconds": 0.5, "held": 4 << 30, "peak": peak and peak << 30, "sent": 8 << 30}
        yield named | (numbers if peak else dict.fromkeys(numbers))


def steps(*settings, model="6.4 billion") -> Result:
    return Result("strategy_steps", {"settings": settings, "model": model}, COLUMNS, list(rows(settings)), "measured on paper")


@pytest.mark.slow
def test_what_a_rank_holds_and_sends_is_what_the_arithmetic_of_zero_says():
    model, ranks = "1.6 billion", 8
    blocks, width = MODELS[model]
    parameters = blocks * (12 * width**2 + 13 * width)
    found = {row["way"]: row for row in collect(strategy_steps([(way, ranks) for way in WAYS], model)).rows}
    share = 1 / ranks
    held = {  # bytes a parameter: itself, its gradient where it stays, and two numbers of AdamW
        "DDP": 4 + 4 + 8,
        "ZeRO-1": 4 + 4 + 8 * share,
        "ZeRO-2": 4 + 4 * share + 8 * share,
        "FSDP": 4 * share + 8 * share,
    }
    for way, each in held.items():
        assert each * parameters <= found[way]["held"] <= each * parameters + (96 << 20)  # with cuBLAS' workspace
    once = (ranks - 1) * share  # of what one half of a ring moves
    sent = {  # bytes a parameter, by rings; FSDP gathers in bfloat16, twice
        "DDP": 2 * 4 * once,
        "ZeRO-1": (2 * 4 + 4) * once,
        "ZeRO-2": (4 + 4) * once,
        "FSDP": (2 * 2 + 4) * once,
    }
    for way, each in sent.items():
        assert found[way]["sent"] == pytest.approx(each * parameters, rel=0.01)
    peaks = [found[way]["peak"] for way in ("DDP", "ZeRO-1", "ZeRO-2", "FSDP")]
    assert peaks == sorted(peaks, reverse=True)
    assert found["tensor"]["sent"] == found["FSDP × tensor"]["sent"]  # on one node both cut among all ranks


@pytest.mark.slow
def test_the_peak_is_that_of_a_step_and_not_of_building_the_whole_model_first():
    blocks, width = MODELS["6.4 billion"]
    whole = 4 * blocks * (12 * width**2 + 13 * width)  # bytes of the parameters, which every rank has before they are divided
    few, many = collect(strategy_steps([("FSDP", 8), ("FSDP", 32)])).rows
    assert many["held"] < few["held"] < few["peak"] < whole
    assert few["peak"] - many["peak"] >= few["held"] - many["held"]  # the shares are smaller, and the rest of the step is no larger


@pytest.mark.slow
def test_a_model_that_ddp_cannot_hold_fits_when_its_parameters_are_divided():
    ddp, fsdp = collect(strategy_steps([("DDP", 8), ("FSDP", 8)], "12.9 billion")).rows
    assert ddp["peak"] is ddp["seconds"] is ddp["held"] is ddp["sent"] is None
    assert fsdp["held"] < fsdp["peak"] < 80e9


def test_each_world_has_its_nodes_and_the_program_its_arguments(monkeypatch):
    asked = []
    monkeypatch.setattr(
        "gpulessons.simulated_worlds.results",
        lambda script, worlds: asked.extend(worlds) or [{"seconds": 1.0, "held": 1, "peak": 2, "sent": 3} for _ in worlds],
    )
    result = collect(strategy_steps([("DDP", gpus) for gpus in GPUS], "12.9 billion"))
    assert [(world["world"], world["nodes"]) for world in asked] == [(gpus, gpus // PER_NODE) for gpus in GPUS]
    assert all(world["arguments"] == ["DDP", *MODELS["12.9 billion"], 2048] for world in asked)
    assert result.column("setting") == ["DDP on 8", "DDP on 16", "DDP on 32"]


def test_what_is_no_choice_is_refused_before_a_world_is_simulated():
    for settings, model, said in (
        ([("FSDP3", 8)], "6.4 billion", "'FSDP3' is no choice here: there are 'DDP', 'ZeRO-1'"),
        ([("DDP", 8), ("DDP", 7)], "6.4 billion", "7 is no choice here: there are 8, 16, 32"),
        ([("DDP", 8)], "7 billion", "'7 billion' is no choice here: there are '1.6 billion'"),
    ):
        with pytest.raises(ValueError, match=said):
            strategy_steps(settings, model)


def test_the_words_hold_finding_settings_prediction_and_badge():
    assert plot_strategy_steps(steps(("DDP", 8), ("FSDP", 8)), 5).alt == (
        "FSDP on 8 GPUs has the lowest peak tried: 20 GiB a rank. DDP on 8 GPUs: out of memory. FSDP on 8 GPUs: 4 GiB held, 20 GiB at the "
        "peak, 8 GiB sent, 500 ms a step. Predicted: 5 GiB. Measured on paper."
    )
    assert plot_strategy_steps(steps(("DDP", 8))).title == "Nothing tried fits"
    assert plot_strategy_steps(steps(), 5).title == "Not measured yet: a model divided among GPUs"
    assert least(steps(("DDP", 8))) is None


def test_a_bar_reaches_from_what_is_held_to_the_peak_and_the_prediction_stands_at_the_last(drawn):
    plot_strategy_steps(steps(("FSDP", 32), ("DDP", 8), ("tensor", 8)), 50)
    (axes,) = drawn[-1].axes
    assert [bar.get_width() for bar in axes.patches] == [16, 4, 0, 0, 32, 4]
    assert axes.patches[0].get_facecolor() != axes.patches[4].get_facecolor()
    assert [text.get_text() for text in axes.texts] == ["500 ms, 8 GiB", "out of memory", "500 ms, 8 GiB", "a step, sent"]
    (marker,) = axes.lines
    assert (*marker.get_xdata(), *marker.get_ydata()) == (50, 2)
    assert axes.get_xlim()[1] > 50


@pytest.fixture
def make_lab(monkeypatch):
    """Of a lab whose worlds are not simulated."""
    monkeypatch.setattr("gpulessons.lesson_11.labs.strategies._points", lambda settings, model: rows(settings))
    return StrategiesLab


def test_prediction_and_result_come_together(make_lab):
    lab = make_lab()
    said = run(lab, "40")
    assert said.endswith("A rank needs 20 GiB; you predicted 40, which is 2.0 times too high. It holds 4 GiB between two steps.</p>")
    assert "Predicted: 40 GiB." in lab.picture.value
    assert "A good prediction!" in run(lab, "22")


def test_settings_of_one_model_are_compared_and_one_that_does_not_fit_says_so(make_lab):
    lab = make_lab()
    run(lab, "20")
    lab.way.value = "DDP"
    assert lab.run_button.disabled and "First predict" in lab.message.value
    assert "DDP on 8 GPUs: out of memory. What does each rank hold whole? Divide that, too." in run(lab, "20")
    assert "FSDP on 8 GPUs: 4 GiB held" in lab.picture.value and "DDP on 8 GPUs: out of memory" in lab.picture.value
    lab.model.value, lab.way.value = "1.6 billion", "tensor"
    run(lab, "20")
    assert "FSDP" not in lab.picture.value


def test_a_run_that_is_stopped_leaves_the_prediction_open(make_lab):
    said = make_lab().verdict(steps(), 3)
    assert said == "The peak was not measured, so your prediction of 3 GiB stays open. Press Run to try again."
