"""Checks of lesson 06, memory leaks: five scripts to mend.

A script is run beside the answer, on models and batches that are the same: the answer must return and train the same, and no step of it
may leave anything on the GPU.
"""

import gc
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from gpulessons.autograd_graphs import Graphs
from gpulessons.lesson_06 import leaky_scripts as scripts
from gputrace import units
from labkit.checks.checking import Check, Plain, Verdict, describe, during, not_yet, number, right
from labkit.checks.comparing import near
from labkit.checks.left_behind import hooks_of

STEPS = 12
MAY_BE_BAD = range(4, 9)  # batches, so that memory before and after them can be compared
EARLY, LATE = slice(2, 5), slice(-3, None)  # looks at the memory, of which there is one before each step and one after the last
FEW = 1024  # bytes: two blocks for numbers that are added up on the GPU
RELATIVE, ABSOLUTE = 1e-5, 1e-6  # how close numbers must be: closer than a printed one, or float16, is rounded


def draw(generator: random.Random, bad: int = 0) -> Plain:
    """A model's sizes, and batches of which some are `bad`: their targets are no numbers."""
    return {
        "seed": generator.randrange(2**31),
        "rows": 64 * generator.randint(2, 6),
        "width": 16 * generator.randint(2, 5),
        "outputs": generator.randint(4, 8),
        "bad": sorted(generator.sample(MAY_BE_BAD, k=bad)),
    }


def observe(answer: Any, inputs: Plain, script: Callable[..., Any]) -> Plain:
    """What script and answer return, what became of their models, and what they held on the GPU."""
    with _without_collector():
        with during(f"a model of width {inputs['width']} and {STEPS} batches"):
            observed = _run(answer, inputs)
            raised = not inputs["bad"] or _raised(answer, inputs)
        expected = _run(script, inputs)  # last: while the answer runs there is nothing to find
        return {"raised": raised, "expected": expected, "answer": observed}


@contextmanager
def _without_collector() -> Iterator[None]:
    """Python's garbage collector, which comes by chance, stays away: what it would free counts as held."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _run(train: Any, inputs: Plain) -> Plain:
    generator = torch.Generator().manual_seed(inputs["seed"])
    model = nn.Sequential(nn.Linear(inputs["width"], inputs["width"]), nn.Tanh(), nn.Linear(inputs["width"], inputs["outputs"]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / inputs["width"] ** 0.5)
    model.cuda()
    calls: list[None] = []
    own_hook = model[1].register_forward_hook(lambda *_: calls.append(None))  # must stay
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model(torch.ones(inputs["rows"], inputs["width"], device="cuda")).mean().backward()  # gradients are there, and workspaces
    held: list[int] = []
    steps = Steps()
    before = torch.cuda.memory_allocated()
    with steps.followed(model):
        returned = train(model, optimizer, steps.looked_at(_batches(inputs, generator, held)))
    return {
        "returned": _plain(returned),
        "graphs": steps.graphs,
        "retained": steps.retained,
        "backwards": steps.backwards,
        "hooks": steps.hooks,
        "own hook": own_hook.id in model[1]._forward_hooks,
        "model": [describe(parameter)["values"] for parameter in model.parameters()],
        "held": held,
        "left": torch.cuda.memory_allocated() - before,
    }


def _raised(train: Any, inputs: Plain) -> bool:
    """Whether an error of another kind goes up: rows that are too narrow for the model."""
    model = nn.Linear(inputs["width"], inputs["outputs"]).cuda()
    batch = torch.ones(2, inputs["width"] - 1, device="cuda"), torch.ones(2, inputs["outputs"], device="cuda")
    try:
        train(model, torch.optim.SGD(model.parameters(), lr=0.05), iter([batch]))
    except RuntimeError:
        return True
    return False


class Saved:
    """A tensor that a graph saves."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.used = tensor, False

    def use(self) -> Any:
        self.used = True
        return self.tensor


