"""Articles on trial: each claim comes to what is expected, and the panel runs one."""

import os
import re

import pytest
import torch

import labkit
from benchmarks.articles import articles_on_trial
from gpulessons.lesson_13 import articles
from gpulessons.lesson_13.articles import Expected
from gpulessons.lesson_13.articles.trial import ClaimOutcome, outcomes, run
from gpulessons.lesson_13.labs import ClaimsPanel, try_claim
from labkit import progress_file
from labkit.labs import collect

CLAIMS = articles.claims()
HERE = [claim for claim in CLAIMS if not claim.alone]
MOST = max(claim.gpus for claim in CLAIMS)
with_today = pytest.mark.parametrize(
    "claim", [claim for claim in CLAIMS if claim.today], ids=lambda claim: claim.name
)


def by_name(claims):
    return {claim.name: outcome for claim, outcome in outcomes(claims)}


def run_today(claim):
    return run(f"{claim.before}\n{claim.today}", claim.values)


@pytest.fixture
def gpus():
    with labkit.use(gpus=MOST, virtual=True, quiet=True):
        yield


@pytest.fixture(scope="module")
def trial():
    """The outcomes of all claims on virtual GPUs, by name."""
    with labkit.use(gpus=MOST, virtual=True, quiet=True):
        return by_name(CLAIMS)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)
def test_a_claim_comes_to_what_is_expected_of_it(trial, claim):
    outcome = trial[claim.name]
    assert outcome.untried == claim.untried
    assert outcome.untried or outcome.fits(claim.expected(virtual=True)), outcome


def test_claims_about_memory_do_not_depend_on_what_other_work_left(gpus):
    """A live tensor of other work has a free part in its segment.

    The claim's request must not get this part.
    """
    left = []
    for gpu in range(MOST):
        torch.empty(1 << 30, dtype=torch.uint8, device=f"cuda:{gpu}")  # stays in the cache
        left.append(torch.empty(11 << 20, dtype=torch.uint8, device=f"cuda:{gpu}"))
    about_memory = re.compile("empty_cache|memory_reserved|mem_get_info|nvidia-smi")
    chosen = [claim for claim in HERE if about_memory.search(claim.program) and not claim.untried]
    wrong = {
        claim.name: outcome
        for claim, outcome in outcomes(chosen)
        if not outcome.fits(claim.expected(virtual=True))
    }
    assert left and wrong == {}


@with_today
def test_what_to_write_today_works_and_warns_of_nothing(gpus, claim):
    outcome = run_today(claim)
    assert (outcome.raised, outcome.warned) == ("", ()), outcome


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("like", ["H200", "RTX 4090"])
def test_verdicts_do_not_hang_on_the_model_of_the_gpu(like):
    with labkit.use(gpus=MOST, like=like, quiet=True):
        tried = list(outcomes(HERE))
    assert [
        (claim.name, outcome)
        for claim, outcome in tried
        if not claim.untried and not outcome.fits(claim.expected(True))
    ] == []


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "count",
    [pytest.param(count, marks=pytest.mark.gpu(count=count)) for count in range(1, MOST + 1)],
)
def test_claims_come_to_what_is_expected_on_real_gpus(count):
    """Run the claims that need this many GPUs, and the code to write today."""
    chosen = [claim for claim in CLAIMS if claim.gpus == count and not claim.untried]
    with labkit.use(gpus=count, virtual=False, quiet=True):
        tried = by_name(chosen)
        today = {claim.name: run_today(claim) for claim in chosen if claim.today}
    assert {
        claim.name: tried[claim.name]
        for claim in chosen
        if not tried[claim.name].fits(claim.expected(False))
    } == {}
    assert {
        name: outcome for name, outcome in today.items() if outcome.raised or outcome.warned
    } == {}


@pytest.mark.parametrize(
    "outcome",
    [
        ClaimOutcome(),
        ClaimOutcome("TypeError", "no attribute 'x'"),
        ClaimOutcome("AttributeError", "something else"),
        ClaimOutcome("AttributeError", "no attribute 'x'", printed="more"),
        ClaimOutcome("AttributeError", "no attribute 'x'", warned=("FutureWarning: x is gone",)),
    ],
)
def test_an_outcome_that_differs_anywhere_does_not_fit(outcome):
    expected = Expected(raises="AttributeError", message="no attribute 'x'")
    assert ClaimOutcome("AttributeError", "module has no attribute 'x'").fits(expected)
    assert not outcome.fits(expected)


