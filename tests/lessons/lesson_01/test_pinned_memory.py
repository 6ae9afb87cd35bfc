"""Copy speed: what is measured, the figure, and the lab."""

import io
import itertools
import re

import numpy as np
import pytest
from matplotlib.image import imread
from matplotlib.text import Text

import labkit
from gpulessons.lesson_01.labs import CopySpeedLab, copy_speed, plot_copy_speed
from gpulessons.lesson_01.labs.pinned_memory import COLUMNS, PREDICTED_SIZE, pinned_gain
from gputrace import units
from gputrace.figures.figure import BLUE, DOTS_PER_INCH, VERMILLION
from labkit.labs import Result, collect, recorded_result

from ...learner import predict_and_run as run

SIZES = (1 << 12, 1 << 20, 1 << 24)


@pytest.fixture
def t4():
    with labkit.use(virtual=True, quiet=True) as machine:
        yield machine


def test_every_point_is_measured_once_and_in_order(t4):
    run = copy_speed(sizes=SIZES, repeats=2)
    result = collect(run)
    assert run.total == len(result.rows) == 12
    assert [tuple(row.values())[:3] for row in result.rows[:4]] == [
        (4096, "pageable", "h2d"),
        (4096, "pageable", "d2h"),
        (4096, "pinned", "h2d"),
        (4096, "pinned", "d2h"),
    ]
    assert all(row["bytes_per_second"] == row["size"] / row["seconds"] for row in result.rows)
    assert result.badge == "virtual GPU, modelled on NVIDIA Tesla T4"


def test_pinned_memory_is_faster_and_the_larger_copy_the_quicker(t4):
    result = collect(copy_speed(sizes=SIZES, repeats=1))
    assert all(gain > 1.2 for gain in pinned_gain(result).values())
    assert all(gain > 1.2 for gain in pinned_gain(result, "d2h").values())
    speeds = result.column("bytes_per_second", memory="pinned", direction="h2d")
    assert speeds == sorted(speeds)


def test_the_same_numbers_each_time(t4):
    first, second = (
        collect(copy_speed(sizes=SIZES, repeats=3)).column("seconds") for _ in range(2)
    )
    assert first == pytest.approx(second)


def test_an_h200_is_modelled_as_it_was_recorded():
    with labkit.use(like="H200", virtual=True, quiet=True):
        result = collect(copy_speed(sizes=SIZES, repeats=1))
    recorded = result.recorded()
    assert recorded.column("size") == result.column("size")
    for here, there in zip(result.rows, recorded.rows, strict=True):
        assert here["seconds"] == pytest.approx(there["seconds"], rel=0.35), here


def test_the_gain_needs_both_kinds_of_memory(t4):
    run = copy_speed(sizes=SIZES, repeats=1)
    for _ in range(6):  # 4 KiB wholly, 1 MiB from pageable memory only
        next(run)
    assert list(pinned_gain(run.result())) == [4096]


def test_bad_arguments_are_refused_before_anything_is_measured(t4):
    with pytest.raises(ValueError, match="sizes=.*from 1 to 1073741824"):
        copy_speed(sizes=[1 << 31])
    with pytest.raises(ValueError, match="repeats=0"):
        copy_speed(repeats=0)


@pytest.mark.gpu
def test_a_real_gpu_copies_large_pinned_tensors_faster():
    with labkit.use(virtual=False, quiet=True):
        result = collect(copy_speed(sizes=[1 << 26], repeats=5))
    assert result.badge.startswith("measured on NVIDIA")
    assert pinned_gain(result)[1 << 26] > 1


KIB, MIB = 1 << 10, 1 << 20


def copies(speeds, badge="measured on paper", **more):
    """Return a made-up result from {(size, memory): GB/s}, the same in both directions."""
    rows = []
    for (size, memory), speed in speeds.items():
        for way in ("h2d", "d2h"):
            row = {"size": size, "memory": memory, "direction": way}
            row |= {"seconds": size / speed / 1e9, "bytes_per_second": speed * 1e9}
            rows.append(row)
    sizes = sorted({size for size, _ in speeds})
    return Result("copy_speed", {"sizes": sizes}, COLUMNS, rows, badge, **more)


