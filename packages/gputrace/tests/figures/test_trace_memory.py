"""The memory of a device over time: what the figure finds, says and shows."""

from dataclasses import replace

import numpy as np
import pytest

from gputrace import figures as plots
from gputrace.events import ACTION_OF, ACTIVATIONS, OTHER, PARAMETERS, WORKSPACE, SourceLine
from gputrace.figures.figure import CATEGORY_COLOURS
from gputrace.phases import Phase

MIB = 1 << 20
LINES = ((), (SourceLine("/home/me/train.py", 11, "train", "loss = model(x)"),))


def heights(canvas, colour: str) -> list[float]:
    """Return the heights of the area of a colour, starting with 0."""
    from matplotlib.colors import to_rgba

    return next(
        patch.get_data().values.tolist()
        for patch in canvas.axes[0].patches
        if patch.get_facecolor() == to_rgba(colour)
    )


def test_the_title_says_the_peak_its_phase_and_what_it_was_made_of(training):
    figure = training.plot_memory()
    assert figure.title == "Peak 90 MiB in the backward pass: 67% activations, 22% gradients"
    assert figure.alt == (
        "Peak 90 MiB in the backward pass: 67% activations, 22% gradients. "
        "At the peak of 90 MiB, made by train.py:12  loss.backward(): 60 MiB activations, 20 "
        "MiB gradients, 10 MiB parameters. "
        "Allocated 0 B at the start, 30 MiB at the end; reserved at most 200 MiB. "
        "All processes together use at most 320 MiB of the device. "
        "1 × forward, 1 × backward, 1 × step in 10 ms, 6 events. "
        "Measured on paper."
    )


def test_areas_lines_peak_legend_and_badge_are_there(training, drawn, texts):
    plots.trace_memory(training)
    canvas = drawn[-1]
    assert max(heights(canvas, CATEGORY_COLOURS["activations"])) == 90 * MIB
    assert max(heights(canvas, CATEGORY_COLOURS["gradients"])) == 30 * MIB
    assert max(heights(canvas, CATEGORY_COLOURS["parameters"])) == 10 * MIB
    shown = texts(canvas)
    assert {
        "reserved",
        "used on the device",
        "67% activations",
        "22% gradients",
        "11% parameters",
    } < set(shown)
    assert not any("workspace" in text for text in shown)
    assert {
        "peak 90 MiB  train.py:12  loss.backward()",
        "measured on paper",
        "time since the start, ms",
    } < set(shown)
    assert {"forward", "backward", "step"} < set(shown)
    dot = next(line for line in canvas.axes[0].lines if line.get_marker() == "o")
    assert dot.get_xydata().tolist() == [[0.004, 90 * MIB]]


def test_words_lie_inside_the_picture_are_large_enough_and_cover_no_data(training, drawn, legible):
    plots.trace_memory(training)
    canvas = drawn[-1]
    legible(canvas)
    data = canvas.axes[0].get_window_extent()
    assert all(not legend.get_window_extent().overlaps(data) for legend in canvas.legends)


def test_the_line_of_the_peak_is_shortened_to_the_width_and_shown_as_it_is_written(trace_of, drawn):
    line = SourceLine(
        "/home/me/train.py",
        3,
        "f",
        'print("$x$", "$y$", "漢字"); ' + "held.append(model(batch)); " * 20,
    )
    rows = [(0.0, "segment_alloc", 2, 20), (0.1, "alloc", 2, 9, 0, 1, ACTIVATIONS)]
    plots.trace_memory(trace_of(rows, stacks=[(), (line,)], seconds=1.0))
    canvas = drawn[-1]
    canvas.draw_without_rendering()
    for text in [canvas._suptitle, *canvas.texts]:
        assert (
            canvas.bbox.x0 <= text.get_window_extent().x0
            and text.get_window_extent().x1 <= canvas.bbox.x1
        )


