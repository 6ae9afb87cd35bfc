"""The figures of the experiments: their findings, words, colours and sizes."""

import io
import itertools

import numpy as np
import pytest
from matplotlib.image import imread
from matplotlib.text import Text

from gputrace.figures.figure import BLUE, DOTS_PER_INCH, VERMILLION
from labkit import plots
from labkit.experiments.copies import COLUMNS, PREDICTED_SIZE
from labkit.experiments.memory import MemorySample
from labkit.experiments.result import Result

KIB, MIB = 1 << 10, 1 << 20


def copies(speeds, badge="measured on paper", **more):
    """A result from {(size, memory): GB/s}, the same in both directions."""
    rows = [
        {"size": size, "memory": memory, "direction": way, "seconds": size / speed / 1e9, "bytes_per_second": speed * 1e9}
        for (size, memory), speed in speeds.items()
        for way in ("h2d", "d2h")
    ]
    return Result("copy_speed", {"sizes": sorted({size for size, _ in speeds})}, COLUMNS, rows, badge, **more)


USUAL = copies({(4 * KIB, "pageable"): 0.2, (4 * KIB, "pinned"): 0.3, (MIB, "pageable"): 5, (MIB, "pinned"): 12.2}
               | {(PREDICTED_SIZE, "pageable"): 6, (PREDICTED_SIZE, "pinned"): 15})  # fmt: skip


def pixels(figure) -> np.ndarray:
    """Rows of red, green and blue, 0 to 255."""
    return (imread(io.BytesIO(figure.png), format="png")[..., :3] * 255).round().astype(int)


def shows(figure, colour: str) -> bool:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return bool((pixels(figure) == (red, green, blue)).all(axis=-1).any())


def test_the_title_is_what_the_numbers_say():
    assert plots.copy_speed(USUAL).title == "Pinned memory copies at least 2.4 times faster from 1 MiB up"


@pytest.mark.parametrize(
    ("speeds", "title"),
    [
        ({(MIB, "pageable"): 5, (MIB, "pinned"): 10}, "Pinned memory copies 2.0 times faster at 1 MiB"),
        ({(MIB, "pageable"): 5, (MIB, "pinned"): 5.1}, "Pinned memory makes no difference at 1 MiB"),
        ({(MIB, "pageable"): 5, (MIB, "pinned"): 2}, "Pinned memory copies 2.5 times slower at 1 MiB"),
        ({(MIB, "pageable"): 5}, "Not measured yet: pageable and pinned at one size"),
        ({}, "Not measured yet: pageable and pinned at one size"),
    ],
)
def test_the_title_follows_the_numbers(speeds, title):
    assert plots.copy_speed(copies(speeds)).title == title


def test_the_words_hold_finding_numbers_prediction_recording_and_badge():
    recorded = copies({(MIB, "pageable"): 10, (MIB, "pinned"): 50}, "recorded on NVIDIA H200", origin={"machine": "NVIDIA H200"})
    assert plots.copy_speed(USUAL, recorded, 5).alt == (
        "Pinned memory copies at least 2.4 times faster from 1 MiB up. "
        "16 MiB copies at 15 GB/s from pinned, 6 GB/s from pageable memory. "
        "Predicted at 16 MiB: 5 times faster. "
        "Recorded on NVIDIA H200: 1 MiB copies at 50 GB/s from pinned, 10 GB/s from pageable memory. "
        "Measured on paper."
    )


def test_the_other_direction_is_drawn_too_and_a_third_is_refused():
    assert "15 GB/s to pinned, 6 GB/s to pageable memory" in plots.copy_speed(USUAL, direction="d2h").alt
    with pytest.raises(ValueError, match='direction=.sideways.: choose "h2d"'):
        plots.copy_speed(USUAL, direction="sideways")


def test_a_prediction_for_a_size_that_was_not_measured_is_not_drawn():
    figure = plots.copy_speed(copies({(MIB, "pageable"): 5, (MIB, "pinned"): 10}), prediction=3)
    assert "Predicted" not in figure.alt


def test_figures_are_white_small_and_in_the_palette():
    figure = plots.copy_speed(USUAL, prediction=5)
    height, width, _ = pixels(figure).shape
    assert (width, height) == (7 * DOTS_PER_INCH, 4 * DOTS_PER_INCH)
    assert (pixels(figure)[0] == 255).all()
    assert shows(figure, BLUE)
    assert shows(figure, VERMILLION)


