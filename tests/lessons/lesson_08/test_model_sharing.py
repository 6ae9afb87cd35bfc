"""One model for several processes: who holds what, the figure, and the lab."""

import contextlib
import time
from dataclasses import replace

import psutil
import pytest
import torch
from matplotlib.patches import Rectangle

import labkit
from gpulessons.lesson_08.labs import (
    COLUMNS,
    PARTS,
    WAYS,
    SharingLab,
    held_by_way,
    plot_shared_model,
    shared_model,
)
from labkit.labs import Result, collect

from ...learner import predict_and_run as run

MIB = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def gpu():
    with labkit.use(virtual=True, quiet=True):
        torch.empty(1, device="cuda")
        yield


def used() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


def workers() -> list[psutil.Process]:
    """Return the processes that the server of processes has started, except a sandbox's."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it may just have ended
            if "multiprocessing.forkserver" in " ".join(child.cmdline()):
                found += child.children()
    return found


@pytest.mark.slow
def test_who_holds_what_in_each_way():
    context = 126 * MIB
    before = used()
    result = collect(shared_model(processes=3, weights=100 * MIB))
    rows = {
        way: [
            (row["context"], row["weights"], row["cache"])
            for row in result.rows
            if row["way"] == way
        ]
        for way in WAYS
    }
    alone = (context, 100 * MIB, 64 * MIB)
    assert rows["a copy each"] == [alone] * 3
    assert rows["shared weights"] == [alone] + [(context, 0, 64 * MIB)] * 2
    assert rows["one server"] == [alone, (0, 0, 0), (0, 0, 0)]
    assert result.column("process") == (
        [
            "worker 1",
            "worker 2",
            "worker 3",
            "owner",
            "borrower 1",
            "borrower 2",
            "server",
            "client 1",
            "client 2",
        ]
    )
    assert held_by_way(result) == {
        "a copy each": 3 * 290 * MIB,
        "shared weights": (3 * 190 + 100) * MIB,
        "one server": 290 * MIB,
    }
    assert used() == before and not workers()


@pytest.mark.slow
def test_one_that_is_stopped_half_way_leaves_nothing_behind():
    before = used()
    run = shared_model(["shared weights"])
    next(run)
    next(run)
    assert used() > before and len(workers()) == 3
    run.close()
    end = time.monotonic() + 60
    while used() > before and time.monotonic() < end:
        time.sleep(0.01)
    assert used() == before and not workers()


@pytest.mark.slow
def test_bad_arguments_name_what_is_allowed():
    with pytest.raises(
        ValueError,
        match=r"ways=\['magic'\]: choose from 'a copy each', 'shared weights', 'one server'",
    ):
        shared_model(["magic"])
    with pytest.raises(ValueError, match="ways="):
        shared_model([])
    for processes in (1, 9, 2.0):
        with pytest.raises(ValueError, match="processes=.*from 2 to 8"):
            shared_model(processes=processes)
    with pytest.raises(ValueError, match="weights=0: give a number of bytes from 1048576"):
        shared_model(weights=0)


@pytest.mark.slow
@pytest.mark.gpu
def test_a_real_gpu_shares_the_same():
    labkit.use(None)
    with labkit.use(virtual=False, quiet=True):
        result = collect(shared_model(weights=512 * MIB))
    assert result.column("weights", way="shared weights") == [512 * MIB, 0, 0]
    assert result.column("cache", way="a copy each") == [64 * MIB] * 3
    assert all(size > 100 * MIB for size in result.column("context", way="shared weights"))
    assert all(abs(size) < 16 * MIB for size in result.column("context", process="client 1"))
    sums = held_by_way(result)
    assert sums["one server"] < sums["shared weights"] < sums["a copy each"]


def measured(*ways, context=100, weights=512, cache=64, processes=3):
    rows = []
    for way in ways:
        first, other = PARTS[way]
        for number in range(processes):
            part = other if number else first
            sizes = (
                (0, 0, 0)
                if part == "client"
                else (context, 0 if part == "borrower" else weights, cache)
            )
            named = zip(
                ("context", "weights", "cache"), (size * MIB for size in sizes), strict=True
            )
            rows.append({"way": way, "process": f"{part} {number}", **dict(named)})
    return Result(
        "shared_model",
        {"ways": list(ways), "processes": processes},
        COLUMNS,
        rows,
        "measured on paper",
    )


def bars(canvas):
    return [
        patch
        for patch in canvas.axes[0].patches
        if isinstance(patch, Rectangle) and patch.get_width()
    ]


def test_the_thriftiest_and_the_greediest_are_the_finding():
    figure = plot_shared_model(measured(*PARTS))
    assert figure.title == "For 3 processes, one server takes 0.6602 GiB, a copy each 1.98 GiB"
    copies = "A copy each 1.98 GiB (context 300 MiB, weights 1.5 GiB, cache 192 MiB)"
    assert f"{copies}; shared weights 1004 MiB" in figure.alt
    assert figure.alt.endswith("Measured on paper.")


def test_a_bar_has_a_piece_for_each_process_and_kind_and_a_number_at_its_end(drawn):
    plot_shared_model(measured("shared weights"))
    pieces = bars(drawn[0])
    assert sorted(round(piece.get_width() / MIB) for piece in pieces) == [
        64,
        64,
        64,
        100,
        100,
        100,
        164,
        164,
        512,
        676,
    ]
    assert max(piece.get_x() + piece.get_width() for piece in pieces) == 1004 * MIB
    assert "1004 MiB" in [text.get_text() for text in drawn[0].axes[0].texts]


def test_one_way_says_how_many_processes_were_started():
    whole = measured("one server")
    assert plot_shared_model(whole).title == "3 processes, one server: 676 MiB of the GPU"
    assert (
        plot_shared_model(replace(whole, rows=whole.rows[:1])).title
        == "1 process, one server: 676 MiB of the GPU"
    )
    assert (
        plot_shared_model(replace(whole, rows=[]), prediction=1).title
        == "Not measured yet: not even one process"
    )


def test_a_recording_is_a_dashed_bar_below(drawn):
    recorded = replace(
        measured(*PARTS, context=527), badge="recorded on an H200", origin={"machine": "H200"}
    )
    figure = plot_shared_model(measured(*PARTS), recorded)
    assert "Recorded on an H200: a copy each 3.231 GiB" in figure.alt
    assert sum(piece.get_linestyle() == "--" for piece in bars(drawn[0])) == 3


def test_the_prediction_is_hollow_and_its_text_stays_within_the_figure(drawn):
    for prediction in (0.5, 1.5, 40):
        figure = plot_shared_model(measured("a copy each"), prediction=prediction)
        assert f"Predicted: {prediction:g} GiB." in figure.alt
        hollow = next(
            line for line in drawn[-1].axes[0].lines if line.get_markerfacecolor() == "none"
        )
        assert list(hollow.get_xdata()) == [prediction * 1024 * MIB]
        edges = [text.get_window_extent() for text in drawn[-1].axes[0].texts]
        page = drawn[-1].get_window_extent()
        assert all(page.x0 < box.x0 and box.x1 < page.x1 for box in edges)


@pytest.mark.slow
def test_prediction_and_result_come_together():
    lab = SharingLab("one server", processes=2)
    assert "Together they take 0.686 GiB; you predicted 2, 1.31 too high." in run(lab, "2")
    assert "2 processes, one server: 702 MiB of the GPU" in lab.picture.value
    assert "Predicted: 2 GiB" in lab.picture.value
    assert "you predicted 0.66. A good prediction!" in run(lab, "0.66")


def test_another_choice_asks_for_another_prediction():
    lab = SharingLab()
    lab.answer.value = "1"
    lab.predict_button.click()
    assert lab.prediction == 1 and not lab.run_button.disabled
    lab.choices["way"].value = "shared weights"
    assert lab.prediction is None
    assert lab.run_button.disabled
    assert "First predict" in lab.message.value
    parameters = lab.experiment().parameters
    assert parameters["ways"] == ["shared weights"]
    assert parameters["processes"] == 3
    assert parameters["weights"] == 512 << 20


@pytest.mark.slow
def test_a_stopped_run_leaves_the_prediction_open(monkeypatch):
    lab = SharingLab("a copy each")
    monkeypatch.setattr(lab, "point", lambda row: lab.stop_button.click() or "first")
    said = run(lab, "1")
    assert "Stopped after 1 of 3 points. Not all processes were started" in said
    assert "so your prediction of 1 stays open." in said
    assert "1 process, a copy each" in lab.picture.value


@pytest.mark.slow
def test_the_choices_are_locked_during_a_run(monkeypatch):
    lab = SharingLab("one server", processes=2)
    seen = []
    monkeypatch.setattr(lab, "point", lambda row: seen.append(lab.choices["way"].disabled) or "")
    run(lab, "1")
    assert seen == [True, True] and not lab.choices["way"].disabled