@pytest.mark.parametrize(
    ("category", "size", "title"),
    [
        (OTHER, 9, "Peak 9 MiB, kept to the end; 20 MiB reserved"),
        (PARAMETERS, 9, "Peak 9 MiB: 100% parameters"),
        (WORKSPACE, 8, "Peak 8 MiB: 100% workspace"),
    ],
)
def test_a_share_of_what_is_not_known_is_no_finding(trace_of, category, size, title):
    rows = [(0.0, "segment_alloc", 2, 20), (0.1, "alloc", 2, size, 0, 1, category)]
    assert trace_of(rows).plot_memory().title == title
    freed = [
        (0.2, action, 2, size, 0, 1, category) for action in ("free_requested", "free_completed")
    ]
    if category == OTHER:
        assert (
            trace_of([*rows, *freed]).plot_memory().title
            == "Peak 9 MiB, 0 B at the end; 20 MiB reserved"
        )


def looping(trace_of, count, kept, stacks=None, **more):
    """Return a trace of steps that allocate 1, 4 and 2 MiB. The first step allocates more.

    In `kept` steps, the 4 MiB are not freed.
    """
    rows, address = [(0.0, "segment_alloc", 1, 600), (0.0, "alloc", 1, 8, 0, 1, WORKSPACE)], 9
    for step in range(count):
        rows += [
            (step + at, "alloc", address + place, size, 0, 1 + at, ACTIVATIONS)
            for at, place, size in ((0, 0, 1), (1, 1, 4), (1, 5, 2))
        ]
        gone = [(0, 1), (5, 2)] if step < kept else [(0, 1), (5, 2), (1, 4)]
        rows += [
            (step + 1, action, address + p, n, 0, 1, ACTIVATIONS)
            for p, n in gone
            for action in ("free_requested", "free_completed")
        ]
        address += 7
    return trace_of(rows, **({"stacks": stacks} if stacks else {}), **more)


def test_what_grows_with_each_step_is_the_finding(trace_of):
    assert (
        looping(trace_of, 6, kept=6).plot_memory().title
        == "+4 MiB a step in 6 steps: peak 35 MiB, 77% activations, 23% workspace"
    )
    assert (
        looping(trace_of, 6, kept=0).plot_memory().title
        == "No growth over 6 steps: peak 15 MiB, 53% workspace, 47% activations"
    )
    out = looping(trace_of, 6, kept=6)
    out.events = replace(
        out.events,
        action=np.where(
            np.arange(len(out.events)) == len(out.events) - 1, ACTION_OF["oom"], out.events.action
        ),
    )
    out.error = "CUDA out of memory."
    assert out.plot_memory().title.endswith("of 1 GiB allocated, +4 MiB a step")


@pytest.mark.parametrize(
    ("count", "kept"),
    [(2, 2), (6, 3)],  # two are no loop; what is freed in the end did not leak
)
def test_no_growth_is_claimed_without_proof(trace_of, count, kept):
    assert " a step" not in looping(trace_of, count, kept).plot_memory().title


def test_layers_that_pytorch_runs_one_after_the_other_are_no_steps(trace_of):
    library = SourceLine(
        "/usr/lib/python3/dist-packages/torch/nn/modules/container.py", 4, "forward"
    )
    stacks = [
        (),
        *(
            (
                SourceLine("/usr/lib/python3/dist-packages/torch/x.py", n, f"f{n}"),
                library,
                *LINES[1],
            )
            for n in (1, 2)
        ),
    ]
    assert " a step" not in looping(trace_of, 6, 6, stacks).plot_memory().title


def test_nothing_allocated_and_nothing_changed(trace_of):
    nothing = trace_of([]).plot_memory()
    assert nothing.title == "Nothing happened in this recording: 0 B allocated throughout"
    assert "0 events" in nothing.alt
    still = trace_of([], allocated_at_end={0: 4 * MIB}, reserved_at_end={0: 20 * MIB}).plot_memory()
    assert still.title == "Nothing happened in this recording: 4 MiB allocated throughout"