def test_solid_is_measured_dashed_is_recorded_hollow_is_predicted(drawn):
    plots.copy_speed(USUAL, copies({(MIB, "pageable"): 10, (MIB, "pinned"): 50}), 5)
    canvas = drawn[-1]
    lines = canvas.axes[0].lines
    assert [line.get_linestyle() for line in lines] == ["--", "--", "-", "-", "None"]
    assert lines[-1].get_markerfacecolor() == "none"
    assert lines[-1].get_ydata()[0] == pytest.approx(5 * 6e9)
    assert [label.get_text() for label in canvas.axes[0].get_xticklabels()] == [
        "4 KiB", "16 KiB", "64 KiB", "256 KiB", "1 MiB", "4 MiB", "16 MiB"
    ]  # fmt: skip
    texts = [text.get_text() for text in canvas.axes[0].texts]
    assert {"pinned", "pageable", "pinned, recorded", "pageable, recorded", "predicted: 5 times"} == set(texts)
    assert any("measured on paper" in text.get_text() for text in canvas.texts)
    assert min(text.get_fontsize() for text in canvas.findobj(Text)) >= 9


def test_labels_at_the_ends_of_lines_do_not_overlap(drawn):
    same = {(size, memory): speed for size in (MIB, 2 * MIB) for memory, speed in (("pageable", 5), ("pinned", 5.01))}
    plots.copy_speed(copies(same), copies(same))
    canvas = drawn[-1]
    canvas.draw_without_rendering()
    boxes = sorted((text.get_window_extent() for text in canvas.axes[0].texts), key=lambda box: box.y0)
    assert len(boxes) == 4
    assert all(below.y1 <= above.y0 + 1 for below, above in itertools.pairwise(boxes))


def test_a_notebook_shows_the_picture_and_the_words():
    figure = plots.copy_speed(USUAL)
    data, metadata = figure._repr_mimebundle_()
    assert data["text/plain"] == repr(figure) == figure.alt
    assert metadata["image/png"] == {"alt": figure.alt, "width": 672}
    assert figure.html.startswith('<img src="data:image/png;base64,')
    assert f'alt="{figure.alt}"' in figure.html


def steps(seconds):
    """A result from {width: (CPU seconds, GPU seconds)}."""
    rows = [
        {"width": width, "device": device, "seconds": value}
        for width, pair in seconds.items()
        for device, value in zip(("cpu", "cuda"), pair, strict=True)
    ]
    columns = {"width": "neurons", "device": "", "seconds": "seconds"}
    return Result("host_and_device", {"widths": list(seconds)}, columns, rows, "measured on paper")


@pytest.mark.parametrize(
    ("seconds", "title"),
    [
        ({16: (1e-4, 4e-4), 512: (1e-3, 4e-4)}, "The CPU wins up to a width of 16; at 512 the GPU is 2.5 times faster"),
        ({16: (1e-4, 4e-4)}, "The CPU wins at every width up to 16"),
        ({16: (1e-3, 4e-4)}, "The GPU wins at every width; at 16 it is 2.5 times faster"),
        ({}, "Not measured yet: CPU and GPU at one width"),
    ],
)
def test_the_winner_stands_in_the_title(seconds, title):
    assert plots.host_and_device(steps(seconds)).title == title


def test_the_words_of_the_steps_hold_both_ends():
    assert "At a width of 16 a step takes 100 µs on the CPU, 400 µs on the GPU; at a width of 512 a step takes 1 ms" in (
        plots.host_and_device(steps({16: (1e-4, 4e-4), 512: (1e-3, 4e-4)})).alt
    )


def memory(device=0):
    return [MemorySample(t / 1e4, device, a * MIB, (a + 2) * MIB, (a + 102) * MIB) for t, a in ((0, 0), (1, 20), (5, 80), (9, 20))]


def test_memory_over_time_tells_the_peaks():
    figure = plots.memory_over_time(memory(), "virtual GPU, modelled on NVIDIA Tesla T4")
    assert figure.title == "Allocated memory peaks at 80 MiB, reserved memory at 82 MiB"
    assert figure.alt.endswith("use at most 182 MiB of a device. 1 GPU, 4 samples. Virtual GPU, modelled on NVIDIA Tesla T4.")


def test_each_gpu_has_a_panel(drawn):
    plots.memory_over_time(memory(0) + memory(1), "measured on paper")
    assert [axes.get_ylabel() for axes in drawn[-1].axes] == ["cuda:0", "cuda:1"]


def test_one_sample_is_enough_and_none_is_refused(drawn):
    assert "Allocated memory peaks at 0 B" in plots.memory_over_time(memory()[:1], "measured on paper").alt
    assert all(line.get_xdata()[-1] > line.get_xdata()[0] for line in drawn[-1].axes[0].lines)  # a single moment is seen too
    with pytest.raises(ValueError, match="nothing was recorded"):
        plots.memory_over_time([], "measured on paper")
