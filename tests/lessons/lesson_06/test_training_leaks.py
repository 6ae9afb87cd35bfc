"""A training with leaks: what it keeps, the figure, and the lab."""

import gc
from dataclasses import replace

import pytest
import torch

import labkit
from gpulessons.lesson_06.labs import (
    ALONE,
    COLUMNS,
    LEAKS,
    NO_LEAK,
    LeakLab,
    growth,
    leaky_training,
    plot_leaky_training,
    script,
)
from labkit.labs import Result, collect

from ...learner import predict_and_run as run

MIB = 1 << 20
GRAPH = "the autograd graph of global `losses["


@pytest.fixture(scope="module", autouse=True)
def gpu():
    """A virtual GPU, without the objects of pytest and torch in the search for holders.

    This makes the search quick.
    """
    with labkit.use(virtual=True, quiet=True):
        gc.collect()
        gc.freeze()
        yield
        gc.unfreeze()


def test_each_leak_keeps_what_its_tensors_take():
    result = collect(leaky_training(steps=3))
    kept = growth(result)
    assert list(kept) == list(ALONE)
    assert [
        kept[leak] / MIB for leak in ("summed losses", "hook", "kept batches", "evaluation")
    ] == [0, 1, 1.5, 3]
    loss = torch.nn.functional.mse_loss(*torch.ones(2, 2048, 64, device="cuda"))
    assert kept["kept losses"] == max(512, loss.untyped_storage().nbytes())
    assert result.column("step", leak="hook") == [1, 2, 3]
    assert result.column("grown", leak="hook") == [MIB, 2 * MIB, 3 * MIB]
    assert set(result.column("holder")) == {""}


@pytest.mark.parametrize(
    ("leaks", "mib", "holder"),
    [
        ([], 0, ""),
        (["retain_graph"], 0, ""),
        (["kept losses", "retain_graph"], 3.5, GRAPH),
        (["kept batches"], 1.5, "global `history["),
        (["hook"], 1, "global `seen["),
    ],
)
def test_leaks_together_name_who_holds_them(leaks, mib, holder):
    result = collect(leaky_training(leaks, steps=2, together=True))
    assert growth(result) == {" + ".join(leaks) or NO_LEAK: mib * MIB}
    first, last = result.column("holder")
    assert first == "" and last.startswith(holder) and bool(last) == bool(holder)


def test_it_leaves_nothing_behind_however_it_ends():
    collect(leaky_training(["summed losses"], steps=2))  # cuBLAS takes its workspace
    gc.disable()
    try:
        before = torch.cuda.memory_allocated()
        collect(leaky_training(tuple(LEAKS), steps=2, together=True))
        run = leaky_training(["hook"], together=True)
        next(run)
        next(run)
        assert torch.cuda.memory_allocated() > before
        run.close()
        assert torch.cuda.memory_allocated() == before
    finally:
        gc.enable()


def test_the_script_shows_the_lines_that_run():
    before, step = script(["hook", "retain_graph", "kept losses"])
    assert LEAKS["hook"] in before and LEAKS["hook"] not in step
    assert "loss.backward(retain_graph=True)" in step and "loss.backward()" not in step
    assert step.endswith("losses.append(loss)\n")
    assert script([])[1].endswith("optimizer.step()\n")


def test_bad_arguments_name_what_is_allowed():
    message = r"expected leaks of 'summed losses', .*'retain_graph', got \['nothing'\]"
    with pytest.raises(ValueError, match=message):
        leaky_training(["nothing"])
    with pytest.raises(ValueError, match="No leak is possible only with together=True"):
        leaky_training([])
    for steps in (1, 1001, 2.0, True):
        with pytest.raises(ValueError, match="from 2 to 1000 for steps"):
            leaky_training(steps=steps)


@pytest.mark.gpu
def test_a_real_gpu_keeps_the_same():
    labkit.use(None)
    with labkit.use(virtual=False, quiet=True):
        kept = growth(collect(leaky_training(steps=3)))
    assert [
        kept[leak] / MIB for leak in ("summed losses", "hook", "kept batches", "evaluation")
    ] == [0, 1, 1.5, 3]


def kept(together=False, **mib):
    """Return a made-up result of three steps from {leak: MiB per step}.

    `together` says whether one training had all leaks.
    """
    rows = []
    for leak, size in mib.items():
        for step in (1, 2, 3):
            row = {"leak": leak.replace("_", " "), "step": step, "allocated": 9 * MIB}
            rows.append(row | {"grown": int(size * step * MIB), "holder": ""})
    parameters = {"leaks": list(mib), "steps": 3, "together": together}
    return Result("leaky_training", parameters, COLUMNS, rows, "measured on paper")


