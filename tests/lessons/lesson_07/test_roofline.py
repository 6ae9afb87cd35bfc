"""The speed of number formats, measured and drawn."""

import pytest
import torch

import labkit
from gpulessons.lesson_07.labs import format_speed, plot_format_speed
from gpulessons.lesson_07.labs.roofline import COLUMNS, format_gain
from labkit.labs import Result, collect, recorded_result


@pytest.mark.parametrize(("like", "bfloat16_gain"), [("T4", 1.0), ("H200", 10.0)])
def test_tensor_cores_speed_up_large_products_and_memory_halves_additions(like, bfloat16_gain):
    with labkit.use(gpus=1, like=like, quiet=True):
        result = collect(format_speed([256, 8192], repeats=1))
    products, additions = (format_gain(result, operation, "float16") for operation in ("product", "addition"))
    assert products[8192] > 5 and products[256] < products[8192] / 2
    assert 1.8 < additions[8192] <= 2.0 and additions[256] < 1.3
    assert format_gain(result, "product", "bfloat16")[8192] > bfloat16_gain - 1e-9
    assert result.recorded() is not None


@pytest.mark.parametrize(("like", "has_tf32"), [("T4", False), ("L4", True), ("A100", True)])
def test_only_a_chip_with_tf32_shows_it(like, has_tf32):
    with labkit.use(gpus=1, like=like, quiet=True):
        run = format_speed([256], repeats=1)
        result = collect(run)
    assert len(result.rows) == run.total
    assert ("tf32" in result.column("format")) == has_tf32
    assert ("tf32" in plot_format_speed(result).alt) == has_tf32


def test_the_model_of_the_h200_is_near_the_recorded_one():
    with labkit.use(gpus=1, like="H200", quiet=True):
        result = collect(format_speed(repeats=1))
    recorded = recorded_result("format_speed")
    for name in ("tf32", "bfloat16", "float16"):
        model, real = (format_gain(source, "product", name)[8192] for source in (result, recorded))
        assert model == pytest.approx(real, rel=0.2)


def test_rates_follow_from_seconds_and_nothing_is_left_behind():
    before = torch.get_float32_matmul_precision()
    with labkit.use(gpus=1, virtual=True, quiet=True):
        held = []
        for _ in range(2):
            run = format_speed([128], repeats=1)
            rows = [next(run) for _ in range(2)]
            run.close()
            held.append(torch.cuda.memory_allocated())
        assert held[0] == held[1]  # the workspace of the first product stays
        assert torch.ones(2, device="cuda").tolist() == [1, 1]  # values are computed again
    assert run.total == 6  # a T4 has no TF32
    assert [row["format"] for row in rows] == ["float32", "bfloat16"]
    for row, itemsize in zip(rows, (4, 2), strict=True):
        assert row["flops_per_second"] * row["seconds"] == pytest.approx(2 * 128**3)
        assert row["bytes_per_second"] * row["seconds"] == pytest.approx(3 * 128**2 * itemsize)
    assert torch.get_float32_matmul_precision() == before


def test_bad_arguments_are_refused():
    with labkit.use(gpus=1, virtual=True, quiet=True):
        with pytest.raises(ValueError, match=r"sizes=\[0\]: give one or more whole numbers from 1 to 16384"):
            format_speed([0])
        with pytest.raises(ValueError, match="repeats=0"):
            format_speed(repeats=0)


def speeds(**seconds) -> Result:
    """A result of one size from seconds by format, with additions twice as fast in float16."""
    rows = []
    for operation, flops in (("product", 2 * 64**3), ("addition", 64**2)):
        for name, time in seconds.items():
            moved = 3 * 64**2 * (4 if "32" in name else 2)
            rates = {"flops_per_second": flops / time, "bytes_per_second": moved / time}
            rows.append({"size": 64, "operation": operation, "format": name, "seconds": time, **rates})
    return Result("format_speed", {"sizes": [64]}, COLUMNS, rows, "measured on paper")


@pytest.mark.parametrize(
    ("seconds", "title"),
    [
        ({"float32": 8e-6, "float16": 2e-6}, "In float16, 64² products are 4 times faster, sums 4 times faster"),
        ({"float32": 2e-6, "float16": 4e-6}, "In float16, 64² products are 2 times slower, sums 2 times slower"),
        ({"float32": 2e-6}, "Not measured yet: products and additions in float32 and float16"),
        ({}, "Not measured yet: products and additions in float32 and float16"),
    ],
)
def test_the_roofline_says_what_is_gained(drawn, seconds, title):
    figure = plot_format_speed(speeds(**seconds))
    assert figure.title == title
    if seconds:
        assert f"{2 * 64**3 / seconds['float32'] / 1e9:.3g} GFLOP/s in float32" in figure.alt
        shown = [text.get_text() for text in drawn[0].axes[0].get_legend().get_texts()]
        assert shown == [f"{name}: {2 * 64**3 / time / 1e9:.3g} G" for name, time in seconds.items()]
