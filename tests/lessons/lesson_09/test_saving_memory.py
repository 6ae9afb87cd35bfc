"""Memory bought with time, measured and drawn."""

import pytest
import torch

import labkit
from gpulessons.lesson_09.labs import memory_for_time, plot_memory_for_time
from gpulessons.lesson_09.labs.saving_memory import prices
from labkit.labs import collect


@pytest.mark.slow
@pytest.mark.parametrize("like", ["T4", "H200"])
def test_every_way_saves_memory_and_costs_time(like):
    with labkit.use(gpus=1, like=like, virtual=True, quiet=True):
        before = torch.cuda.memory_allocated()
        result = collect(memory_for_time())
        assert torch.cuda.memory_allocated() - before <= 2 * (33 << 20) + (1 << 21)  # the workspaces of cuBLAS
    price = prices(result)
    assert price["baseline"] == (1, 1)
    for way, (memory, time) in price.items():
        assert way == "baseline" or (memory < 0.7 and time > 1)
    assert price["checkpoints"][1] < 1.5 < price["offload"][1]
    figure = plot_memory_for_time(result, result)
    assert figure.title.startswith("Least memory: 4 micro-batches, with ") and "offload" in figure.alt


def test_one_way_alone_has_no_price():
    with labkit.use(gpus=1, virtual=True, quiet=True):
        result = memory_for_time().result()
    result.rows.append({"way": "checkpoints", "peak": 1 << 20, "seconds": 0.1})
    assert prices(result) == {}
    assert plot_memory_for_time(result).title == "Not measured yet: memory for time"
