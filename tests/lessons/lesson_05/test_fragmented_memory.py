"""Fragmentation: what still succeeds, and the figure of it."""

import os
from dataclasses import replace

import pytest
import torch

import labkit
from gpulessons.lesson_05.labs import fragmentation, plot_fragmentation
from gpulessons.lesson_05.labs.fragmented_memory import COLUMNS
from labkit.labs import Result, collect

MIB = 1 << 20
MEMORY = 320 * MIB


@pytest.fixture(scope="module", autouse=True)
def gpu():
    with labkit.use(memory="2GiB", virtual=True, quiet=True):
        yield


def largest(**parameters):
    """By block in MiB and setting, the largest request in MiB."""
    result = collect(fragmentation(memory=MEMORY, **parameters))
    return {(row["block"] // MIB, row["setting"].partition(":")[0]): row["largest"] // MIB for row in result.rows}


def test_holes_serve_requests_of_their_own_size_unless_a_setting_helps():
    found = largest(blocks=[4 * MIB, 32 * MIB])
    assert found[4, "default"] == found[4, "max_split_size_mb"] == found[4, "expandable_segments"] == 4
    assert found[32, "default"] == 32
    assert found[32, "max_split_size_mb"] == 160  # all that is free
    assert 32 < found[32, "expandable_segments"] < 160


def test_what_lies_free_elsewhere_plays_no_part_and_everything_is_put_back(monkeypatch):
    monkeypatch.setitem(os.environ, "PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128")
    tensors = [torch.empty(5 * MIB, dtype=torch.uint8, device="cuda") for _ in range(8)]
    del tensors[1::2]
    torch.cuda.set_per_process_memory_fraction(0.5)
    try:
        assert largest(blocks=[16 * MIB], settings={"default": ""}) == {(16, "default"): 16}
        assert torch.cuda.get_per_process_memory_fraction() == 0.5
        assert torch.cuda.memory_reserved() == 40 * MIB
        assert torch.cuda.memory_stats()["max_split_size"] == 128 * MIB
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch._C._accelerator_setAllocatorSettings("")


def test_a_setting_that_torch_refuses_leaves_nothing_behind():
    run = fragmentation(blocks=[MIB], memory=20 * MIB, settings={"too small": "max_split_size_mb:1"})
    with pytest.raises(RuntimeError, match="max_split_size_mb must be at least 20"):
        next(run)
    assert torch.cuda.get_per_process_memory_fraction() == 1.0


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"memory": 3}, "memory=3: give a number of bytes that is a multiple of 2 MiB"),
        ({"blocks": [0]}, "blocks=.*give one or more whole numbers from 1 to 671088640"),
        ({"blocks": [512]}, "the smallest that 671088640 bytes are filled with is 163840"),
    ],
)
def test_bad_parameters_are_named(parameters, message):
    with pytest.raises(ValueError, match=message):
        fragmentation(**parameters)


def test_memory_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="the GPU has 2147483648 bytes"):
        next(fragmentation(blocks=[64 * MIB], memory=4096 * MIB))
    assert torch.cuda.get_per_process_memory_fraction() == 1.0


def fragmented(**largest):
    """A result of blocks of 4 and 32 MiB with 160 MiB free, from setting=(MiB, MiB)."""
    rows = [
        {"block": block * MIB, "setting": setting, "largest": found * MIB, "free": 160 * MIB, "allocated": 160 * MIB, "reserved": 320 * MIB}
        for setting, both in largest.items()
        for block, found in zip((4, 32), both, strict=True)
    ]
    parameters = {"blocks": [4 * MIB, 32 * MIB], "kept": "every second", "memory": 320 * MIB, "settings": dict.fromkeys(largest, "")}
    return Result("fragmentation", parameters, COLUMNS, rows, "measured on paper")


def test_what_helps_is_the_finding(drawn):
    figure = plot_fragmentation(fragmented(default=(4, 32), expandable=(4, 120)))
    assert figure.title == "What helps: expandable from 32 MiB"
    assert "Between blocks of 32 MiB the largest request that succeeds is 32 MiB with default (20% of what is free), 120 MiB" in figure.alt
    assert drawn[0].axes[0].get_xlabel() == "size of the blocks, of which every second one stays"
    assert {text.get_text() for text in drawn[0].axes[0].texts} >= {"default", "expandable", "free: 160 MiB"}


def test_a_setting_helps_as_soon_as_a_larger_request_succeeds(drawn):
    figure = plot_fragmentation(fragmented(**{"default": (4, 32), "max_split_size_mb:64": (6, 160), "expandable": (4, 120)}))
    assert figure.title == "What helps: max_split_size_mb:64 from 4 MiB, expandable from 32 MiB"
    assert "max_split_size_mb:64" in {text.get_text() for text in drawn[0].axes[0].texts}


def test_no_fragmentation_is_a_finding_too():
    assert plot_fragmentation(fragmented(default=(160, 160))).title == "All 160 MiB that are free serve one request"


def test_a_recording_is_dashed(drawn):
    result = fragmented(default=(4, 32))
    figure = plot_fragmentation(result, replace(result, badge="recorded on a GPU", origin={"machine": "a GPU"}))
    assert [line.get_linestyle() for line in drawn[0].axes[0].lines] == ["-", "--", ":"]
    assert "Recorded on a GPU: between blocks of 32 MiB" in figure.alt


@pytest.mark.parametrize("rows", [0, 1])
def test_a_run_that_was_stopped_is_drawn(rows):
    result = fragmented(default=(4, 32), other=(4, 32))
    figure = plot_fragmentation(replace(result, rows=result.rows[:rows]))
    assert figure.title == (
        "Between blocks of 4 MiB, a request gets at most 4 MiB of 160 MiB free"
        if rows
        else "Not measured yet: the largest request that succeeds"
    )
