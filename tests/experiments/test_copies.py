"""The speed of copies, on virtual GPUs and on this machine's own."""

import pytest

import labkit
from labkit.experiments import collect, copy_speed
from labkit.experiments.copies import pinned_gain

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
    first, second = (collect(copy_speed(sizes=SIZES, repeats=3)).column("seconds") for _ in range(2))
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


def test_without_a_gpu_it_says_so():
    with pytest.raises(RuntimeError, match="no GPU is in use"):
        copy_speed()


@pytest.mark.gpu
def test_a_real_gpu_copies_large_pinned_tensors_faster():
    with labkit.use(virtual=False, quiet=True):
        result = collect(copy_speed(sizes=[1 << 26], repeats=5))
    assert result.badge.startswith("measured on NVIDIA")
    assert pinned_gain(result)[1 << 26] > 1
