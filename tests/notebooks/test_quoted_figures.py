"""Figures of real GPUs that the text quotes are those of the recording that it names."""

import re
from pathlib import Path

import nbformat

from labkit.labs import GPT, recorded_result

FOLDER = Path(__file__).parents[2] / "notebooks"
MIB = 1 << 20


def text(lesson: str) -> str:
    return "\n".join(cell.source for cell in nbformat.read(FOLDER / lesson, as_version=4).cells if cell.cell_type == "markdown")


def test_an_h200_s_context_is_the_recorded_one():
    quoted = re.search(r"(\d+) MiB on an H200 \(recording `shared_model`\)", text("08_sharing_memory.ipynb"))
    recorded = recorded_result("shared_model").column("context", way="one server", process="server")
    assert [int(quoted[1])] == [round(nbytes / MIB) for nbytes in recorded]


def test_on_an_h200_a_checkpoint_costs_about_a_third_and_offloading_most():
    assert "about a third of a step. Offloading costs most" in text("09_fitting_in_memory.ipynb")
    seconds = {row["way"]: row["seconds"] for row in recorded_result("memory_for_time").rows}
    assert sorted(seconds, key=seconds.get) == ["baseline", "4 micro-batches", "checkpoints", "offload"]
    assert 1.25 < seconds["checkpoints"] / seconds["baseline"] < 1.4


def test_both_ways_lose_on_the_small_network_and_win_on_the_large_one():
    assert "Both ways lose on the small network and win on the large one." in text("10_ddp_from_the_inside.ipynb")
    recorded = recorded_result("ddp_beside_data_parallel")
    for model, slower in (("small", True), ("large", False)):
        [alone] = recorded.column("seconds", model=model, way="DataParallel", gpus=1)
        threads, ranks = recorded.column("seconds", model=model, gpus=4)
        assert [threads > alone, ranks > alone] == [slower, slower] and ranks < threads


def test_the_peaks_of_twelve_runs_differ_as_lesson_10_says():
    quoted = re.search(r"By (\d+)%. After the first step DDP makes new buckets", text("10_ddp_from_the_inside.ipynb"))
    peaks = recorded_result("ddp_memory").column("bytes", point="twelfth step", kind="peak")
    assert round(100 * (max(peaks) / min(peaks) - 1)) == int(quoted[1])


def test_the_gpt_of_lesson_9_has_406_million_parameters():
    quoted = re.search(r"this one has two, and (\d+) million", text("09_fitting_in_memory.ipynb"))
    model = GPT(width=1024, layers=24, heads=16).build(device="meta")
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6) == int(quoted[1])
