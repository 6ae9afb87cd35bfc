"""Every claim comes to what its file says, on virtual GPUs and on real ones: a verdict that is no longer true turns a test red."""

import os

import pytest
import torch

import labkit
from labkit import articles
from labkit.articles import Expected
from labkit.experiments import articles_on_trial, collect, try_claim
from labkit.experiments.claims import Outcome, _outcomes, try_code

CLAIMS = articles.claims()
HERE = [claim for claim in CLAIMS if not claim.alone]
MOST = max(claim.gpus for claim in CLAIMS)
with_today = pytest.mark.parametrize("claim", [claim for claim in CLAIMS if claim.today], ids=lambda claim: claim.name)


@pytest.fixture
def gpus():
    with labkit.use(gpus=MOST, virtual=True, quiet=True):
        yield


@pytest.fixture(scope="module")
def trial():
    """What all claims come to on virtual GPUs, by name."""
    with labkit.use(gpus=MOST, virtual=True, quiet=True):
        return _outcomes(CLAIMS)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)
def test_a_claim_comes_to_what_is_expected_of_it(trial, claim):
    outcome = trial[claim.name]
    assert outcome.untried == claim.untried
    assert outcome.untried or outcome.fits(claim.expected(virtual=True)), outcome


@with_today
def test_what_to_write_today_works_and_warns_of_nothing(gpus, claim):
    outcome = try_code(claim, claim.today)
    assert (outcome.raised, outcome.warned) == ("", ()), outcome


@pytest.mark.slow
@pytest.mark.parametrize("like", ["H200", "RTX 4090"])
def test_verdicts_do_not_hang_on_the_model_of_the_gpu(like):
    with labkit.use(gpus=MOST, like=like, quiet=True):
        outcomes = _outcomes(HERE)
    wrong = {
        claim.name: outcomes[claim.name] for claim in HERE if not claim.untried and not outcomes[claim.name].fits(claim.expected(True))
    }
    assert wrong == {}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("count", [pytest.param(count, marks=pytest.mark.gpu(count=count)) for count in range(1, MOST + 1)])
def test_claims_come_to_what_is_expected_on_real_gpus(count):
    """Those that need so many; and what to write today works there, too."""
    chosen = [claim for claim in CLAIMS if claim.gpus == count and not claim.untried]
    with labkit.use(gpus=count, virtual=False, quiet=True):
        outcomes = _outcomes(chosen)
        today = {claim.name: try_code(claim, claim.today) for claim in chosen if claim.today}
    assert {claim.name: outcomes[claim.name] for claim in chosen if not outcomes[claim.name].fits(claim.expected(False))} == {}
    assert {name: outcome for name, outcome in today.items() if outcome.raised or outcome.warned} == {}


@pytest.mark.parametrize(
    "outcome",
    [
        Outcome(),
        Outcome("TypeError", "no attribute 'x'"),
        Outcome("AttributeError", "something else"),
        Outcome("AttributeError", "no attribute 'x'", printed="more"),
        Outcome("AttributeError", "no attribute 'x'", warned=("FutureWarning: x is gone",)),
    ],
)
def test_an_outcome_that_differs_anywhere_does_not_fit(outcome):
    expected = Expected(raises="AttributeError", message="no attribute 'x'")
    assert Outcome("AttributeError", "module has no attribute 'x'").fits(expected)
    assert not outcome.fits(expected)


def test_a_warning_must_be_the_one_expected_and_a_race_is_none():
    told = ("FutureWarning: f has been renamed",)
    assert Outcome(printed="1\n", warned=told).fits(Expected(prints="1", warns="renamed"))
    assert not Outcome(printed="1", warned=told).fits(Expected(prints="1"))
    assert not Outcome(printed="1").fits(Expected(prints="1", warns="renamed"))
    assert Outcome(printed="1", warned=told).fits(Expected(prints="1", may_warn="renamed"))
    assert Outcome(printed="1").fits(Expected(prints="1", may_warn="renamed"))
    assert Outcome(printed="1", warned=("RaceWarning",)).fits(Expected(prints="1"))


def test_what_is_printed_is_compared_as_a_whole_or_by_a_pattern():
    assert Outcome(printed=" 9\n").fits(Expected(prints="9"))
    assert not Outcome(printed="99").fits(Expected(prints="9"))
    assert Outcome(printed="a 12% b").fits(Expected(like=r"\d+%"))
    assert not Outcome(printed="a b").fits(Expected(like=r"\d+%"))


def test_a_claim_is_tried_by_name_and_told_in_a_line(gpus):
    assert repr(try_claim("empy_cache")) == "AttributeError: module 'torch.cuda' has no attribute 'empy_cache'"
    assert repr(try_claim("a loop has no scope")) == "9"
    assert repr(try_claim("pip install GPUtil")) == "not tried: it would change this installation"
    assert try_claim("freed out of scope").peak == 4 << 20
    assert repr(Outcome()) == "ran, and said nothing"


def test_trying_leaves_the_process_as_it_was(gpus):
    torch.cuda.set_device(1)
    environment, state = dict(os.environ), torch.get_rng_state()
    allocated, reserved = torch.cuda.memory_allocated(0), torch.cuda.memory_reserved(0)
    for name in ("set_device(2)", "CUDA_VISIBLE_DEVICES in the program", "cudnn.benchmark saves memory", "operands on two devices"):
        try_claim(name)
    assert torch.cuda.current_device() == 1 and not torch.backends.cudnn.benchmark
    assert dict(os.environ) == environment and torch.equal(torch.get_rng_state(), state)
    assert (torch.cuda.memory_allocated(0), torch.cuda.memory_reserved(0)) == (allocated, reserved)


def test_a_warning_that_the_first_in_a_process_gets_is_no_claims(gpus):
    """On real GPUs; a claim's own warning stays."""
    once = "Attempting to run cuBLAS, but there was no current CUDA context! Attempting to set the primary context..."
    claim = articles.find("empy_cache")
    assert try_code(claim, f"import warnings\nwarnings.warn({once!r})").warned == ()
    assert try_code(claim, "import warnings\nwarnings.warn('slow')").warned == ("UserWarning: slow",)


def test_a_trial_gives_one_row_a_claim():
    with labkit.use(gpus=1, virtual=True, quiet=True):
        result = collect(articles_on_trial(["empy_cache", "new functions of version 1.0", "areas overflow"]))
    assert result.column("as_expected") == ["yes", "not tried", "yes"]
    assert result.column("verdict") == ["never held", "never held", "holds"]
    assert result.column("outcome", claim="areas overflow") == ["inf"]


def test_claims_that_need_more_gpus_are_left_out_or_refused():
    with labkit.use(gpus=1, virtual=True, quiet=True):
        assert articles_on_trial().total == sum(claim.gpus == 1 for claim in CLAIMS)
        with pytest.raises(RuntimeError, match=r"the claim 'set_device\(2\)' needs 3 GPU\(s\), and 1 are in use"):
            try_claim("set_device(2)")
    with pytest.raises(RuntimeError, match="0 are in use"):
        try_claim("empy_cache")
