"""The workspaces of convolutions, by the table and by the rule, are those that were recorded."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import virtualgpu
from virtualgpu.ops.nn.convolution_workspaces import (
    INPUT_GRADIENT,
    OUTPUT,
    WEIGHT_GRADIENT,
    Convolution,
    Formula,
    rule,
    workspaces,
)


def space(
    batch: int, size: int, channels: int = 64, kernel: int = 3, **settings
) -> tuple[int, ...]:
    """Return the workspaces of a float32 layer with padding and equal input and output channels."""
    square, one = (size, size, 1), (1, 1, 1)
    fields = {
        "dtype": 0,
        "channels_last": False,
        "transposed": False,
        "into": channels,
        "out": channels,
        "groups": 1,
        "batch": batch,
        "dims": 2,
        "kernel": (kernel, kernel, 1),
        "stride": one,
        "padding": (kernel // 2, kernel // 2, 0),
        "dilation": one,
        "extent": square,
        "result": square,
    }
    return workspaces(Convolution(**fields | settings))


def test_a_batch_between_two_measured_ones_lies_on_their_line():
    few, more, many = (space(n, 28)[0] for n in (32, 36, 40))
    assert few < more < many and more - few == many - more == 4 * 2 * 4 * 64 * 28 * 28


MIB = 1 << 20
REAL = json.loads((Path(__file__).parent / "convolutions_h100.json").read_text())


def test_peaks_of_layers_that_ran_on_an_h100():
    """Check that 95% of 38 layers' forward and backward peaks are within 2 MiB or 2%."""
    wrong = []
    with virtualgpu.use(1, like="H100", values=False):
        for name, real in REAL["peaks"].items():
            for found, expected in zip(peaks_of_layer(name), real, strict=True):
                if abs(found - expected) > max(2 * MIB, 0.02 * expected):
                    wrong.append((name, found, expected))
    assert len(wrong) <= 0.05 * 2 * len(REAL["peaks"]), wrong


def peaks_of_layer(name):
    """Return the peak memory of a layer's forward pass and of its backward pass, in bytes."""
    kind, pair, *shape, precision = re.sub(r"[\[\],]", "", name).split()
    into, out = map(int, pair.split("-"))
    if kind == "transposed2":
        layer = torch.nn.ConvTranspose2d(into, out, 2, 2).cuda()
    else:
        kernel = int(kind[-1])
        layer = torch.nn.Conv2d(into, out, kernel, padding=kernel // 2, bias=kernel == 3).cuda()
    x = torch.randn(*map(int, shape), device="cuda", requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
        for _ in range(2):
            layer(x).float().sum().backward()
        layer.zero_grad()
        x.grad = None
        result, forward = peak_of(lambda: layer(x))
    gradient = torch.ones_like(result)
    _, backward = peak_of(lambda: result.backward(gradient))
    return forward, backward


def peak_of(work):
    """Call `work` and return (its result, its peak memory above what was allocated before)."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = work()
    return result, torch.cuda.max_memory_allocated() - before


@pytest.mark.slow
def test_the_rule_is_as_close_to_the_recording_as_its_profile_says():
    from ....benchmarks.fidelity import convolution_rule

    convolution, true, held_back = convolution_rule.read()
    chosen = np.flatnonzero(held_back)[::200]
    columns = (np.asarray(field) for field in convolution[:8])
    scalars = [column[chosen].tolist() for column in columns]
    triples = [np.stack(field, 1)[chosen].tolist() for field in convolution[8:]]
    profile = json.loads(convolution_rule.PROFILE.read_text())["results"]
    for result, entry in enumerate(profile):
        good = 0
        for index, row in enumerate(chosen):
            fields = [column[index] for column in scalars]
            fields += [tuple(field[index]) for field in triples]
            found = rule().bytes(Convolution(*fields), result)
            real = int(true[row, result])
            good += abs(found - real) <= max(2 * MIB, 0.02 * real)
        assert good / len(chosen) == pytest.approx(entry["within_2_mib_or_2_percent"], abs=0.03)


def test_formulas_add_their_parts():
    layer = Convolution(
        1,
        False,
        False,
        3,
        12,
        1,
        2,
        2,
        (3, 3, 1),
        (1, 1, 1),
        (1, 1, 0),
        (1, 1, 1),
        (8, 8, 1),
        (8, 8, 1),
    )
    # Channels are padded to 8, with 2 bytes each.
    x, y, w = 2 * 8 * 64 * 2, 2 * 16 * 64 * 2, 8 * 16 * 9 * 2
    assert Formula("XYW", 0).bytes(layer, OUTPUT) == x + y + w
    assert Formula("XYW", 0, weights=3).bytes(layer, WEIGHT_GRADIENT) == x + y + w + 3 * 2 * w
    assert Formula("XY", wide=True).bytes(layer, OUTPUT) == 2 * 2 * 64 * 2 * (3 + 12)
    assert Formula(outputs=2).bytes(layer, INPUT_GRADIENT) == 2 * 2 * 3 * 64 * 4
    assert Formula(each_sample=True).bytes(layer, WEIGHT_GRADIENT) == 2 * 3 * 12 * 9 * 4
    # 12 rows and 27 columns fit into one tile of 128 by 128. Four of 132 multiprocessors could
    # share it, because its sum has 128 terms.
    assert Formula(tile=(128, 128, 1)).bytes(layer, WEIGHT_GRADIENT) == 4 * 128 * 128 * 4


def test_a_full_last_wave_shares_no_tiles():
    rows = 128 * 132
    layer = Convolution(
        1,
        False,
        False,
        64,
        128,
        1,
        1,
        1,
        (1, 1, 1),
        (1, 1, 1),
        (0, 0, 0),
        (1, 1, 1),
        (rows, 1, 1),
        (rows, 1, 1),
    )
    assert Formula(tile=(128, 128, 1)).bytes(layer, OUTPUT) == 0
