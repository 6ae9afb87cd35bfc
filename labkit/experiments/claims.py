"""Articles on trial: run the code of a claim as it stands, and compare what happens with what is expected."""

import contextlib
import gc
import io
import os
import re
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from gputrace import Table
from labkit import articles, machine
from labkit.articles import Claim, Expected
from labkit.experiments.result import Row, Run, badge

COLUMNS = {"claim": "", "article": "", "verdict": "", "outcome": "", "as_expected": "", "peak": "bytes"}
UNTRIED, RACE = "not tried", "RaceWarning"
# Warnings that PyTorch gives once in a process, of how its threads came to a GPU: whichever claim is the first gets them.
_ONCE = ("there was no current CUDA context", "The AccumulateGrad node's stream does not match")
PATIENCE = 240  # seconds for the claims that run in a process of their own, together: a busy machine takes long to start processes
_LONGEST = 90  # characters of an outcome in a table


@dataclass(frozen=True)
class Outcome:
    """What running a claim came to.

    Attributes:
        raised, message: the class and the text of the exception, "" if there was none.
        printed: all that was printed.
        warned: the warnings, each as its class and its text.
        peak: bytes on the first GPU, at most, beyond those allocated before.
        untried: why it was not run, or "".
    """

    raised: str = ""
    message: str = ""
    printed: str = ""
    warned: tuple[str, ...] = ()
    peak: int = 0
    untried: str = ""

    def fits(self, expected: Expected) -> bool:
        """Is this what was expected? A race that a virtual GPU reports is no warning: a real one cannot see it."""
        printed = self.printed.strip()
        told = [warning for warning in self.warned if warning != RACE and not (expected.may_warn and expected.may_warn in warning)]
        return (
            self.raised in expected.raises.split(" or ")
            and expected.message in self.message
            and (bool(expected.like) or printed == expected.prints)
            and re.search(expected.like, printed) is not None
            and (any(expected.warns in warning for warning in told) if expected.warns else not told)
        )

    def __repr__(self) -> str:
        if self.untried:
            return f"{UNTRIED}: {self.untried}"
        said = f"{self.raised}: {self.message}".splitlines()[0] if self.raised else ""
        parts = [said, " | ".join(self.printed.split("\n")).strip(" |"), *(warning for warning in self.warned)]
        return "; ".join(part for part in parts if part) or "ran, and said nothing"

    @property
    def short(self) -> str:
        """In one line, for a table."""
        text = repr(self)
        return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def try_claim(name: str) -> Outcome:
    """Run the claim of this name, as it stands in its article, on the GPUs in use.

    A claim that starts processes, or changes what the whole process shares, runs in a process of its own.

    Raises ValueError when there is no such claim, RuntimeError when too few GPUs are in use.
    """
    claim = articles.find(name)
    return _outcomes([claim])[claim.name]


def try_code(claim: Claim, code: str) -> Outcome:
    """Run other code in the place of a claim's own, such as `claim.today`: after its `before`, in a fresh namespace, here."""
    return _run("\n".join([claim.before, code]), claim.values)


def claims_table(article: str | None = None, verdict: str | None = None) -> Table:
    """The claims of one article and with one verdict, or all: what each says, and why the verdict. Prints as text and as HTML.

    Raises ValueError, naming the choices, for an article or a verdict that there is not.
    """
    chosen = articles.claims(article, verdict)
    rows = tuple((claim.name, claim.says, claim.verdict, claim.changed, claim.why) for claim in chosen)
    return Table(("claim", "says", "verdict", "changed in", "why"), rows, f"{len(chosen)} claims")


def articles_on_trial(names: Sequence[str] | None = None) -> Run:
    """Runs claims, by default all that need no more GPUs than are in use, and compares each with what is expected. One row a claim.

    `names` are some of `labkit.articles.claims()`. `as_expected` is "yes", "no" or, for one that cannot be run, "not tried"; `peak` is in
    bytes, on the first GPU. The claims that need a process of their own share one, at the end.

    Raises ValueError for a name that there is not, RuntimeError when too few GPUs are in use.
    """
    told, used = badge(), machine.in_use()
    chosen = [articles.find(name) for name in names] if names is not None else _within(articles.claims(), used.count)
    for claim in chosen:
        _require(claim)
    parameters = {"names": [claim.name for claim in chosen]}
    return Run("articles_on_trial", parameters, COLUMNS, told, len(chosen), _points(chosen, used.virtual))