USUAL = copies(
    {(4 * KIB, "pageable"): 0.2, (4 * KIB, "pinned"): 0.3}
    | {(MIB, "pageable"): 5, (MIB, "pinned"): 12.2}
    | {(PREDICTED_SIZE, "pageable"): 6, (PREDICTED_SIZE, "pinned"): 15}
)


def pixels(figure) -> np.ndarray:
    """Return the figure as rows of (red, green, blue), each from 0 to 255."""
    return (imread(io.BytesIO(figure.png), format="png")[..., :3] * 255).round().astype(int)


def shows(figure, colour: str) -> bool:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return bool((pixels(figure) == (red, green, blue)).all(axis=-1).any())


def test_the_title_is_what_the_numbers_say():
    title = plot_copy_speed(USUAL).title
    assert title == "Pinned memory copies at least 2.4 times faster from 1 MiB up"


def test_the_title_of_a_run_that_was_stopped_claims_nothing_about_larger_copies(t4):
    run = copy_speed(sizes=(*SIZES, 1 << 26), repeats=1)
    for _ in zip(range(12), run, strict=False):
        pass
    assert re.fullmatch(
        r"Pinned memory copies at least \d\.\d times faster from (4 KiB|1 MiB) to 16 MiB",
        plot_copy_speed(run.result()).title,
    )
    for _ in run:
        pass
    assert plot_copy_speed(run.result()).title.endswith(" up")


@pytest.mark.parametrize(
    ("speeds", "title"),
    [
        ({"pageable": 5, "pinned": 10}, "Pinned memory copies 2.0 times faster at 1 MiB"),
        ({"pageable": 5, "pinned": 5.1}, "Pinned memory makes no difference at 1 MiB"),
        ({"pageable": 5, "pinned": 2}, "Pinned memory copies 2.5 times slower at 1 MiB"),
        ({"pageable": 5}, "Not measured yet: no size has both kinds of memory"),
        ({}, "Not measured yet: no size has both kinds of memory"),
    ],
)
def test_the_title_follows_the_numbers(speeds, title):
    of_one_mib = {(MIB, memory): speed for memory, speed in speeds.items()}
    assert plot_copy_speed(copies(of_one_mib)).title == title


def test_the_words_hold_finding_numbers_prediction_recording_and_badge():
    recorded = copies(
        {(MIB, "pageable"): 10, (MIB, "pinned"): 50},
        "recorded on NVIDIA H200",
        origin={"machine": "NVIDIA H200"},
    )
    assert plot_copy_speed(USUAL, recorded, 5).alt == (
        "Pinned memory copies at least 2.4 times faster from 1 MiB up. "
        "16 MiB copies at 15 GB/s from pinned, 6 GB/s from pageable memory. "
        "Predicted at 16 MiB: 5 times faster. "
        "Recorded on NVIDIA H200: 1 MiB copies at 50 GB/s from pinned, "
        "10 GB/s from pageable memory. "
        "Measured on paper."
    )


def test_a_prediction_for_a_size_that_was_not_measured_is_not_drawn():
    figure = plot_copy_speed(copies({(MIB, "pageable"): 5, (MIB, "pinned"): 10}), prediction=3)
    assert "Predicted" not in figure.alt


def test_figures_are_white_small_and_in_the_palette():
    figure = plot_copy_speed(USUAL, prediction=5)
    height, width, _ = pixels(figure).shape
    assert (width, height) == (7 * DOTS_PER_INCH, 4 * DOTS_PER_INCH)
    assert (pixels(figure)[0] == 255).all()
    assert shows(figure, BLUE)
    assert shows(figure, VERMILLION)


