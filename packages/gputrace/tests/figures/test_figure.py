"""What all figures share: text that fits, and ticks with units."""

import pytest
from matplotlib.figure import Figure as Canvas

from gputrace.figures import figure


@pytest.mark.parametrize("bold", [False, True])
def test_a_text_is_as_wide_as_it_is_drawn(bold):
    canvas = Canvas(figsize=(7, 4), dpi=144)
    text = 'train.py:12  loss.backward() "$x$" MiB…'
    drawn = canvas.text(
        0,
        0,
        text,
        fontsize=11,
        family=figure.FONT,
        weight="bold" if bold else "normal",
        parse_math=False,
    )
    assert drawn.get_window_extent().width / 2 == pytest.approx(
        figure.text_width(text, 11, bold), rel=0.02
    )


def test_a_text_is_shortened_to_its_width_and_no_more():
    text = "loss = model(batch).square().mean()"
    assert figure.shortened(text, 1000) == text
    for width in (60, 100, 150):
        short = figure.shortened(text, width)
        assert short.endswith("…") and text.startswith(short[:-1])
        assert figure.text_width(short) <= width < figure.text_width(text[: len(short)] + "…")
    assert figure.shortened(text, 1) == "…"


def test_what_the_font_lacks_is_a_box_and_lines_become_one():
    assert figure.drawable("a漢\n\tb µ×…") == "a□  b µ×…"


@pytest.mark.parametrize(
    ("top", "told"),
    [
        (1, "0, 1 B"),
        (60 << 20, "0, 15 MiB, 30 MiB, 45 MiB, 60 MiB"),
        (2 << 30, "0, 0.4 GiB, 0.8 GiB, 1.2 GiB, 1.6 GiB, 2 GiB"),
    ],
)
def test_bytes_upwards(top, told):
    axes = Canvas().subplots()
    figure.byte_ticks(axes, top, 5)
    assert [label.get_text() for label in axes.get_yticklabels()] == told.split(", ")


def test_bytes_to_the_right_go_by_powers_of_two():
    axes = Canvas().subplots()
    figure.binary_ticks(axes, 20 << 20)
    assert [label.get_text() for label in axes.get_xticklabels()] == [
        "0",
        "4 MiB",
        "8 MiB",
        "12 MiB",
        "16 MiB",
        "20 MiB",
    ]


@pytest.mark.parametrize(("end", "label"), [(3.0, "s"), (0.02, "ms"), (4e-6, "µs"), (1e-7, "µs")])
def test_times_have_one_unit_an_axis(end, label):
    axes = Canvas().subplots()
    figure.time_ticks(axes, end)
    assert axes.get_xlabel() == f"time since the start, {label}"
    assert axes.get_xlim() == (0, end)


def test_a_figure_is_saved_as_png(tmp_path):
    drawn = figure.Figure(Canvas(figsize=(1, 1)), "nothing")
    drawn.save(tmp_path / "memory.PNG")
    assert (tmp_path / "memory.PNG").read_bytes() == drawn.png
    for name in ("memory.pdf", "memory", ".png"):
        with pytest.raises(ValueError, match=rf"path='{name}': expected a name that ends in .png"):
            drawn.save(name)


def test_a_picture_is_drawn_once_and_only_when_it_is_looked_at(monkeypatch):
    draws = []
    monkeypatch.setattr(
        Canvas, "savefig", lambda canvas, file, **how: draws.append(file.write(b"png"))
    )
    made = figure.Figure(Canvas(figsize=(1, 1)), "nothing")
    assert draws == []
    assert made.png == made.png == b"png" and len(draws) == 1


@pytest.mark.parametrize(
    ("title", "whole"),
    [
        ("Parameters on cuda:0", True),
        # wider as it is drawn
        (
            "GPUs compute for 9% of the small model's step, 44% of the large model's step",
            True,
        ),
        # made exactly as small as fits
        (
            "Share of a step for which the GPUs compute: small model 15%, large model 70%",
            True,
        ),
        ("Parameters on cuda:0 " * 40, False),
    ],
)
def test_a_title_fits_and_can_be_read(title, whole):
    canvas, _ = figure.new_canvas(title)
    canvas.draw_without_rendering()
    (drawn,) = canvas.texts
    assert drawn.get_window_extent().x1 <= canvas.bbox.x1 and 9 <= drawn.get_fontsize() <= 11
    assert (drawn.get_text() == title) == whole


def test_a_name_that_was_moved_is_led_to():
    canvas, axes = figure.new_canvas("three lines that end together")
    figure.label_ends(
        axes,
        [
            (1, 0.5, "first", figure.BLUE),
            (1, 0.501, "second", figure.GREEN),
            (1, 0.9, "third", figure.ORANGE),
        ],
    )
    (leader,) = canvas.artists or canvas.lines
    assert leader.get_color() == figure.GREEN and leader.get_ydata()[1] > leader.get_ydata()[0]
