"""What lies on which device, counted."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import replicate

import labkit
from labkit.experiments import placement


@pytest.fixture(autouse=True)
def gpus():
    with labkit.use(gpus=2, virtual=True, quiet=True):
        yield


def test_bytes_and_shapes_by_kind_and_device():
    result = placement(inputs=[torch.ones(3, 2, device="cuda:1"), torch.ones(5)], loss=torch.tensor(1.0, device="cuda"), nothing=None)
    assert result.rows == [
        {"kind": "inputs", "device": "cpu", "bytes": 20, "shape": "5"},
        {"kind": "inputs", "device": "cuda:1", "bytes": 24, "shape": "3 × 2"},
        {"kind": "loss", "device": "cuda:0", "bytes": 4, "shape": "one number"},
    ]
    assert result.parameters == {"kinds": ["inputs", "loss", "nothing"], "devices": ["cuda:0", "cuda:1"]}


def test_replicas_have_parameters_and_the_first_shares_the_models():
    model = nn.Linear(4, 2, device="cuda")
    result = placement(parameters=[model, replicate(model, [0, 1])])
    assert result.column("bytes") == [40, 40]
    assert result.column("shape") == ["2 tensors", "2 tensors"]


def test_a_view_of_the_same_place_counts_once_and_nested_values_count():
    x = torch.ones(4, device="cuda")
    assert placement(inputs={"a": (x, x.view(2, 2))}).column("bytes") == [16]


def test_other_values_are_refused():
    with pytest.raises(TypeError, match="inputs=3: give tensors, modules"):
        placement(inputs=3)


def test_without_a_gpu_it_says_what_to_do():
    labkit.use(None)
    with pytest.raises(RuntimeError, match="no GPU is in use"):
        placement(inputs=torch.ones(1))