def test_solid_is_measured_dashed_is_recorded_hollow_is_predicted(drawn):
    plot_copy_speed(USUAL, copies({(MIB, "pageable"): 10, (MIB, "pinned"): 50}), 5)
    canvas = drawn[-1]
    lines = canvas.axes[0].lines
    assert [line.get_linestyle() for line in lines] == ["--", "--", "-", "-", "None"]
    assert lines[-1].get_markerfacecolor() == "none"
    assert lines[-1].get_ydata()[0] == pytest.approx(5 * 6e9)
    assert [label.get_text() for label in canvas.axes[0].get_xticklabels()] == [
        "4 KiB", "16 KiB", "64 KiB", "256 KiB", "1 MiB", "4 MiB", "16 MiB"
    ]  # fmt: skip
    texts = [text.get_text() for text in canvas.axes[0].texts]
    recorded = {"pinned, recorded", "pageable, recorded"}
    assert set(texts) == {"pinned", "pageable", "predicted: 5 times"} | recorded
    assert any("measured on paper" in text.get_text() for text in canvas.texts)
    assert min(text.get_fontsize() for text in canvas.findobj(Text)) >= 9


def test_labels_at_the_ends_of_lines_do_not_overlap(drawn):
    same = {
        (size, memory): speed
        for size in (MIB, 2 * MIB)
        for memory, speed in (("pageable", 5), ("pinned", 5.01))
    }
    plot_copy_speed(copies(same), copies(same))
    canvas = drawn[-1]
    canvas.draw_without_rendering()
    boxes = sorted(
        (text.get_window_extent() for text in canvas.axes[0].texts), key=lambda box: box.y0
    )
    assert len(boxes) == 4
    assert all(below.y1 <= above.y0 + 1 for below, above in itertools.pairwise(boxes))


def test_a_notebook_shows_the_picture_and_the_words():
    figure = plot_copy_speed(USUAL)
    data, metadata = figure._repr_mimebundle_()
    assert data["text/plain"] == repr(figure) == figure.alt
    assert metadata["image/png"] == {"alt": figure.alt, "width": 672}
    assert figure.html.startswith('<img src="data:image/png;base64,')
    assert f'alt="{figure.alt}"' in figure.html


LAB_SIZES = (1 << 12, PREDICTED_SIZE)


@pytest.fixture
def lab():
    with labkit.use(virtual=True, quiet=True):
        yield CopySpeedLab(sizes=LAB_SIZES, repeats=1)


def test_prediction_result_and_recording_come_together(lab):
    said = run(lab, "5")
    assert "From pinned memory 16 MiB were copied 2.0 times faster" in said
    assert "you predicted 5, which is 2.5 times too high." in said
    words = lab.picture.value
    assert "Predicted at 16 MiB: 5 times faster." in words
    (speed,) = recorded_result("copy_speed").column(
        "bytes_per_second", size=1 << 24, memory="pinned", direction="h2d"
    )
    recorded = f"16 MiB copies at {units.rate_text(speed)} from pinned"
    assert f"Recorded on NVIDIA H200, torch 2.11: {recorded}" in words
    assert "Virtual GPU, modelled on NVIDIA Tesla T4." in words
    assert len(lab.result.rows) == 8


def test_it_says_how_far_the_prediction_was_off(lab):
    assert "which is 4.0 times too low." in run(lab, "0.5")
    assert "A good prediction!" in run(lab, "2.1")


def test_a_run_that_stops_early_leaves_the_prediction_open(lab, monkeypatch):
    monkeypatch.setattr(lab, "point", lambda row: lab.stop_button.click() or "first")
    said = run(lab, "3")
    assert "Stopped after 1 of 8 points. Copies of 16 MiB were not measured" in said
    assert "so your prediction of 3 stays open." in said
    assert "Not measured yet" in lab.picture.value


def test_without_a_gpu_it_says_what_to_do():
    assert "no GPU is in use: labkit.use(gpus=1)" in run(CopySpeedLab(), "3")


def test_bad_sizes_are_named():
    with labkit.use(virtual=True, quiet=True):
        assert "sizes=[0]: give one or more whole numbers" in run(CopySpeedLab(sizes=[0]), "3")


def test_a_verdict_on_a_result_without_the_asked_size():
    result = Result("copy_speed", {"sizes": [4096]}, COLUMNS, [], "measured on paper")
    assert "stays open" in CopySpeedLab().verdict(result, 2)