def test_the_largest_and_the_smallest_are_the_finding():
    figure = plot_leaky_training(kept(sum=0, hook=1, kept_batches=1.5))
    assert figure.title == "“kept batches” keeps 1.5 MiB per step, “sum” nothing"
    kept_per_step = "Kept per step: sum 0 B, hook 1 MiB, kept batches 1.5 MiB."
    assert f"{kept_per_step} Measured on paper." in figure.alt


def test_one_training_says_how_it_grows_and_who_holds(drawn):
    result = kept(hook=2)
    result.rows[-1]["holder"] = "global `seen[2]` of training"
    figure = plot_leaky_training(result, prediction=3)
    assert figure.title == "Memory grows by 2 MiB per step"
    assert "Held by global `seen[2]` of training." in figure.alt
    assert "Predicted: 3 MiB per step." in figure.alt
    hollow = next(line for line in drawn[0].axes[0].lines if line.get_markerfacecolor() == "none")
    assert list(hollow.get_ydata()) == [9 * MIB]
    assert drawn[0].axes[0].get_ylim()[1] > 9 * MIB
    assert plot_leaky_training(kept(clean=0)).title == "Memory does not grow"


def test_a_recording_is_dashed(drawn):
    recorded = replace(kept(hook=1), badge="recorded on an H200", origin={"machine": "H200"})
    figure = plot_leaky_training(kept(hook=1), recorded)
    assert "Recorded on an H200: kept per step: hook 1 MiB." in figure.alt
    assert [line.get_linestyle() for line in drawn[0].axes[0].lines] == ["-", "--"]


def test_names_and_prediction_keep_clear_of_each_other_and_of_the_edge(drawn):
    several = kept(hook=2)
    for row in several.rows:
        row["leak"] = "kept losses + retain_graph"
    plot_leaky_training(several, prediction=2.01)
    name, guess = drawn[-1].axes[0].texts
    assert (name.get_text(), guess.get_text()) == ("2 leaks", "predicted: 2.01")
    boxes = [text.get_window_extent() for text in (name, guess)]
    assert not boxes[0].overlaps(boxes[1])
    assert all(box.x1 < drawn[-1].get_window_extent().x1 for box in boxes)


def test_nothing_measured_yet():
    empty = replace(kept(hook=1), rows=[])
    assert plot_leaky_training(empty, prediction=1).title == "Not measured yet: not even one step"


def test_prediction_result_and_holder_come_together():
    lab = LeakLab(["hook"], steps=2)
    said = run(lab, "3")
    assert "The loop keeps 1 MiB per step; you predicted 3, 2 too high." in said
    assert "The largest tensor that leaked is held by global <code>seen[" in said
    assert "Memory grows by 1 MiB per step" in lab.picture.value
    assert "Predicted: 3 MiB per step" in lab.picture.value
    assert lab.leaks == ["hook"]


def test_nothing_may_be_predicted_and_kept():
    lab = LeakLab([], steps=2)
    assert "The loop keeps 0 MiB per step; you predicted 0. A good prediction!" in run(lab, "0")
    assert "Memory does not grow" in lab.picture.value


def test_the_source_follows_the_switches_and_asks_for_another_prediction():
    lab = LeakLab(["kept losses"], steps=2)
    assert "<b>losses.append(loss)</b>" in lab.source.value.replace("    ", "").replace(
        "<b>    ", "<b>"
    )
    lab.answer.value = "1"
    lab.predict_button.click()
    assert lab.prediction == 1 and not lab.run_button.disabled
    lab.switches["retain_graph"].value = True
    assert "backward(retain_graph=True)" in lab.source.value
    assert lab.prediction is None and lab.run_button.disabled
    assert "First predict" in lab.message.value
    assert lab.leaks == ["kept losses", "retain_graph"]


def test_a_stopped_run_says_what_was_kept_until_then(monkeypatch):
    lab = LeakLab(["kept batches"])
    monkeypatch.setattr(lab, "point", lambda row: lab.stop_button.click() or "first")
    said = run(lab, "1")
    assert "Stopped after 1 of 6 points. The loop keeps 1.5 MiB per step" in said
    assert "you predicted 1, 0.5 too low." in said
    assert "held by" not in said


def test_silly_predictions_are_refused():
    lab = LeakLab()
    for typed in ("", "many", "-1", "nan", "1e9"):
        assert "type a number from 0 to 1000" in run(lab, typed)


def test_the_switches_are_locked_during_a_run(monkeypatch):
    lab = LeakLab(["hook"], steps=2)
    seen = []
    monkeypatch.setattr(lab, "point", lambda row: seen.append(lab.switches["hook"].disabled) or "")
    run(lab, "1")
    assert seen == [True, True] and not lab.switches["hook"].disabled
