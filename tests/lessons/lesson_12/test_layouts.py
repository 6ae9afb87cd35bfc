"""Data, tensor and pipeline degrees of a training: the experiment, the figure, and the lab."""

import pytest

from gpulessons.lesson_12.labs import LayoutsLab, layout_steps, plot_layout_steps
from gpulessons.lesson_12.labs.layouts import COLUMNS, GPUS, best
from gpulessons.rank_programs import rank_program
from gpulessons.simulated_worlds import results
from labkit.labs import Result, collect

from ...learner import predict_and_run as run

SECONDS = {(2, 2): 4.0, (4, 2): 3.0, (8, 1): 2.5, (1, 1): None}  # by tensor and pipeline degree, on paper


def rows(layouts):
    for tensor, pipeline in layouts:
        data, seconds = GPUS // (tensor * pipeline), SECONDS[tensor, pipeline]
        named = {"layout": f"{data} × {tensor} × {pipeline}", "data": data, "tensor": tensor, "pipeline": pipeline}
        yield named | {"seconds": seconds, "peak": seconds and 50 << 30}


def steps(*layouts, network="400Gb/s") -> Result:
    return Result("layout_steps", {"layouts": layouts, "network": network}, COLUMNS, list(rows(layouts)), "measured on paper")


@pytest.mark.slow
def test_undivided_it_does_not_fit_and_tensor_degrees_beyond_a_node_are_slow():
    result = collect(layout_steps([(1, 1), (8, 1), (16, 1)]))
    undivided, one_node, two_nodes = result.rows
    assert [row["layout"] for row in result.rows] == ["32 × 1 × 1", "4 × 8 × 1", "2 × 16 × 1"]
    assert undivided["seconds"] is undivided["peak"] is None
    assert two_nodes["seconds"] > one_node["seconds"] and two_nodes["peak"] < one_node["peak"] < 80 << 30
    assert best(result) is one_node
    one_node_slow, two_nodes_slow = collect(layout_steps([(8, 1), (16, 1)], "100Gb/s")).rows
    lost = [slow["seconds"] - fast["seconds"] for slow, fast in ((one_node_slow, one_node), (two_nodes_slow, two_nodes))]
    assert lost[1] > lost[0] > 0  # it sums each layer's outputs by the network, too, not the gradients alone


@pytest.mark.slow
def test_the_peak_is_that_of_the_measured_step():
    """The step that warms up has as many micro-batches as there are stages, here 4. The measured one has one."""
    world = {"world": 4, "nodes": 1, "network": "400Gb/s", "like": "H100"}
    worlds = [world | {"arguments": [1, 1, 4, 4, 256, 4096, sequences, 1]} for sequences in (1, 4)]
    one, four = (row["peak"] for row in results(rank_program("layouts"), worlds))
    assert one < 0.6 * four


def test_what_is_no_choice_is_refused_before_a_world_is_simulated():
    for layouts, network, said in (
        ([(3, 1)], "400Gb/s", "3 is no choice here: there are 1, 2, 4, 8, 16"),
        ([(1, 1), (1, 0)], "400Gb/s", "0 is no choice here: there are 1, 2, 4, 8, 16"),
        ([(1, 1)], "1Gb/s", "'1Gb/s' is no choice here: there are '400Gb/s', '100Gb/s'"),
        ([(8, 8)], "400Gb/s", "tensor 8 × pipeline 8 asks for 64 GPUs: there are 32"),
    ):
        with pytest.raises(ValueError, match=said):
            layout_steps(layouts, network)


def test_a_layout_that_does_not_fit_has_dashes_in_the_table():
    assert steps((1, 1), (2, 2)).table().rows == (
        ("32 × 1 × 1", "32", "1", "1", "–", "–"),
        ("8 × 2 × 2", "8", "2", "2", "4 s", "50 GiB"),
    )