class Steps:
    """Follow a training from batch to batch.

    Attributes:
        graphs: number of the model's graphs that are alive, each time a batch is requested.
        hooks: number of the model's hooks, each time a batch is requested.
        retained: the most tensors that a backward pass had used and not freed when a batch was
            requested.
        backwards: number of backward passes that reached the model's last parameter.
    """

    def __init__(self) -> None:
        self.graphs: list[int] = []
        self.hooks: list[int] = []
        self.retained = 0
        self.backwards = 0
        self._graphs = Graphs()
        self._saved: WeakSet[Saved] = WeakSet()

    @contextmanager
    def followed(self, model: nn.Module) -> Iterator[None]:
        modules = set(model.modules())

        def mark(module: nn.Module, given: Any, output: torch.Tensor) -> None:
            if module in modules:
                self._graphs.mark(module, given, output)

        def save(tensor: torch.Tensor) -> Saved:
            saved = Saved(tensor.detach())  # or an output that its own node saves would keep that node
            self._saved.add(saved)
            return saved

        def count(parameter: torch.Tensor) -> None:
            self.backwards += 1

        handle = register_module_forward_hook(mark)
        counter = list(model.parameters())[-1].register_post_accumulate_grad_hook(count)
        self._model = model
        try:
            with torch.autograd.graph.saved_tensors_hooks(save, Saved.use):
                yield
        finally:
            handle.remove()
            counter.remove()

    def looked_at(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            self.graphs.append(self._graphs.alive)
            self.hooks.append(sum(map(hooks_of, self._model.modules())))
            self.retained = max(self.retained, sum(saved.used for saved in self._saved))
            batch = next(batches, None)
            if batch is None:
                return
            yield batch
            del batch


def _batches(inputs: Plain, generator: torch.Generator, held: list[int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Fresh batches, the last of them larger; `held` gets the bytes allocated whenever one is asked for."""
    for step in range(STEPS):
        held.append(torch.cuda.memory_allocated())
        rows = inputs["rows"] * (2 if step == STEPS - 1 else 1)
        yield _batch(rows, inputs, generator, step in inputs["bad"])  # kept by nobody here
    held.append(torch.cuda.memory_allocated())


def _batch(rows: int, inputs: Plain, generator: torch.Generator, bad: bool) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(rows, inputs["width"], generator=generator)
    y = x[:, : inputs["outputs"]].sin()
    return x.cuda(), (y * float("nan") if bad else y).cuda()


def _plain(value: Any) -> Plain:
    if isinstance(value, list | tuple):
        return [_plain(element) for element in value]
    if isinstance(value, torch.Tensor):
        return describe(value) | {"graph": value.requires_grad}
    if value is None or isinstance(value, bool | str):
        return value
    return describe(value) if number(value) is None else number(value)


def judge(observed: Plain, inputs: Plain, hint: str) -> Verdict:
    answer, expected = observed["answer"], observed["expected"]
    if len(answer["held"]) != STEPS + 1:
        return not_yet(f"your function took {len(answer['held'])} of {STEPS} batches, and did not ask for more. What of the others?")
    if not near(answer["returned"], expected["returned"], RELATIVE, ABSOLUTE):
        got, due = _short(answer["returned"]), _short(expected["returned"])
        other = " with other values" if got == due else ""
        return not_yet(f"your function must return what the script returned, {due}; yours returned {got}{other}.")
    if not near(answer["model"], expected["model"], RELATIVE, ABSOLUTE):
        return not_yet("the model has not learned what it learns from the script.")
    if not observed["raised"]:
        return not_yet("of a batch too narrow for the model, your function kept the RuntimeError to itself. The script lets it go up.")
    grown = _grown(answer["held"])
    if grown > 0:
        steps = STEPS + 1 + LATE.start - (EARLY.stop - 1)
        leaked = f"{units.byte_text(grown)} more after {steps} more steps; the script, {units.byte_text(_grown(expected['held']))}"
        return not_yet(f"the GPU still held {leaked}. {hint}")
    if rise := _rise(answer["held"]):
        return not_yet(f"the GPU held {units.byte_text(rise)} more after three steps in a row, if not at the end. {hint}")
    if (first := min(answer["held"][EARLY]) - answer["held"][1]) > FEW:
        return not_yet(f"the GPU still held {units.byte_text(first)} of the first step during all others. {hint}")
    if answer["retained"]:
        return not_yet("a backward pass did not let go of what it had used when the next batch came. Which argument asks for that?")
    if _grown(answer["graphs"]) > 0 or _rise(answer["graphs"]) or min(answer["graphs"][EARLY]) > answer["graphs"][1]:
        return not_yet(f"the graphs of earlier steps were still there, in the computer's memory. {hint}")
    if answer["backwards"] > expected["backwards"]:
        return not_yet(
            f"your function ran {answer['backwards']} backward passes, "
            f"the script {expected['backwards']}. "
            "A backward pass only to free a graph costs time and changes the gradients."
        )
    if not answer["own hook"]:
        return not_yet("your function removed a hook that was there before. Remove only your own hooks.")
    if _grown(answer["hooks"]) > 0 or _rise(answer["hooks"]):
        more = max(answer["hooks"]) - answer["hooks"][1]
        compared = f"the model had {more} more hooks than after the first"
        return not_yet(f"after the last step, {compared}. {hint}")
    if answer["left"] > 0:
        return not_yet(f"{units.byte_text(answer['left'])} were still held when your function had returned. {hint}")
    return right(f"The script kept {units.byte_text(_grown(expected['held']))} in the steps compared, yours nothing.")


def _grown(held: list[int]) -> int:
    """Bytes by which even the least of the last looks is above the most of the early ones."""
    return min(held[LATE]) - max(held[EARLY])


def _rise(held: list[int]) -> int:
    """The most that three steps in a row added, each of them: what is let go now and then grows until it is."""
    runs = [held[start : start + 4] for start in range(EARLY.start, len(held) - 3)]
    return max((run[-1] - run[0] for run in runs if run[0] < run[1] < run[2] < run[3]), default=0)


def _short(value: Plain) -> str:
    """A returned value in a few words."""
    if isinstance(value, dict):
        graph = ", with a graph" if value.get("graph") else ""
        return f"a tensor of shape {value['shape']} on {value['device']}{graph}" if "shape" in value else value["type"]
    if isinstance(value, list):
        more = ", …" if len(value) > 2 else ""
        return f"[{', '.join(map(_short, value[:2]))}{more}] ({len(value)} entries)"
    return f"{value:.5g}" if isinstance(value, float) else repr(value)


def _mend(exercise: str, script: Callable[..., Any], hint: str, section: str, bad: int = 0) -> Check:
    """The check of an exercise that hands out `script`."""
    draws: Callable[[random.Random], Plain] = partial(draw, bad=bad)
    return Check(
        exercise, draws, partial(observe, script=script), partial(judge, hint=hint), script=script, alters=("values",), section=section
    )


LOOP, REMEMBER = "A loop that keeps nothing", "Functions and errors that remember"

CHECKS = [
    _mend("06.1", scripts.train_and_validate, "Who holds the graphs that nobody calls backward on?", LOOP),
    _mend("06.2", scripts.train_and_collect, "Where are the tensors in your list?", LOOP),
    _mend("06.3", scripts.train_smoothed, "What does the average remember besides its value?", LOOP),
    _mend("06.4", scripts.train_watched, "What does the hook keep, and how many hooks are there?", REMEMBER),
    _mend("06.5", scripts.train_robustly, "What does an exception know besides its message?", REMEMBER, bad=3),
]