def _within(claims: list[Claim], gpus: int) -> list[Claim]:
    return [claim for claim in claims if claim.gpus <= gpus]


def _points(claims: list[Claim], virtual: bool) -> Iterator[Row]:
    here = [claim for claim in claims if not claim.alone]
    for claim in here:
        yield _row(claim, _run_claim(claim), virtual)
    alone = [claim for claim in claims if claim.alone]
    outcomes = _outcomes(alone)
    for claim in alone:
        yield _row(claim, outcomes[claim.name], virtual)


def _row(claim: Claim, outcome: Outcome, virtual: bool) -> Row:
    fits = UNTRIED if outcome.untried else "yes" if outcome.fits(claim.expected(virtual)) else "no"
    row = {"claim": claim.name, "article": claim.article.name, "verdict": claim.verdict}
    return row | {"outcome": outcome.short, "as_expected": fits, "peak": outcome.peak}


def _outcomes(claims: list[Claim]) -> dict[str, Outcome]:
    """Of each claim by name; those that must be alone run in one process of their own."""
    for claim in claims:
        _require(claim)
    found = {claim.name: _run_claim(claim) for claim in claims if not claim.alone}
    alone = [claim.name for claim in claims if claim.alone]
    if alone:
        from labkit.isolation import isolated

        run = isolated(_run_alone, alone, timeout=PATIENCE)
        found |= {name: Outcome(**{**told, "warned": tuple(told["warned"])}) for name, told in run.value.items()}
    return found


def _run_alone(names: list[str]) -> dict[str, dict[str, Any]]:
    """In the process of its own: what each came to, as plain data."""
    return {name: asdict(_run_claim(articles.find(name))) for name in names}


def _require(claim: Claim) -> None:
    used = machine.current()
    if used is None or used.count < claim.gpus:
        raise RuntimeError(
            f"the claim {claim.name!r} needs {claim.gpus} GPU(s), and {used.count if used else 0} are in use: labkit.use(gpus={claim.gpus})"
        )


def _run_claim(claim: Claim) -> Outcome:
    return Outcome(untried=claim.untried) if claim.untried else _run(claim.program, claim.values)


def _run(program: str, values: bool) -> Outcome:
    """Run a program in a namespace of its own, and put back what it changed."""
    printed, raised, message = io.StringIO(), "", ""
    with _put_back(), contextlib.nullcontext() if values else machine.in_use().without_values():
        torch.cuda.reset_peak_memory_stats(0)
        before = torch.cuda.memory_allocated(0)
        with warnings.catch_warnings(record=True) as warned, contextlib.redirect_stdout(printed):
            warnings.simplefilter("always")
            warnings.simplefilter("ignore", DeprecationWarning)  # which Python keeps from users, too
            names: dict[str, Any] = {"torch": torch, "nn": nn, "__name__": "claim"}
            try:
                exec(compile(program, "<claim>", "exec"), names)
            except Exception as error:
                raised, message = type(error).__name__, str(error)
                traceback.clear_frames(error.__traceback__)  # they would hold the tensors
            names.clear()
            torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated(0) - before
    told = (_told(warning) for warning in warned if not any(words in str(warning.message) for words in _ONCE))
    return Outcome(raised, message, printed.getvalue(), tuple(dict.fromkeys(told)), max(0, peak))


def _told(warning: warnings.WarningMessage) -> str:
    """Class and first line; of a race its class alone, for the rest names streams and lines of the moment."""
    name = warning.category.__name__
    return name if name == RACE else f"{name}: {str(warning.message).splitlines()[0]}"


@contextlib.contextmanager
def _put_back() -> Iterator[None]:
    """What a snippet may change for the whole process: the current device, cuDNN's switches, the environment, the memory."""
    device, cudnn = torch.cuda.current_device(), (torch.backends.cudnn.benchmark, torch.backends.cudnn.enabled)
    environment, state = dict(os.environ), torch.get_rng_state()
    try:
        yield
    finally:
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark, torch.backends.cudnn.enabled = cudnn
        os.environ.clear()
        os.environ.update(environment)
        torch.set_rng_state(state)
        gc.collect(1)
        torch.cuda.empty_cache()
