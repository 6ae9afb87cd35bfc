"""The figure of a leaky training: its finding, words and lines."""

from dataclasses import replace

from labkit import plots
from labkit.experiments.leaks import COLUMNS
from labkit.experiments.result import Result

MIB = 1 << 20


def kept(together=False, **mib):
    """A result of three steps from {leak: MiB a step}."""
    rows = [
        {"leak": leak.replace("_", " "), "step": step, "allocated": 9 * MIB, "grown": int(size * step * MIB), "holder": ""}
        for leak, size in mib.items()
        for step in (1, 2, 3)
    ]
    parameters = {"leaks": list(mib), "steps": 3, "together": together}
    return Result("leaky_training", parameters, COLUMNS, rows, "measured on paper")


def test_the_largest_and_the_smallest_are_the_finding():
    figure = plots.leaky_training(kept(sum=0, hook=1, kept_batches=1.5))
    assert figure.title == "“kept batches” keeps 1.5 MiB a step, “sum” nothing"
    assert "Kept a step: sum 0 B, hook 1 MiB, kept batches 1.5 MiB. Measured on paper." in figure.alt


def test_one_training_says_how_it_grows_and_who_holds(drawn):
    result = kept(hook=2)
    result.rows[-1]["holder"] = "global `seen[2]` of training"
    figure = plots.leaky_training(result, prediction=3)
    assert figure.title == "Memory grows by 2 MiB a step"
    assert "Held by global `seen[2]` of training." in figure.alt and "Predicted: 3 MiB a step." in figure.alt
    hollow = next(line for line in drawn[0].axes[0].lines if line.get_markerfacecolor() == "none")
    assert list(hollow.get_ydata()) == [9 * MIB]
    assert drawn[0].axes[0].get_ylim()[1] > 9 * MIB
    assert plots.leaky_training(kept(clean=0)).title == "Memory does not grow"


def test_a_recording_is_dashed(drawn):
    recorded = replace(kept(hook=1), badge="recorded on an H200", origin={"machine": "H200"})
    figure = plots.leaky_training(kept(hook=1), recorded)
    assert "Recorded on an H200: kept a step: hook 1 MiB." in figure.alt
    assert [line.get_linestyle() for line in drawn[0].axes[0].lines] == ["-", "--"]


def test_names_and_prediction_keep_clear_of_each_other_and_of_the_edge(drawn):
    several = kept(hook=2)
    for row in several.rows:
        row["leak"] = "kept losses + retain_graph"
    plots.leaky_training(several, prediction=2.01)
    name, guess = drawn[-1].axes[0].texts
    assert (name.get_text(), guess.get_text()) == ("2 leaks", "predicted: 2.01")
    boxes = [text.get_window_extent() for text in (name, guess)]
    assert not boxes[0].overlaps(boxes[1])
    assert all(box.x1 < drawn[-1].get_window_extent().x1 for box in boxes)


def test_nothing_measured_yet():
    empty = replace(kept(hook=1), rows=[])
    assert plots.leaky_training(empty, prediction=1).title == "Not measured yet: not even one step"
