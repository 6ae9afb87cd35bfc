"""The table of lessons and platforms is complete, and agrees with the stored measurements."""

from dataclasses import replace

import pytest

from benchmarks import lesson_runs, platforms
from benchmarks.platforms import Figures

TIMES = {"00_start": (61.4, 300 << 20), "01_next": (2.6, 1 << 30)}
ONE = Figures("here", "2 cores of a chip", "Python 3, torch 2", "2026-11-22", TIMES, 3.4)
OTHER = Figures(
    "there", "1 core of a chip", "Python 3, torch 2", "2026-11-23", {"01_next": (5.0, 2 << 20)}
)


def test_a_line_for_each_lesson_and_two_columns_for_each_platform():
    assert platforms.table([ONE, OTHER]).splitlines() == [
        "| lesson | here: time | here: memory | there: time | there: memory |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| 00_start | 61 s | 300 MiB |  |  |",
        "| 01_next | 3 s | 1024 MiB | 5 s | 2 MiB |",
        "| before the first lesson | 3 s |  |  |  |",
        "",
        "- **here**: 2026-11-22, 2 cores of a chip; Python 3, torch 2.",
        "- **there**: 2026-11-23, 1 core of a chip; Python 3, torch 2.",
    ]


def test_figures_are_stored_when_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(platforms, "FOLDER", tmp_path / "platforms")
    monkeypatch.delenv("LABKIT_FIGURES", raising=False)
    ONE.store_if_asked("here")
    assert platforms.stored(tmp_path / "platforms") == []
    monkeypatch.setenv("LABKIT_FIGURES", "1")
    ONE.store_if_asked("here")
    assert platforms.table(platforms.stored(tmp_path / "platforms")) == platforms.table([ONE])


def test_a_lesson_that_is_measured_again_keeps_the_others_of_its_day_and_machine(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(platforms, "FOLDER", tmp_path)
    monkeypatch.setenv("LABKIT_FIGURES", "1")
    ONE.store_if_asked("here")
    replace(ONE, lessons={"01_next": (7.0, 5)}, setup_seconds=None).store_if_asked("here")
    [kept] = platforms.stored(tmp_path)
    assert (
        kept.lessons == {"00_start": [61.4, 300 << 20], "01_next": [7.0, 5]}
        and kept.setup_seconds == 3.4
    )
    replace(ONE, lessons={"01_next": (8.0, 6)}, day="2026-11-24").store_if_asked("here")
    assert platforms.stored(tmp_path)[0].lessons == {"01_next": [8.0, 6]}


def test_of_this_machine():
    figures = Figures.of_this_machine("here", cores=1)
    assert figures.machine.startswith("1 core of ") and "torch 2" in figures.versions


def test_a_page_without_the_place_is_refused():
    with pytest.raises(ValueError, match="needs the lines <!-- figures --> and"):
        platforms.written("no place", [ONE])


def test_the_page_has_the_table_of_what_is_stored():
    page = platforms.PAGE.read_text(encoding="utf-8")
    assert page == platforms.written(page, platforms.stored()), (
        "run `python benchmarks/platforms.py`"
    )


# than the days of the table: the page says so
NEWER = {
    "10_ddp_from_the_inside",
    "11_sharding",
    "12_several_machines",
}


def test_every_lesson_was_measured_on_each_platform_of_the_table():
    lessons = {path.stem for path in lesson_runs.lessons()} - NEWER
    told = {figures.platform: lessons - set(figures.lessons) for figures in platforms.stored()}
    assert {"Binder stand-in", "Colab stand-in"} <= set(told) and not any(told.values()), told


def test_no_lesson_takes_more_than_binder_gives():
    binder = next(
        figures for figures in platforms.stored() if figures.platform.startswith("Binder")
    )
    assert max(memory for _, memory in binder.lessons.values()) < 2 * 10**9
    assert binder.setup_seconds < 60