def test_a_warning_must_be_the_one_expected_and_a_race_is_none():
    told = ("FutureWarning: f has been renamed",)
    assert ClaimOutcome(printed="1\n", warned=told).fits(Expected(prints="1", warns="renamed"))
    assert not ClaimOutcome(printed="1", warned=told).fits(Expected(prints="1"))
    assert not ClaimOutcome(printed="1").fits(Expected(prints="1", warns="renamed"))
    assert ClaimOutcome(printed="1", warned=told).fits(Expected(prints="1", may_warn="renamed"))
    assert ClaimOutcome(printed="1").fits(Expected(prints="1", may_warn="renamed"))
    assert ClaimOutcome(printed="1", warned=("RaceWarning",)).fits(Expected(prints="1"))


def test_what_is_printed_is_compared_as_a_whole_or_by_a_pattern():
    assert ClaimOutcome(printed=" 9\n").fits(Expected(prints="9"))
    assert not ClaimOutcome(printed="99").fits(Expected(prints="9"))
    assert ClaimOutcome(printed="a 12% b").fits(Expected(like=r"\d+%"))
    assert not ClaimOutcome(printed="a b").fits(Expected(like=r"\d+%"))


def test_a_claim_is_tried_by_name_and_told_in_a_line(gpus):
    assert (
        repr(try_claim("empy_cache"))
        == "AttributeError: module 'torch.cuda' has no attribute 'empy_cache'"
    )
    assert repr(try_claim("a loop has no scope")) == "9"
    assert repr(try_claim("pip install GPUtil")) == "not tried: it would change this installation"
    assert try_claim("freed out of scope").peak == 4 << 20
    assert repr(ClaimOutcome()) == "ran, and said nothing"


@pytest.mark.slow
def test_trying_leaves_the_process_as_it_was(gpus):
    torch.cuda.set_device(1)
    environment, state = dict(os.environ), torch.get_rng_state()
    allocated, reserved = torch.cuda.memory_allocated(0), torch.cuda.memory_reserved(0)
    for name in (
        "set_device(2)",
        "CUDA_VISIBLE_DEVICES in the program",
        "cudnn.benchmark saves memory",
        "operands on two devices",
    ):
        try_claim(name)
    assert torch.cuda.current_device() == 1 and not torch.backends.cudnn.benchmark
    assert dict(os.environ) == environment and torch.equal(torch.get_rng_state(), state)
    assert (torch.cuda.memory_allocated(0), torch.cuda.memory_reserved(0)) == (allocated, reserved)


def test_a_warning_that_the_first_in_a_process_gets_is_no_claims(gpus):
    """The first use of cuBLAS in a process may warn on a real GPU.

    A claim's own warning is kept.
    """
    once = (
        "Attempting to run cuBLAS, but there was no current CUDA context! "
        "Attempting to set the primary context..."
    )
    assert run(f"import warnings\nwarnings.warn({once!r})", values=True).warned == ()
    assert run("import warnings\nwarnings.warn('slow')", values=True).warned == (
        "UserWarning: slow",
    )


def test_a_trial_gives_one_row_a_claim():
    with labkit.use(gpus=1, virtual=True, quiet=True):
        result = collect(
            articles_on_trial(["empy_cache", "new functions of version 1.0", "areas overflow"])
        )
    assert result.column("as_expected") == ["yes", "not tried", "yes"]
    assert result.column("verdict") == ["typo", "false", "holds"]
    assert result.column("outcome", claim="areas overflow") == ["inf"]


def test_claims_that_need_more_gpus_are_left_out_or_refused():
    with labkit.use(gpus=1, virtual=True, quiet=True):
        assert articles_on_trial().total == sum(claim.gpus == 1 for claim in CLAIMS)
        with pytest.raises(
            RuntimeError, match=r"the claim 'set_device\(2\)' needs 3 GPU\(s\), and 1 are in use"
        ):
            try_claim("set_device(2)")
    with pytest.raises(RuntimeError, match="0 are in use"):
        try_claim("empy_cache")


