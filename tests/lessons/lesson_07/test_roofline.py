"""The roofline: its roofs, its title, and the words for those who cannot see it."""

import pytest

import labkit
from gpulessons.lesson_07.roofline import bandwidth, gain, plot_roofline, short_number
from labkit.labs.experiment import Result

COLUMNS = {
    "operation": "",
    "size": "",
    "format": "",
    "operations_per_byte": "",
    "operations_per_second": "",
}


def speeds(rows):
    named = [dict(zip(COLUMNS, row, strict=True)) for row in rows]
    return Result("speed", {}, COLUMNS, named, "written by hand")


ROWS = [
    ("sum", 64, "float32", 1 / 12, 1e9),
    ("sum", 64, "float16", 1 / 6, 1e9),
    ("sum", 8192, "float32", 1 / 12, 20e9),
    ("sum", 8192, "float16", 1 / 6, 40e9),
    ("product", 64, "float32", 10, 20e9),
    ("product", 64, "float16", 20, 20e9),
    ("product", 8192, "float32", 1365, 4e12),
    ("product", 8192, "float16", 2730, 28e12),
]


def test_the_roofs_are_the_fastest_sum_and_the_fastest_products(drawn):
    figure = plot_roofline(speeds(ROWS))
    assert bandwidth(speeds(ROWS)) == pytest.approx(240e9)
    assert "Roofs: memory 240 GB/s, 4 T operations per second in float32, 28 T" in figure.alt
    [canvas] = drawn
    [axes] = canvas.axes
    texts = [text.get_text() for text in axes.texts]
    assert {"memory: 240 GB/s", "float16:\n28 T", "float32:\n4 T", "8192²", "sum of 64²"} <= {
        *texts
    }


def test_the_title_says_what_float16_gains_at_the_largest_size():
    title = plot_roofline(speeds(ROWS)).title
    assert (
        title
        == "In float16, a product of 8192² is 7 times as fast, a sum of 8192² is 2 times as fast"
    )
    assert gain(speeds(ROWS), "product", 64) == 1


@pytest.mark.parametrize("operation", ["sum", "product"])
@pytest.mark.parametrize("form", ["float32", "float16"])
def test_a_roofline_needs_sums_and_products_in_both_formats(operation, form):
    rows = [row for row in ROWS if (row[0], row[2]) != (operation, form)]
    with pytest.raises(ValueError, match=f"There is no {operation} in {form}"):
        plot_roofline(speeds(rows))


def test_numbers_are_short():
    texts = [short_number(number) for number in (1e15, 4.03e12, 750e9, 3e6, 12)]
    assert texts == ["1 P", "4.03 T", "750 G", "3 M", "12"]


def test_no_measured_point_of_a_virtual_gpu_is_above_a_roof():
    import torch

    def speed(operation, size, format):
        x = torch.ones(2, size, size, device="cuda", dtype=getattr(torch, format))
        work = {"sum": torch.add, "product": torch.mm}[operation]
        operations = {"sum": size**2, "product": 2 * size**3}[operation]
        seconds = labkit.seconds(lambda: work(x[0], x[1]))
        intensity = operations / (3 * size**2 * x.element_size())
        return {"operations_per_byte": intensity, "operations_per_second": operations / seconds}

    grid = {
        "operation": ["sum", "product"],
        "size": [64, 512, 4096],
        "format": ["float32", "float16"],
    }
    with labkit.use(gpus=1, like="T4", virtual=True, quiet=True):
        result = labkit.measure(speed, grid, values=False)
    rate = bandwidth(result)
    for row in result:
        assert row["operations_per_second"] <= 1.01 * rate * row["operations_per_byte"]