def test_out_of_memory_is_the_finding_where_it_ended_the_block_and_else_a_mark(
    trace_of, drawn, texts
):
    rows = [
        (0.0, "segment_alloc", 100, 600),
        (0.1, "alloc", 100, 600, 0, 1),
        (0.2, "oom", 300, 500, 0, 2),
    ]
    ended = trace_of(rows, error="CUDA out of memory.").plot_memory()
    assert ended.title == "Out of memory: 500 MiB asked for with 600 MiB of 1 GiB allocated"
    assert "Out of memory: 500 MiB asked for, 300 MiB free on the device." in ended.alt
    assert "out of memory  train.py:12  loss.backward()" in texts(drawn[-1])
    caught = trace_of([*rows, (0.3, "oom", 300, 400, 0, 2)]).plot_memory()
    assert caught.title == "Peak 600 MiB, kept to the end; 600 MiB reserved"
    assert "Out of memory, the last of 2 times: 400 MiB asked for" in caught.alt


def test_lost_events_are_told_in_the_picture_and_in_words(trace_of, drawn, texts):
    figure = trace_of(
        [(0.1, "alloc", 2, 9, 0, 1)], lost=64, allocated_at_end={0: 30 * MIB}
    ).plot_memory()
    assert "The oldest 64 events were lost" in texts(drawn[-1])
    assert "The oldest 64 events were lost, so the peak may have been higher." in figure.alt


def test_a_device_that_others_fill_does_not_set_the_scale(training, drawn, texts):
    training.used[:] = [(0.0, 0, 800 * MIB)]
    plots.trace_memory(training)
    assert drawn[-1].axes[0].get_ylim()[1] < 400 * MIB
    assert "used on the device:\n800 MiB, off scale" in texts(drawn[-1])
    training.used[:] = [(0.0, 0, round(1008.8 * MIB))]  # as long as a size is written
    plots.trace_memory(training)
    drawn[-1].draw_without_rendering()
    assert drawn[-1].legends[0].get_window_extent().x1 <= drawn[-1].bbox.x1


def test_the_device_with_the_highest_peak_is_shown_unless_another_is_asked_for(trace_of, drawn):
    rows = [
        (0.1 * d, action, 2, size, d, 1)
        for d, size in ((0, 5), (1, 9))
        for action in ("segment_alloc", "alloc")
    ]
    trace = trace_of(rows)
    assert (
        plots.trace_memory(trace).title == "Peak 9 MiB on cuda:1, kept to the end; 9 MiB reserved"
    )
    assert drawn[-1].axes[0].get_ylabel() == "memory of cuda:1"
    assert (
        plots.trace_memory(trace, 0).title
        == "Peak 5 MiB on cuda:0, kept to the end; 5 MiB reserved"
    )
    with pytest.raises(ValueError, match="device=7: expected one of the recorded devices 0, 1"):
        plots.trace_memory(trace, 7)


def test_hundreds_of_steps_are_one_band(training, drawn, texts):
    for count in (300, 5):
        seconds = 0.010 / count
        training.phases[:] = [
            Phase(name, (number + at) * seconds, (number + at + 0.5) * seconds, 1)
            for number in range(count)
            for name, at in (("forward", 0), ("backward", 0.5))
        ]
        plots.trace_memory(training)
        assert ("300 × forward, backward" in texts(drawn[-1])) == (count == 300)
    assert texts(drawn[-1]).count("fwd") == 5


def test_phases_of_several_counts_in_a_crowd(training, drawn, texts):
    training.phases[:] = [Phase("forward", n * 1e-5, n * 1e-5 + 5e-6, 1) for n in range(1000)] + [
        Phase("backward", 0.01, 0.01, 1)
    ]
    plots.trace_memory(training)
    assert "1000 × forward, 1 × backward" in texts(drawn[-1])


def test_a_recording_of_nothing_says_so_and_invents_no_axis(trace_of, drawn, texts):
    assert (
        trace_of([]).plot_memory().title
        == "Nothing happened in this recording: 0 B allocated throughout"
    )
    assert drawn[-1].axes[0].get_xlabel() == "" and len(drawn[-1].axes[0].get_xticks()) == 0
    trace_of([], seconds=2.0, allocated_at_end={0: 3 * MIB}).plot_memory()
    assert any("3 MiB allocated throughout" in text for text in texts(drawn[-1]))
    assert drawn[-1].axes[0].get_xlabel() == "time since the start, s"