@pytest.fixture
def gpu():
    with labkit.use(virtual=True, quiet=True):
        yield


@pytest.mark.usefixtures("gpu")
def test_a_guess_runs_the_claim_and_shows_verdict_outcome_and_todays_way():
    panel = ClaimsPanel("empy_cache")
    assert "torch.cuda.empy_cache()" in panel.source.value
    assert "The article's code" in panel.source.value
    assert "First guess" in panel.message.value and panel.told.value == ""
    panel.guesses["holds"].click()
    assert "No: it has a typo. A letter is missing." in panel.message.value
    assert "has no attribute &#x27;empy_cache&#x27;" in panel.told.value
    assert "Today you write:" in panel.told.value and "torch.cuda.empty_cache()" in panel.told.value
    panel.guesses["typo"].click()
    assert "Right: it has a typo." in panel.message.value
    assert panel.outcome.raised == "AttributeError"
    assert len(progress_file.tries["ClaimsPanel"]) >= 2


@pytest.mark.usefixtures("gpu")
def test_what_the_kit_adds_to_an_articles_code_is_shown_apart():
    source = ClaimsPanel("max_memory_cached").source.value
    assert (
        source.index("The article's code")
        < source.index("max_cached = ")
        < source.index("What we look at")
        < source.index("print(max_cached")
    )


@pytest.mark.usefixtures("gpu")
def test_version_and_source_come_with_a_claim_that_is_deprecated():
    panel = ClaimsPanel("memory_cached")
    panel.guesses["deprecated"].click()
    assert "Right: it is deprecated." in panel.message.value
    assert "Changed in 1.4." in panel.told.value and '<a href="https://' in panel.told.value


@pytest.mark.usefixtures("gpu")
def test_the_filters_leave_the_claims_of_an_article_and_a_verdict():
    panel = ClaimsPanel()
    assert len(panel.choice.options) == len(articles.claims())
    panel.article.value = "gpu_acceleration"
    panel.verdict.value = "deprecated"
    assert panel.choice.options == ("max_memory_cached",)
    assert panel.claim.name == "max_memory_cached"
    assert "max_memory_cached" in panel.source.value
    panel.verdict.value = "any"
    assert panel.claim.name == "max_memory_cached"  # it is still among them


@pytest.mark.usefixtures("gpu")
def test_filters_that_leave_nothing_say_so():
    panel = ClaimsPanel()
    panel.article.value = "shared_gpu_memory"
    panel.verdict.value = "deprecated"
    assert panel.claim is None
    assert "choose another" in panel.message.value
    assert panel.source.value == ""
    assert all(button.disabled for button in panel.guesses.values())
    panel.guesses["holds"].click()
    assert panel.outcome is None
    panel.article.value = "any"
    assert panel.claim is not None and not panel.guesses["holds"].disabled


@pytest.mark.usefixtures("gpu")
def test_another_claim_takes_the_last_outcome_away():
    panel = ClaimsPanel("empy_cache")
    panel.guesses["typo"].click()
    panel.choice.value = "areas overflow"
    assert panel.told.value == "" and "First guess" in panel.message.value
    assert "Our code for it" in panel.source.value


@pytest.mark.usefixtures("gpu")
def test_a_claim_that_needs_more_gpus_says_so():
    panel = ClaimsPanel("set_device(2)")
    panel.guesses["holds"].click()
    assert 'role="alert"' in panel.message.value
    assert "needs 3 GPU(s), and 1 are in use" in panel.message.value


@pytest.mark.usefixtures("gpu")
def test_a_claim_that_cannot_be_run_says_why():
    panel = ClaimsPanel("pip install GPUtil")
    panel.guesses["holds"].click()
    assert "not tried: it would change this installation" in panel.told.value


@pytest.mark.usefixtures("gpu")
def test_an_unknown_claim_is_refused():
    with pytest.raises(ValueError, match="there is no claim 'nothing'"):
        ClaimsPanel("nothing")
