"""Run the code of a claim unchanged, and compare the outcome with the expected one."""

import contextlib
import gc
import io
import os
import re
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gpulessons.lesson_13 import articles
from gpulessons.lesson_13.articles import Claim, Expected
from labkit import machine

UNTRIED, _RACE = "not tried", "RaceWarning"
# PyTorch gives these warnings once per process, to the claim that comes first.
_ONCE = ("there was no current CUDA context", "The AccumulateGrad node's stream does not match")
# Seconds for all claims that run in a new process. A busy machine takes long to start processes.
PATIENCE = 240
_LONGEST = 90  # characters of an outcome in a table


@dataclass(frozen=True)
class ClaimOutcome:
    """Outcome of running a claim.

    Attributes:
        raised, message: the class and the text of the exception, or "".
        printed: everything that was printed.
        warned: the warnings, each as its class and its text.
        peak: the most bytes on the first GPU, beyond those allocated before.
        untried: why it was not run, or "".
    """

    raised: str = ""
    message: str = ""
    printed: str = ""
    warned: tuple[str, ...] = ()
    peak: int = 0
    untried: str = ""

    def fits(self, expected: Expected) -> bool:
        """Return whether this is the expected outcome.

        A race that a virtual GPU reports does not count as a warning, because a real GPU cannot
        report it.
        """
        printed = self.printed.strip()
        told = [
            warning
            for warning in self.warned
            if warning != _RACE and not (expected.may_warn and expected.may_warn in warning)
        ]
        if expected.warns:
            warns_as_expected = any(expected.warns in warning for warning in told)
        else:
            warns_as_expected = not told
        return (
            self.raised in expected.raises.split(" or ")
            and expected.message in self.message
            and (bool(expected.like) or printed == expected.prints)
            and re.search(expected.like, printed) is not None
            and warns_as_expected
        )

    def __repr__(self) -> str:
        if self.untried:
            return f"{UNTRIED}: {self.untried}"
        said = ""
        if self.raised:
            said = f"{self.raised}: {self.message}".splitlines()[0]
        parts = [
            said,
            " | ".join(self.printed.split("\n")).strip(" |"),
            *(warning for warning in self.warned),
        ]
        return "; ".join(part for part in parts if part) or "ran, and said nothing"

    @property
    def short(self) -> str:
        """The outcome in one line, for a table."""
        text = repr(self)
        if len(text) <= _LONGEST:
            return text
        return text[: _LONGEST - 1] + "…"


def outcomes(claims: list[Claim]) -> Iterator[tuple[Claim, ClaimOutcome]]:
    """Yield each claim and its outcome.

    Claims that must run alone share a new process, and come last.
    """
    for claim in claims:
        require(claim)
    for claim in claims:
        if not claim.alone:
            yield claim, _run_claim(claim)
    alone = [claim for claim in claims if claim.alone]
    if alone:
        from labkit.isolation import isolated

        names = [claim.name for claim in alone]
        found = isolated(_run_alone, names, timeout=PATIENCE).value
        yield from zip(alone, found, strict=True)


def _run_alone(names: list[str]) -> list[ClaimOutcome]:
    """Run the claims with these names. A new process calls this function."""
    return [_run_claim(articles.find(name)) for name in names]


def require(claim: Claim) -> None:
    """Raise RuntimeError if fewer GPUs are in use than the claim needs."""
    count, used = 0, machine.current()
    if used is not None:
        count = used.count
    if used is None or count < claim.gpus:
        raise RuntimeError(
            f"the claim {claim.name!r} needs {claim.gpus} GPU(s), and "
            f"{count} are in use: labkit.use(gpus={claim.gpus})"
        )


def _run_claim(claim: Claim) -> ClaimOutcome:
    if claim.untried:
        return ClaimOutcome(untried=claim.untried)
    return run(claim.program, claim.values)


def run(program: str, values: bool) -> ClaimOutcome:
    """Run a program in a new namespace, restore what it changed, and return its outcome."""
    printed, raised, message = io.StringIO(), "", ""
    with _put_back(), contextlib.nullcontext() if values else machine.in_use().without_values():
        torch.cuda.reset_peak_memory_stats(0)
        before = torch.cuda.memory_allocated(0)
        with warnings.catch_warnings(record=True) as warned, contextlib.redirect_stdout(printed):
            warnings.simplefilter("always")
            # which Python keeps from users, too
            warnings.simplefilter("ignore", DeprecationWarning)
            names: dict[str, Any] = {"torch": torch, "nn": nn, "__name__": "claim"}
            try:
                exec(compile(program, "<claim>", "exec"), names)
            except Exception as error:
                raised, message = type(error).__name__, str(error)
                traceback.clear_frames(error.__traceback__)  # they would hold the tensors
            names.clear()
            torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated(0) - before
    told = (
        _told(warning)
        for warning in warned
        if not any(words in str(warning.message) for words in _ONCE)
    )
    return ClaimOutcome(
        raised, message, printed.getvalue(), tuple(dict.fromkeys(told)), max(0, peak)
    )


def _told(warning: warnings.WarningMessage) -> str:
    """Return the class and the first line of a warning.

    For a race return only the class, because streams and lines differ from run to run.
    """
    name = warning.category.__name__
    if name == _RACE:
        return name
    return f"{name}: {str(warning.message).splitlines()[0]}"


@contextlib.contextmanager
def _put_back() -> Iterator[None]:
    """Restore what a snippet may have changed for the whole process.

    This is the current device, cuDNN's switches, the environment and the memory.
    """
    device, cudnn = (
        torch.cuda.current_device(),
        (torch.backends.cudnn.benchmark, torch.backends.cudnn.enabled),
    )
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
