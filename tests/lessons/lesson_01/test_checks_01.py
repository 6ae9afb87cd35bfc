"""Test the checks of lesson 01 with observations written by hand."""

import random
import re
from collections import namedtuple
from pathlib import Path

import nbformat
import pytest
import torch
from torch.utils.data import DataLoader

import labkit
from gpulessons.lesson_01 import checks as lesson_01
from gpulessons.lesson_01.checks import (
    expected_bytes,
    judge_copies,
    judge_masks,
    judge_models,
    judge_work,
)


def test_masks_of_every_device_are_tried():
    for seed in range(10):
        devices = {case["device"] for case in lesson_01.draw_masks(random.Random(seed))}
        assert devices == set(lesson_01.DEVICES)


def test_a_mask_is_judged_by_device_dtype_shape_and_values():
    case = {"device": "cuda:1", "size": 3, "lengths": [1, 3]}
    good = {"type": "Tensor", "device": "cuda:1", "dtype": "torch.bool", "shape": [2, 3]}
    good |= {"values": [True, False, False, True, True, True], "lengths": [1, 3]}
    assert judge_masks([good], [case]).passed
    for change in (
        {"device": "cuda:0"},
        {"dtype": "torch.int64"},
        {"shape": [3, 2]},
        {"values": [True] * 6},
        {"type": "list"},
        {"lengths": [0, 2]},
    ):
        assert not judge_masks([good | change], [case]).passed


def test_each_batch_has_at_each_level_a_tensor_to_move_and_one_to_leave():
    def devices(node):
        children = [child for _, child in node[1]] if node[0] == "dict" else node[1]
        if children:
            found = [child[3] for child in children if child[0] == "tensor"]
            assert case["device"] in found and set(found) != {case["device"]}
            for child in children:
                if child[0] in ("dict", "list", "tuple"):
                    devices(child)

    for seed in range(10):
        for case in lesson_01.draw_batch(random.Random(seed)):
            devices(case["batch"])


def test_the_solution_moves_a_namedtuple_as_a_data_loader_makes_it():
    """A DataLoader makes such batches. The class of a namedtuple takes its values one by one."""
    notebook = Path(__file__).parents[3] / "notebooks" / "01_device_basics.ipynb"
    cells = nbformat.read(notebook, as_version=4).cells
    [solution] = [cell.source for cell in cells if "Solution of 01.5" in cell.source]
    names = {"torch": torch}
    exec(re.search(r"```python\n(.*?)```", solution, re.DOTALL)[1], names)
    pair = namedtuple("Pair", ["x", "label"])
    batch = next(iter(DataLoader([pair(torch.ones(2), 1), pair(torch.ones(2), 0)], batch_size=2)))
    with labkit.use(gpus=1, virtual=True, quiet=True):
        moved = names["move"]({"pairs": [batch]}, "cuda:0")["pairs"][0]
        assert type(moved) is pair
        assert [moved.x.device.type, moved.label.device.type] == ["cuda", "cuda"]
        del moved


def test_bytes_are_counted_by_hand():
    layers = [
        {"kind": "linear", "device": "cpu", "dtype": "float16", "in": 3, "out": 2},  # (6 + 2) × 2
        {"kind": "norm", "device": "cuda:0", "features": 5},  # 4 × 5 × 4 + 8
        # (4 + 2) × 4
        {"kind": "shared", "device": "cuda:0", "dtype": "float32", "in": 2, "out": 2},
    ]
    assert expected_bytes(layers) == {"cpu": 16, "cuda:0": 112}

    def judged(counted):
        return judge_models([{"type": "dict", "bytes": counted, "keys": ["str"]}], [layers])

    assert judged({"cpu": 16, "cuda:0": 112}).passed
    assert "has 112 bytes, and you counted 100" in judged({"cpu": 16, "cuda:0": 100}).message
    assert "counted a shared" not in judged({"cpu": 16, "cuda:0": 100}).message
    twice = judged({"cpu": 16, "cuda:0": 128}).message
    assert "Did you count a shared parameter or buffer twice" in twice
    assert "your dict has nothing" in judged({}).message
    devices = {"type": "dict", "bytes": {"cpu": 16, "cuda:0": 112}, "keys": ["device"]}
    assert "keys of your dict are of type device" in judge_models([devices], [layers]).message


def test_one_of_the_models_is_not_on_every_device():
    for seed in range(10):
        models = lesson_01.draw_models(random.Random(seed))
        assert [len({layer["device"] for layer in layers}) for layers in models] == [3, 2, 2]


def test_the_work_also_returns_false_values():
    cases = lesson_01.draw_work(random.Random(1))
    results = [case["result"] for case in cases if not case["raises"]]
    assert 0 in results and "" in results and any(results)
    good = []
    for case in cases:
        seen = {"seen": [case["on"]], "after": case["before"]}
        good.append({**seen, "result": case["result"], "raised": "Interrupted"})
    assert judge_work(good, cases).passed
    assert "did not run" in judge_work([good[0] | {"seen": []}], cases[:1]).message


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        ({}, None),
        ({"total": 0.0158}, "ran one after the other"),
        ({"left": 0.005}, "before the copy on cuda:1 was complete"),
        ({"calls": 0}, "ran 0 times"),
        ({"same": False}, "values or its dtype differ"),
        ({"device": "cuda:0"}, "expected a copy on cuda:1, got one on cuda:0"),
        ({"shape": [1], "same": False}, "expected a copy of shape [100], got shape [1]"),
    ],
)
def test_a_copy_is_judged_by_its_time_and_values(change, hint):
    """Judge a copy of 10 ms and work of 5 ms. The best total is 10 ms, and 15 ms is no overlap."""
    case = {"device": "cuda:1"}
    attempt = {"total": 0.0101, "left": 0.0, "calls": 1, "work": 0.005}
    attempt |= {"device": "cuda:1", "shape": [100], "same": True}
    attempt |= change
    verdict = judge_copies([{"copy": 0.010, "shape": [100], "tries": [attempt]}], [case])
    assert verdict.passed == (hint is None)
    assert hint is None or hint in verdict.message
