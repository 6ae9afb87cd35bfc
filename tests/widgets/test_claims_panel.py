"""The panel of claims, on a virtual GPU."""

import pytest

import labkit
from labkit import articles
from labkit.widgets import ClaimsPanel


@pytest.fixture(autouse=True)
def gpu():
    with labkit.use(virtual=True, quiet=True):
        yield


def test_a_guess_runs_the_claim_and_shows_verdict_outcome_and_todays_way():
    panel = ClaimsPanel("empy_cache")
    assert "torch.cuda.empy_cache()" in panel.source.value and "The article's code" in panel.source.value
    assert "First guess" in panel.message.value and panel.told.value == ""
    panel.guesses["holds"].click()
    assert "No: it never held. A letter is missing." in panel.message.value
    assert "has no attribute &#x27;empy_cache&#x27;" in panel.told.value
    assert "Today you write:" in panel.told.value and "torch.cuda.empty_cache()" in panel.told.value
    panel.guesses["never held"].click()
    assert "Right: it never held." in panel.message.value
    assert panel.outcome.raised == "AttributeError"


def test_what_the_kit_adds_to_an_articles_code_is_shown_apart():
    source = ClaimsPanel("max_memory_cached").source.value
    assert (
        source.index("The article's code")
        < source.index("max_cached = ")
        < source.index("What we look at")
        < source.index("print(max_cached")
    )


def test_version_and_source_come_with_a_claim_that_held_once():
    panel = ClaimsPanel("memory_cached")
    panel.guesses["held once"].click()
    assert "Right: it held once." in panel.message.value
    assert "Changed in 1.4." in panel.told.value and '<a href="https://' in panel.told.value


def test_the_filters_leave_the_claims_of_an_article_and_a_verdict():
    panel = ClaimsPanel()
    assert len(panel.choice.options) == len(articles.claims())
    panel.article.value = "gpu_acceleration"
    panel.verdict.value = "held once"
    assert panel.choice.options == ("max_memory_cached",) and panel.claim.name == "max_memory_cached"
    assert "max_memory_cached" in panel.source.value
    panel.verdict.value = "any"
    assert panel.claim.name == "max_memory_cached"  # it is still among them


def test_filters_that_leave_nothing_say_so():
    panel = ClaimsPanel()
    panel.article.value = "shared_gpu_memory"
    panel.verdict.value = "held once"
    assert panel.claim is None and "choose another" in panel.message.value and panel.source.value == ""
    assert all(button.disabled for button in panel.guesses.values())
    panel.guesses["holds"].click()
    assert panel.outcome is None
    panel.article.value = "any"
    assert panel.claim is not None and not panel.guesses["holds"].disabled


def test_another_claim_takes_the_last_outcome_away():
    panel = ClaimsPanel("empy_cache")
    panel.guesses["never held"].click()
    panel.choice.value = "areas overflow"
    assert panel.told.value == "" and "First guess" in panel.message.value
    assert "Our code for it" in panel.source.value


def test_a_claim_that_needs_more_gpus_says_so():
    panel = ClaimsPanel("set_device(2)")
    panel.guesses["holds"].click()
    assert 'role="alert"' in panel.message.value and "needs 3 GPU(s), and 1 are in use" in panel.message.value


def test_a_claim_that_cannot_be_run_says_why():
    panel = ClaimsPanel("pip install GPUtil")
    panel.guesses["holds"].click()
    assert "not tried: it would change this installation" in panel.told.value


def test_an_unknown_claim_is_refused():
    with pytest.raises(ValueError, match="there is no claim 'nothing'"):
        ClaimsPanel("nothing")