def test_the_words_hold_finding_layouts_prediction_and_badge():
    assert plot_layout_steps(steps((1, 1), (2, 2), (8, 1)), 5).alt == (
        "4 × 8 × 1 is the fastest layout tried: 2.5 s a step by 400Gb/s. 32 × 1 × 1 runs out of memory. "
        "8 × 2 × 2 takes 4 s and 50 GiB. 4 × 8 × 1 takes 2.5 s and 50 GiB. Predicted: 5 s. Measured on paper."
    )
    assert plot_layout_steps(steps((1, 1))).title == "No layout tried fits"
    assert plot_layout_steps(steps(), 5).title == "Not measured yet: layouts of 32 GPUs"


def test_each_layout_that_fits_has_a_bar_the_fastest_another_colour_and_the_prediction_stands_at_the_last(drawn):
    plot_layout_steps(steps((8, 1), (1, 1), (2, 2)), 5)
    (axes,) = drawn[-1].axes
    assert [bar.get_width() for bar in axes.patches] == [2.5, 0.0, 4.0]
    assert [bar.get_y() + bar.get_height() / 2 for bar in axes.patches] == pytest.approx([0, 1, 2])
    assert axes.patches[0].get_facecolor() != axes.patches[2].get_facecolor()
    assert [text.get_text() for text in axes.texts] == ["2.5 s, 50 GiB", "out of memory", "4 s, 50 GiB", "a step, a rank's peak"]
    assert axes.get_xlabel() == "a step, s"
    (marker,) = axes.lines
    assert (*marker.get_xdata(), *marker.get_ydata()) == (5, 2)
    assert axes.get_xlim()[1] > 5


@pytest.fixture
def make_lab(monkeypatch):
    """Of a lab whose worlds are not simulated."""
    monkeypatch.setattr("gpulessons.lesson_12.labs.layouts._points", lambda layouts, network: rows(layouts))
    return LayoutsLab


def test_prediction_and_result_come_together(make_lab):
    lab = make_lab()
    assert run(lab, "8").endswith("A step takes 4 s; you predicted 8, which is 2.0 times too high. A rank&#x27;s peak is 50 GiB.</p>")
    assert "Predicted: 8 s." in lab.picture.value
    assert "A good prediction!" in run(lab, "4.1")


def test_layouts_tried_by_one_network_are_compared_and_the_last_stands_last(make_lab):
    lab = make_lab()
    run(lab, "4")
    lab.tensor.value, lab.pipeline.value = 8, 1
    assert lab.run_button.disabled and "First predict" in lab.message.value
    run(lab, "4")
    assert "8 × 2 × 2 takes 4 s and 50 GiB. 4 × 8 × 1 takes 2.5 s and 50 GiB. Predicted: 4 s." in lab.picture.value
    lab.tensor.value, lab.pipeline.value = 2, 2
    run(lab, "4")
    assert "4 × 8 × 1 takes 2.5 s and 50 GiB. 8 × 2 × 2 takes 4 s and 50 GiB. Predicted: 4 s." in lab.picture.value
    lab.network.value = "100Gb/s"
    run(lab, "4")
    assert "4 × 8 × 1" not in lab.picture.value and "by 100Gb/s" in lab.picture.value


def test_what_was_tried_is_there_when_the_lab_is_brought_up_again(make_lab):
    run(make_lab(), "4")
    again = make_lab()
    again.tensor.value, again.pipeline.value = 8, 1
    run(again, "4")
    assert "8 × 2 × 2 takes 4 s" in again.picture.value and "4 × 8 × 1 takes 2.5 s" in again.picture.value


def test_a_layout_that_does_not_fit_and_one_of_too_many_gpus_say_so(make_lab):
    lab = make_lab(1, 1)
    assert "32 × 1 × 1 runs out of memory. Divide the model further" in run(lab, "4")
    lab.tensor.value = lab.pipeline.value = 16
    assert "tensor 16 × pipeline 16 asks for 256 GPUs: there are 32" in run(lab, "4")


def test_a_run_that_is_stopped_leaves_the_prediction_open(make_lab):
    said = make_lab().verdict(steps(), 3)
    assert said == "The layout was not measured, so your prediction of 3 s stays open. Press Run to try again."
