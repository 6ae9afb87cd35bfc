"""A training step under FSDP on 8 to 1,024 GPUs: the experiment, and the figure."""

import pytest

from gpulessons.lesson_12.labs import plot_scaling_steps, scaling_steps
from gpulessons.lesson_12.labs.scaling import COLUMNS, FIXED, GROWS, LINES, NETWORKS, RANKS
from labkit.labs import Result, collect

FAST, SLOW = NETWORKS
LINE = {(GROWS, FAST): [0.2] * 4, (FIXED, FAST): [0.2, 0.06, 0.03, 0.05], (FIXED, SLOW): [0.2, 0.1, 0.09, 0.07]}  # on paper


def steps(fixed=LINE[FIXED, FAST]) -> Result:
    lines = LINE | {(FIXED, FAST): fixed}
    rows = [
        {"ranks": ranks, "batch": batch, "network": network, "seconds": seconds, "held": 8 << 30, "peak": 16 << 30}
        for (batch, network), line in lines.items()
        for ranks, seconds in zip(RANKS, line, strict=False)
    ]
    return Result("scaling_steps", {}, COLUMNS, rows, "measured on paper")


@pytest.mark.slow
def test_a_batch_that_grows_keeps_the_time_and_a_fixed_one_has_a_best_number_of_gpus():
    result = collect(scaling_steps())
    assert len(result.rows) == 12
    weak, strong, slow = (result.by("ranks", "seconds", batch=batch, network=network) for batch, network in LINES)
    assert max(weak.values()) < 1.05 * min(weak.values())
    assert min(strong, key=strong.__getitem__) == 256 and strong[1024] > 1.2 * strong[256] > 0.1 * strong[8]
    assert strong[8] == slow[8] and all(slow[ranks] > strong[ranks] for ranks in RANKS[1:])
    for batch, network in LINES:
        for column in ("held", "peak"):
            nbytes = list(result.by("ranks", column, batch=batch, network=network).values())
            assert nbytes == sorted(nbytes, reverse=True) and len(set(nbytes)) == len(RANKS)
    assert result.by("ranks", "held", batch=FIXED, network=FAST) == result.by("ranks", "held", batch=FIXED, network=SLOW)


def test_worlds_that_are_alike_are_simulated_once(monkeypatch):
    asked = []

    def results(script, worlds):
        asked.extend(worlds)
        return iter([{"seconds": 1.0 + number, "held": 1, "peak": 2} for number in range(len(worlds))])

    monkeypatch.setattr("gpulessons.simulated_worlds.results", results)
    result = collect(scaling_steps())
    assert len(asked) == len({repr(world) for world in asked}) == 10  # on one node, no network is taken
    assert len(set(result.column("seconds", ranks=8))) == 1
    assert [(row["ranks"], row["batch"], row["network"]) for row in result.rows] == [(ranks, *line) for line in LINES for ranks in RANKS]
    sequences = {world["world"]: world["arguments"][-1] for world in asked[len(RANKS) :] if world["network"] == FAST}
    assert sequences == {64: 16, 256: 4, 1024: 1}
    assert {world["arguments"][-1] for world in asked[: len(RANKS)]} == {128}
    assert {world["world"] // world["nodes"] for world in asked} == {8}


def test_the_words_hold_finding_each_line_and_badge():
    figure = plot_scaling_steps(steps())
    assert figure.title == "With a fixed batch, a step is fastest on 256 GPUs; on 1,024 it takes 1.7 times as long"
    assert "The batch grows, 400Gb/s: on 8 GPUs 200 ms, peak 16 GiB, held 8 GiB; on 64 GPUs 200 ms" in figure.alt
    assert "The batch is fixed, 100Gb/s: on 8 GPUs 200 ms" in figure.alt
    assert figure.alt.endswith("on 1,024 GPUs 70 ms, peak 16 GiB, held 8 GiB. Measured on paper.")
    assert plot_scaling_steps(steps([0.2, 0.06, 0.03, 0.01])).title == "With a fixed batch, 1,024 GPUs are 20 times as fast as 8"


def test_the_lines_are_those_of_the_rows_and_each_has_its_colour_and_name(drawn):
    plot_scaling_steps(steps())
    above, below = drawn[-1].axes
    assert [list(line.get_ydata()) for line in above.lines] == list(LINE.values())
    assert [list(line.get_ydata()) for line in below.lines] == [[16 << 30] * 4, [16 << 30] * 4, [8 << 30] * 4]
    assert all(list(line.get_xdata()) == list(RANKS) for axes in (above, below) for line in axes.lines)
    for axes in (above, below):
        assert len({line.get_color() for line in axes.lines}) == len({line.get_marker() for line in axes.lines}) == 3
    names = [sorted(text.get_text() for text in axes.texts) for axes in (above, below)]
    assert names == [
        ["fixed, 100 Gb/s", "the batch grows", "the batch is fixed"],
        ["held, batch fixed", "peak, batch fixed", "peak, batch grows"],
    ]


def test_the_network_that_is_assumed_and_the_logarithmic_axes_are_said(drawn):
    plot_scaling_steps(steps())
    assert "400 Gb/s where not said, logarithmic axes  ·  measured on paper" in [text.get_text() for text in drawn[-1].texts]


def test_a_stopped_run_is_drawn_without_a_finding():
    for fixed in ([], [0.2, 0.06]):
        assert plot_scaling_steps(steps(fixed)).title == "Not measured yet: a step on 8 to 1,024 GPUs"
    nothing = Result("scaling_steps", {}, COLUMNS, [], "measured on paper")
    assert plot_scaling_steps(nothing).alt == "Not measured yet: a step on 8 to 1,024 GPUs. Measured on paper."
