"""Copies beside kernels: what pinned memory and a stream of its own hide."""

import pytest
import torch

import labkit
from labkit.experiments import Result, collect, copy_overlap
from labkit.experiments.overlap import ALONE, COLUMNS, TOGETHER, WAYS, hidden_share


def seconds(result: Result) -> dict[str, float]:
    return dict(zip(result.column("way"), result.column("seconds"), strict=True))


@pytest.mark.parametrize("like", ["T4", "H200"])
def test_only_a_stream_of_its_own_hides_copies(like):
    with labkit.use(gpus=1, like=like, quiet=True):
        result = collect(copy_overlap(repeats=1))
        assert labkit.races() == []
    times = seconds(result)
    assert times["pinned memory"] == pytest.approx(times["copies alone"] + times["kernels alone"], rel=0.05)
    assert times["pageable memory"] > 1.2 * times["pinned memory"]
    assert hidden_share(result) > 0.7 and hidden_share(result, "pinned memory") < 0.1


def test_it_repeats_itself_and_leaves_nothing_behind():
    with labkit.use(gpus=1, virtual=True, quiet=True):
        first, second = (collect(copy_overlap(batches=2, size=1 << 20, width=64, repeats=1)) for _ in range(2))
        assert torch.ones(2, device="cuda").tolist() == [1, 1]  # values are computed again
    assert first.column("way") == list(WAYS)
    assert first.column("seconds") == pytest.approx(second.column("seconds"))


def table(**times: float) -> Result:
    rows = [{"way": way.replace("_", " "), "seconds": value} for way, value in times.items()]
    return Result("copy_overlap", {}, COLUMNS, rows, "measured on paper")


def test_the_share_is_of_the_shorter_of_the_two():
    assert hidden_share(table(copies_alone=2.0, kernels_alone=8.0, pinned_memory=9.0), "pinned memory") == 0.5
    assert hidden_share(table(copies_alone=8.0, kernels_alone=2.0, pinned_memory=8.0), "pinned memory") == 1.0
    assert hidden_share(table(copies_alone=8.0, kernels_alone=2.0, pinned_memory=12.0), "pinned memory") == 0.0
    assert hidden_share(table(copies_alone=8.0, pinned_memory=12.0), "pinned memory") is None


def test_some_of_the_ways_in_their_own_order():
    with labkit.use(gpus=1, virtual=True, quiet=True):
        run = copy_overlap(ways=[TOGETHER[1], ALONE[0]], batches=1, size=4096, width=8, repeats=1)
        assert run.total == 2
        assert collect(run).column("way") == [ALONE[0], TOGETHER[1]]


def test_bad_arguments_and_no_gpu_are_refused():
    with pytest.raises(RuntimeError, match="no GPU is in use"):
        copy_overlap()
    with labkit.use(gpus=1, virtual=True, quiet=True):
        for arguments, message in (
            ({"ways": []}, "choose from 'copies alone'"),
            ({"ways": ["by hand"]}, "choose from 'copies alone'"),
            ({"batches": 0}, "batches=0: give a whole number, 1 or more"),
            ({"size": 1 << 30}, f"size={1 << 30}: give a whole number up to {1 << 28}"),
            ({"width": "wide"}, "width='wide'"),
        ):
            with pytest.raises(ValueError, match=message):
                copy_overlap(**arguments)


@pytest.mark.gpu
def test_a_real_gpu_says_the_same():
    with labkit.use(gpus=1, virtual=False, quiet=True):
        result = collect(copy_overlap())
    times = seconds(result)
    assert times[TOGETHER[2]] < times[TOGETHER[1]] < times[TOGETHER[0]]
    assert hidden_share(result) > 0.3  # 0.49 to 0.71 on H200s
