"""Run the claims of lesson 13 for a recording on real GPUs."""

from collections.abc import Sequence

from gpulessons.lesson_13 import articles
from gpulessons.lesson_13.articles import Claim
from gpulessons.lesson_13.articles.trial import UNTRIED, ClaimOutcome, outcomes, require
from labkit import machine
from labkit.labs.experiment import Row, Run, badge

COLUMNS = {
    "claim": "",
    "article": "",
    "verdict": "",
    "outcome": "",
    "as_expected": "",
    "peak": "bytes",
}


def articles_on_trial(names: Sequence[str] | None = None) -> Run:
    """Run claims, and compare each outcome with the expected one. The result has one row per claim.

    `names` are some of `articles.claims()`, by default all that need no more GPUs than are in use.
    `as_expected` is "yes", "no" or, for a claim that cannot be run, "not tried". `peak` is in
    bytes, on the first GPU. The claims that need a process of their own share one, at the end.

    Raises ValueError for an unknown name, and RuntimeError if too few GPUs are in use.
    """
    told, used = badge(), machine.in_use()
    if names is None:
        chosen = [claim for claim in articles.claims() if claim.gpus <= used.count]
    else:
        chosen = [articles.find(name) for name in names]
    for claim in chosen:
        require(claim)
    parameters = {"names": [claim.name for claim in chosen]}
    rows = (_row(claim, outcome, used.virtual) for claim, outcome in outcomes(chosen))
    return Run("articles_on_trial", parameters, COLUMNS, told, len(chosen), rows)


def _row(claim: Claim, outcome: ClaimOutcome, virtual: bool) -> Row:
    row = {"claim": claim.name, "article": claim.article.name, "verdict": claim.verdict}
    if outcome.untried:
        fits = UNTRIED
    elif outcome.fits(claim.expected(virtual)):
        fits = "yes"
    else:
        fits = "no"
    return row | {"outcome": outcome.short, "as_expected": fits, "peak": outcome.peak}
