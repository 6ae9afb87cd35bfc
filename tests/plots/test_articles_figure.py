"""The figure of the articles on trial."""

from dataclasses import replace

import pytest

from labkit import plots
from labkit.experiments import Result
from labkit.experiments.claims import COLUMNS

VERDICTS = {"shared_gpu_memory": ["never held"] * 3, "speed_up_pytorch": ["holds", "holds", "held once"]}


@pytest.fixture
def trial() -> Result:
    """Of two articles; one claim came to something else, and one was not tried."""
    rows = [
        {"claim": f"{article} {index}", "article": article, "verdict": verdict, "outcome": "9", "as_expected": "yes", "peak": 0}
        for article, verdicts in VERDICTS.items()
        for index, verdict in enumerate(verdicts)
    ]
    rows[0]["as_expected"], rows[1]["as_expected"] = "no", "not tried"
    return Result("articles_on_trial", {"names": [row["claim"] for row in rows]}, COLUMNS, rows, "virtual GPU, modelled on NVIDIA T4")


def test_the_title_counts_the_verdicts(trial):
    assert plots.articles_on_trial(trial).title == "Of 6 claims 2 hold, 1 held once, 3 never did"


def test_the_words_say_the_same_article_by_article_and_where_it_was_tried(trial):
    alt = plots.articles_on_trial(trial).alt
    assert "Using Shared GPU Memory with PyTorch: 0 holds, 0 held once, 3 never held." in alt
    assert "Speed Up your Algorithms Part 1 — PyTorch: 2 holds, 1 held once, 0 never held." in alt
    assert "4 as expected, 1 not: virtual GPU, modelled on NVIDIA T4." in alt
    assert "Overview" not in alt  # no claim of it was tried


def test_a_recording_stands_beside_it(trial):
    recorded = replace(trial, badge="recorded on NVIDIA H200", rows=[row | {"as_expected": "yes"} for row in trial.rows])
    assert (
        "1 not: virtual GPU, modelled on NVIDIA T4. 6 as expected, 0 not: recorded on NVIDIA H200."
        in plots.articles_on_trial(trial, recorded).alt
    )


def test_a_trial_of_nothing_says_so(trial):
    assert plots.articles_on_trial(replace(trial, rows=[])).title == "Not tried yet: not even one claim"
