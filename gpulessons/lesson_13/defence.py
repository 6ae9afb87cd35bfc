"""A verdict of a learner's own: run its experiment, and refuse an experiment that decides nothing.

An experiment is a function. It gets what the sentence is about, the *subject*, and returns whether
the sentence holds of it. It decides something only if it can come out otherwise. So it also gets a
stand-in that does the *opposite* of what it finds for the subject.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch
from torch import nn
from torch.cuda import memory_stats  # a check puts something else in its place in torch.cuda
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from gpulessons.lesson_13 import articles
from gpulessons.lesson_13.articles import Claim
from gpulessons.lesson_13.articles.trial import ClaimOutcome
from gpulessons.lesson_13.figure import draw_verdicts
from gpulessons.lesson_13.stand_ins import SENTENCES, StandIns
from gputrace.figures.figure import Figure

PARTS = ("quote", "verdict", "experiment", "subject", "opposite")
VERDICTS = {"holds": True, "false": False, "outdated": False}  # what the experiment then returns
FEWEST_WORDS = 5
EXAMPLE = (
    "Returned Tensor shares the same storage with the original one."  # which the lesson defends
)
# a coin that is tossed each time rarely passes
ORDER = (
    "subject",
    "opposite",
    "opposite",
    "subject",
) * 2
WHOSE = {"subject": "the subject", "opposite": "the opposite"}


def defend(
    quote: str,
    verdict: str,
    experiment: Callable[[Any], bool],
    subject: Callable[..., Any],
    opposite: Callable[..., Any],
    among: Mapping[Claim, ClaimOutcome],
) -> Figure | None:
    """Run the experiment on the subject and on the opposite, and draw the verdict among the others.

    If the experiment decides nothing, say why and return None.
    """
    observed = observe(
        {
            "quote": quote,
            "verdict": verdict,
            "experiment": experiment,
            "subject": subject,
            "opposite": opposite,
        }
    )
    refusal = refused(observed)
    if refusal:
        print(f"Refused: {refusal}")
        return None
    first, second = observed["runs"][:2]
    print(f"{verdict}: {quote}")
    print(
        f"the experiment returns {first['result']} for the subject, {second['result']} for the "
        "opposite"
    )
    return draw_verdicts(among, [verdict])


def observe(given: Mapping[str, Any]) -> Any:
    """Run a learner's experiment several times, and return what happened as plain data.

    If `stand_ins` has functions for the quoted sentence, the experiment also runs on them.
    """
    observed: dict[str, Any] = {
        "missing": [part for part in PARTS if part not in given],
        "quote": _text(given.get("quote")),
        "verdict": _text(given.get("verdict")),
        "not callable": [part for part in PARTS[2:] if part in given and not callable(given[part])],
        "runs": [],
    }
    if observed["missing"] or observed["not callable"]:
        return observed
    observed["same"] = given["subject"] is given["opposite"]
    for of in ORDER:
        run = _run(given["experiment"], given[of])
        observed["runs"].append({"of": of, **run})
    for sentence, stand_ins in SENTENCES.items():
        if _quotes(observed["quote"], sentence):
            observed["stand-ins"] = try_on(given["experiment"], stand_ins)
    return observed


def try_on(experiment: Callable[[Any], Any], stand_ins: StandIns) -> Any:
    """Run an experiment on stand-ins, in order and in reverse order.

    Return what each stand-in does, whether the sentence holds for it, and the experiment's results.
    """
    tried = []
    holds = [("True", *stand_in) for stand_in in stand_ins.holds.items()]
    fails = [("False", *stand_in) for stand_in in stand_ins.fails.items()]
    forwards = holds + fails
    for expected, does, function in forwards + forwards[::-1]:
        run = _run(experiment, function)
        tried.append(
            {"does": does, "expected": expected, "result": run["result"], "raised": run["raised"]}
        )
    return tried


def misjudged(tried: Any) -> str:
    """Name the first stand-in that the experiment misjudges, or return "" if there is none.

    If the sentence is false for a stand-in, an error of the experiment counts as False.
    """
    for run in tried:
        found = run["result"]
        if run["raised"]:
            found = f"the error {run['raised']}"
            if run["expected"] == "False":
                continue
        if found != run["expected"]:
            return (
                f"for a function that {run['does']}, your experiment gives {found}. "
                f"Expected {run['expected']}."
            )
    return ""


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _run(experiment: Callable[[Any], Any], function: Callable[..., Any]) -> dict[str, Any]:
    """Run the experiment once on a function, under a name that tells nothing."""
    answers: list[str] = []
    seen = _Seen()

    def given(*arguments: Any, **named: Any) -> Any:
        seen.add([*arguments, *named.values()])
        answers.append("raised")
        answer = function(*arguments, **named)
        answers[-1] = "other"
        if isinstance(answer, bool):
            answers[-1] = str(answer)
        seen.add([answer])
        return answer

    before = _allocations()
    raised, result = "", None
    try:
        with seen:
            result = experiment(given)
    except Exception as error:
        raised = f"{type(error).__name__}: {error}".splitlines()[0]
    told = type(result).__name__
    if isinstance(result, bool | numpy.bool_):
        told = str(result)
    used = seen.on_gpu or (not seen.on_cpu and _allocations() > before)
    return {"result": told, "raised": raised, "answers": answers, "used a GPU": used}


class _Seen(TorchFunctionMode):
    """Places of the tensors that a function gets and returns.

    Attributes:
        on_gpu: whether one of them is on a GPU, or a tensor of its size was copied to one.
        on_cpu: (elements, dtype) of those on the CPU. A virtual GPU copies from another address.
    """

    def __init__(self) -> None:
        super().__init__()
        self.on_gpu = False
        self.on_cpu: set[tuple[int, torch.dtype]] = set()

    def add(self, values: list[Any]) -> None:
        self.on_gpu = self.on_gpu or any(_is_on_gpu(value) for value in values)
        self.on_cpu |= _cpu_tensors(values)

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if _is_on_gpu(result) and self.on_cpu & _cpu_tensors(args):
            self.on_gpu = True
        return result


def _cpu_tensors(values: Any) -> set[tuple[int, torch.dtype]]:
    """Return (elements, dtype) of the tensors on the CPU among these values, and of modules."""
    found: list[torch.Tensor] = []
    for leaf in tree_leaves(values):
        if isinstance(leaf, nn.Module):
            found += leaf.parameters()
        elif isinstance(leaf, torch.Tensor):
            found.append(leaf)
    return {(tensor.numel(), tensor.dtype) for tensor in found if tensor.device.type == "cpu"}


def _is_on_gpu(argument: Any) -> bool:
    """Return whether an argument is, or holds, a tensor on a GPU."""
    if isinstance(argument, torch.Tensor):
        return argument.is_cuda
    if isinstance(argument, nn.Module):
        return any(parameter.is_cuda for parameter in argument.parameters())
    return isinstance(argument, list | tuple) and any(_is_on_gpu(part) for part in argument)


def _allocations() -> int:
    """Return how often memory was allocated on all GPUs so far."""
    gpus = range(torch.cuda.device_count())
    return sum(memory_stats(gpu).get("allocation.all.allocated", 0) for gpu in gpus)


def refused(observed: Any) -> str:
    """Return why the experiment decides nothing, or "" if it decides."""
    return (
        _badly_stated(observed)
        or _badly_run(observed["runs"])
        or _not_decided(observed)
        or misjudged(observed.get("stand-ins", []))
        or _wrong_subject(observed)
    )


def is_example(observed: Any) -> bool:
    """Return whether the quoted sentence is the one that the lesson itself defends."""
    return _quotes(observed["quote"], EXAMPLE)


def _badly_stated(observed: Any) -> str:
    if observed["missing"]:
        return f"{', '.join(observed['missing'])} is missing. A verdict has {', '.join(PARTS)}."
    if observed["not callable"]:
        return f"{', '.join(observed['not callable'])} must be a function."
    quote = observed["quote"]
    if len(quote.split()) < FEWEST_WORDS or "…" in quote or "..." in quote:
        return (
            "quote one whole sentence, without leaving words out. "
            "A cut sentence can mean something else."
        )
    if any(_words(quote) in _words(claim.says) for claim in articles.claims()):
        return "the articles' trial has a verdict on this sentence already. Choose another one."
    if observed["verdict"] not in VERDICTS:
        return (
            f"the verdict must be one of {', '.join(VERDICTS)}. "
            "A typo, an invented or a deprecated name "
            "shows in one call and needs no experiment."
        )
    if observed["same"]:
        return "subject and opposite are the same function. The opposite must behave otherwise."
    return ""


def _words(sentence: str) -> str:
    """Return the letters and digits of a sentence, to compare it with others."""
    return "".join(letter for letter in sentence.casefold() if letter.isalnum())


def _quotes(quote: str, sentence: str) -> bool:
    """Return whether a quotation contains this sentence or is a part of it."""
    words = _words(quote)
    return bool(words) and (words in _words(sentence) or _words(sentence) in words)


def _badly_run(runs: Any) -> str:
    for run in runs:
        whose = WHOSE[run["of"]]
        if run["raised"]:
            return (
                f"with {whose}, the experiment raised {run['raised']}. "
                "If an error is what you look for, catch it and return True or False."
            )
        if run["result"] not in ("True", "False"):
            return (
                f"with {whose}, the experiment returned {run['result']}. "
                "It must return True or False."
            )
        if not run["answers"]:
            return (
                f"with {whose}, the experiment never calls what it is given. "
                "So its result cannot depend on it."
            )
    if not any(run["used a GPU"] for run in runs if run["of"] == "subject"):
        return (
            "with the subject, the experiment uses no tensor on a GPU. Give the subject one, or "
            "copy its result to a GPU."
        )
    if all(set(run["answers"]) == {run["result"]} for run in runs):
        return (
            "subject and opposite answer True and False themselves, and the experiment only "
            "passes it on. "
            "The subject must be what the sentence is about. The experiment measures what it does."
        )
    return ""


def _not_decided(observed: Any) -> str:
    results: dict[str, list[str]] = {"subject": [], "opposite": []}
    for run in observed["runs"]:
        results[run["of"]].append(run["result"])
    for of, whose in WHOSE.items():
        first = results[of][0]
        for later in results[of][1:]:
            if later != first:
                return (
                    f"with {whose}, the experiment returned {first} and then {later}. "
                    "It must depend neither on what ran before nor on chance."
                )
    found, otherwise = results["subject"][0], results["opposite"][0]
    if found == otherwise:
        return (
            f"the experiment returns {found} for the subject and for its opposite. "
            "So it does not decide. "
            "What would you see if the sentence were the other way round?"
        )
    expected = str(VERDICTS[observed["verdict"]])
    if found != expected:
        return (
            f"the experiment returns {found} for the subject, and the verdict "
            f"{observed['verdict']} needs {expected}. "
            "Return True if the sentence holds of what the experiment is given."
        )
    return ""


def _wrong_subject(observed: Any) -> str:
    """Return why the verdict does not fit a sentence that holds, or "".

    Sentences with stand-ins hold. So an experiment that judges all stand-ins rightly can reach
    another verdict only with a subject that the sentence is not about.
    """
    if "stand-ins" not in observed or observed["verdict"] == "holds":
        return ""
    does = observed["stand-ins"][0]["does"]
    return (
        f"for a function that {does}, your experiment gives True. "
        f"So the verdict {observed['verdict']} comes "
        "from the subject. Is it what the sentence is about?"
    )
