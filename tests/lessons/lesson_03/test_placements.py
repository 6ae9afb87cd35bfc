"""What lies on which device, and the figure of it."""

import pytest
import torch
from matplotlib.patches import FancyBboxPatch
from torch import nn
from torch.nn.parallel import replicate

import labkit
from gpulessons.lesson_03.labs import plot_placement
from gpulessons.lesson_03.labs.placements import placement


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


def on(device: str, count: int = 4) -> torch.Tensor:
    return torch.ones(count, device=device)


@pytest.mark.parametrize(
    ("kinds", "title"),
    [
        ({"parameters": ["cuda:0"]}, "Parameters on cuda:0"),
        ({"parameters": ["cuda:0", "cuda:1"], "inputs": ["cuda:0"]}, "Parameters on all 2 GPUs, inputs on cuda:0"),
        ({"parameters": ["cuda:1"], "inputs": ["cuda:1"], "outputs": ["cuda:1"]}, "Parameters, inputs and outputs on cuda:1"),
        ({"inputs": ["cpu", "cuda:0"], "outputs": []}, "Inputs on cpu and cuda:0"),
        ({"inputs": ["cpu", "cuda:0", "cuda:1"]}, "Inputs on 3 devices"),
        ({"inputs": []}, "Nothing lies on any device"),
    ],
)
def test_the_title_says_what_lies_where(kinds, title):
    assert plot_placement(**{kind: [on(device) for device in devices] for kind, devices in kinds.items()}).title == title


def test_the_words_name_devices_that_hold_the_same_together():
    figure = plot_placement(inputs=[on("cuda:0"), on("cuda:1")], outputs=on("cuda:0", 1), gradients=None)
    assert figure.alt == (
        "Inputs on all 2 GPUs, outputs on cuda:0. Inputs: 16 B (4) on each of cuda:0, cuda:1. Outputs: 4 B (1) on cuda:0. "
        "Gradients: none. Virtual GPU, modelled on NVIDIA Tesla T4."
    )


def test_a_box_for_each_device_and_kind_and_a_column_for_the_cpu_only_where_it_holds_something(drawn):
    plot_placement(inputs=on("cuda:0"), something=on("cuda:1"))
    plot_placement(inputs=on("cpu"))
    boxes = [[box for box in canvas.axes[0].patches if isinstance(box, FancyBboxPatch)] for canvas in drawn]
    assert [len(found) for found in boxes] == [4, 3]
    assert [box.get_linestyle() for box in boxes[0]] == ["-", ":", ":", "-"]
    texts = [[text.get_text() for text in canvas.axes[0].texts] for canvas in drawn]
    assert texts[0][:2] == ["cuda:0", "cuda:1"] and texts[1][:3] == ["cpu", "cuda:0", "cuda:1"]
    assert "16 B\n4" in texts[0]
    assert min(text.get_fontsize() for text in drawn[0].axes[0].texts) >= 9


def test_more_kinds_make_a_taller_figure(drawn):
    plot_placement(inputs=on("cuda:0"))
    plot_placement(a=on("cuda:0"), b=on("cuda:0"), c=on("cuda:0"), d=on("cuda:0"))
    low, high = (canvas.get_figheight() for canvas in drawn)
    assert low < high <= 4
