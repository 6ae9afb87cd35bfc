"""The histogram of gradients: which become 0, and how it is drawn."""

import pytest
import torch

import labkit
from gpulessons.lesson_07.magnitudes import plot_magnitudes, power_text


@pytest.fixture(autouse=True)
def one_gpu():
    with labkit.use(gpus=1, virtual=True, quiet=True):
        yield


def test_the_title_says_which_share_becomes_0_in_float16():
    numbers = torch.tensor([2.0**-26, -(2.0**-30), 2.0**-24, 1.0, 0.0, 0.0], device="cuda")
    figure = plot_magnitudes({"plain": numbers, "scaled": numbers * 2.0**16})
    assert figure.title == "Become 0 in float16: 50% plain, 0% scaled"
    assert "Plain: sizes from 2⁻³⁰ to 2¹, half of them below" in figure.alt


def test_a_small_share_is_not_called_0():
    numbers = torch.ones(1000, device="cuda")
    numbers[0] = 2.0**-30
    assert "less than 1% plain" in plot_magnitudes({"plain": numbers}).title


def test_each_panel_has_a_bar_for_each_power_of_two(drawn):
    numbers = torch.tensor([1.0, 1.5, -1.9, 4.0], device="cuda")
    plot_magnitudes({"plain": numbers})
    [canvas] = drawn
    [axes] = canvas.axes
    bars = {bar.get_x(): bar.get_height() for bar in axes.patches if bar.get_width() == 1.0}
    assert bars == {0: 0.75, 2: 0.25}
    assert axes.get_title(loc="left") == "plain"
    assert {"becomes 0", "fewer digits", "infinite"} == {text.get_text() for text in axes.texts}


def test_only_zeros_are_refused():
    with pytest.raises(ValueError, match="All numbers of 'plain' are 0"):
        plot_magnitudes({"plain": torch.zeros(3, device="cuda")})


def test_exponents_are_raised():
    assert power_text(-25) == "2⁻²⁵"
