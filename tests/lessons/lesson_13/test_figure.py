"""The figure of the verdicts counts what it is given, and says where it was tried."""

import pytest

import labkit
from gpulessons.lesson_13 import articles, figure
from gpulessons.lesson_13.articles import VERDICTS
from gpulessons.lesson_13.articles.trial import ClaimOutcome
from gpulessons.lesson_13.figure import LOOKS, draw_verdicts
from gpulessons.lesson_13.labs import try_claim

CHOSEN = (
    "to moves into the buffer",
    "_get_shared_mem",
    "device with shared_buf",
    "DoubleTensor",
    "memory_cached",
    "empy_cache",
)


@pytest.fixture
def gpu():
    with labkit.use(gpus=1, virtual=True, quiet=True):
        yield


@pytest.fixture
def outcomes(gpu):
    return {articles.find(name): try_claim(name) for name in CHOSEN}


def test_the_title_counts_the_verdicts(outcomes):
    expected = "1 of 6 sentences hold, 1 are old, 1 have typos, 2 invent names, 1 are false"
    assert draw_verdicts(outcomes).title == expected


def test_the_words_count_article_by_article(outcomes):
    said = draw_verdicts(outcomes).alt
    assert "PyTorch 2023: 0 holds, 0 deprecated, 0 outdated, 0 typo, 2 invented, 1 false." in said
    assert (
        "Speed Up your Algorithms Part 1 — PyTorch 2018: 1 holds, 1 deprecated, 0 outdated" in said
    )
    assert "Overview" not in said  # no sentence of it was tried


def test_the_words_say_where_it_was_tried_and_what_differed(outcomes):
    recorded = "6 tried, 0 unlike their verdict: recorded on 4× NVIDIA H200, torch 2.11."
    assert recorded in draw_verdicts(outcomes).alt
    assert "6 tried, 0 unlike their verdict: virtual GPU" in draw_verdicts(outcomes).alt
    other = outcomes | {articles.find("empy_cache"): ClaimOutcome(printed="it ran")}
    assert "6 tried, 1 unlike their verdict: virtual GPU" in draw_verdicts(other).alt


def test_sentences_that_no_one_recorded_are_not_counted_as_recorded(gpu):
    name = "GPUtil finds the part"
    assert "recorded" not in draw_verdicts({articles.find(name): try_claim(name)}).alt


def test_ones_own_verdict_has_a_row(outcomes):
    drawn = draw_verdicts(outcomes, ["outdated"])
    assert drawn.title.startswith("1 of 7 sentences hold, 2 are old")
    assert "Yours: 0 holds, 0 deprecated, 1 outdated" in drawn.alt


def test_nothing_tried_is_said(gpu):
    assert draw_verdicts({}).title == "No sentence was tried"


def test_verdicts_differ_in_marker_and_colour():
    assert list(LOOKS) == list(VERDICTS)
    colours, markers = zip(*figure.LOOKS.values(), strict=True)
    assert len(set(colours)) == len(set(markers)) == len(VERDICTS)
