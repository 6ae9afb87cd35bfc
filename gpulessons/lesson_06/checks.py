"""Checks of lesson 06, memory leaks: five scripts to fix.

The script and the answer run on the same models and batches. The answer must return the same and
train the same, and none of its steps may leave anything on the GPU.
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
# Memory is measured before each step and after the last. These measurements are compared.
EARLY, LATE = slice(2, 5), slice(-3, None)
FEW = 1024  # bytes: two blocks for numbers that are added up on the GPU
# Numbers must agree within these errors. Rounding to float16 or to printed digits is worse.
RELATIVE, ABSOLUTE = 1e-5, 1e-6


def draw(generator: random.Random, bad: int = 0) -> Plain:
    """Draw the sizes of a model and the indices of bad batches, whose targets are nan.

    `bad` is the number of bad batches.
    """
    return {
        "seed": generator.randrange(2**31),
        "rows": 64 * generator.randint(2, 6),
        "width": 16 * generator.randint(2, 5),
        "outputs": generator.randint(4, 8),
        "bad": sorted(generator.sample(MAY_BE_BAD, k=bad)),
    }


def observe(answer: Any, inputs: Plain, script: Callable[..., Any]) -> Plain:
    """Run the script and the answer on the same data.

    Return the results, the trained models and the allocated bytes of both.
    """
    with _without_collector():
        with during(f"a model of width {inputs['width']} and {STEPS} batches"):
            observed = _run(answer, inputs)
            raised = not inputs["bad"] or _raised(answer, inputs)
        expected = _run(script, inputs)  # last: while the answer runs there is nothing to find
        return {"raised": raised, "expected": expected, "answer": observed}


@contextmanager
def _without_collector() -> Iterator[None]:
    """Switch Python's garbage collector off in the block.

    Memory that only the collector would free then counts as held.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _run(train: Any, inputs: Plain) -> Plain:
    """Train a new model with `train`. Return its result, the trained model and the memory left."""
    generator = torch.Generator().manual_seed(inputs["seed"])
    width = inputs["width"]
    model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, inputs["outputs"]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / width**0.5)
    model.cuda()
    calls: list[None] = []
    own_hook = model[1].register_forward_hook(lambda *_: calls.append(None))  # must stay
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    # Gradients and workspaces exist before the first measurement.
    model(torch.ones(inputs["rows"], width, device="cuda")).mean().backward()
    held: list[int] = []
    steps = Steps()
    before = _allocated()
    with steps.followed(model):
        returned = train(model, optimizer, steps.looked_at(_batches(inputs, generator, held)))
    left = _allocated() - before
    kept_own_hook = own_hook.id in model[1]._forward_hooks
    for module in model.modules():
        module._forward_hooks.clear()  # A hook that the script left may hold graphs.
    return {
        "returned": _plain(returned),
        "graphs": steps.graphs,
        "retained": steps.retained,
        "backwards": steps.backwards,
        "hooks": steps.hooks,
        "own hook": kept_own_hook,
        "model": [describe(parameter)["values"] for parameter in model.parameters()],
        "held": held,
        "left": left,
    }


def _raised(train: Any, inputs: Plain) -> bool:
    """Return whether `train` lets an error that is not about memory reach its caller.

    The model raises it, because the rows have too few columns.
    """
    width, outputs = inputs["width"], inputs["outputs"]
    model = nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, outputs)).cuda()
    batch = torch.ones(2, width - 1, device="cuda"), torch.ones(2, outputs, device="cuda")
    try:
        train(model, torch.optim.SGD(model.parameters(), lr=0.05), iter([batch]))
    except RuntimeError:
        return True
    return False


class Saved:
    """Tensor that a graph saves for its backward pass. `used` says whether the pass has used it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.used = tensor, False

    def use(self) -> Any:
        self.used = True
        return self.tensor


class Steps:
    """Observer of a training from batch to batch.

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
        """Watch the model's graphs, saved tensors and backward passes in the block."""
        modules = set(model.modules())

        def mark(module: nn.Module, given: Any, output: torch.Tensor) -> None:
            if module in modules:
                self._graphs.mark(module, given, output)

        def save(tensor: torch.Tensor) -> Saved:
            # A node that saves its own output would be kept alive by the output.
            saved = Saved(tensor.detach())
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
        """Yield the batches, and count graphs, hooks and saved tensors before each batch."""
        while True:
            self.graphs.append(self._graphs.alive)
            self.hooks.append(sum(map(hooks_of, self._model.modules())))
            self.retained = max(self.retained, sum(saved.used for saved in self._saved))
            batch = next(batches, None)
            if batch is None:
                return
            yield batch
            del batch


def _batches(
    inputs: Plain, generator: torch.Generator, held: list[int]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield new batches, the last one larger than the others.

    Before each batch, append the allocated bytes to `held`.
    """
    for step in range(STEPS):
        held.append(_allocated())
        rows = inputs["rows"] * (2 if step == STEPS - 1 else 1)
        yield _batch(rows, inputs, generator, step in inputs["bad"])  # kept by nobody here
    held.append(_allocated())


def _allocated() -> int:
    """Return the bytes allocated on all GPUs. Moving a leak to another GPU does not fix it."""
    return sum(torch.cuda.memory_allocated(index) for index in range(torch.cuda.device_count()))


def _batch(
    rows: int, inputs: Plain, generator: torch.Generator, bad: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets on the GPU. The targets of a `bad` batch are nan."""
    x = torch.randn(rows, inputs["width"], generator=generator)
    y = x[:, : inputs["outputs"]].sin()
    if bad:
        y = y * float("nan")
    return x.cuda(), y.cuda()


def _plain(value: Any) -> Plain:
    """Return a result as plain data. Tensors become descriptions that say if they have a graph."""
    if isinstance(value, list | tuple):
        return [_plain(element) for element in value]
    if isinstance(value, torch.Tensor):
        return describe(value) | {"graph": value.requires_grad}
    if value is None or isinstance(value, bool | str):
        return value
    if number(value) is None:
        return describe(value)
    return number(value)


def judge(observed: Plain, inputs: Plain, hint: str) -> Verdict:
    answer, expected = observed["answer"], observed["expected"]
    if len(answer["held"]) != STEPS + 1:
        return not_yet(
            f"your function took {len(answer['held'])} of {STEPS} batches, and did not ask for "
            "more. Use all of them."
        )
    if not near(answer["returned"], expected["returned"], RELATIVE, ABSOLUTE):
        got, asked = _short(answer["returned"]), _short(expected["returned"])
        other = " with other values" if got == asked else ""
        return not_yet(
            f"your function must return what the script returned, {asked}. "
            f"Yours returned {got}{other}."
        )
    if not near(answer["model"], expected["model"], RELATIVE, ABSOLUTE):
        return not_yet("after your function, the model's weights differ from those of the script.")
    if not observed["raised"]:
        return not_yet(
            "a batch was too narrow for the model, and your function hid the RuntimeError. "
            "The script raises it."
        )
    return _judge_leaks(answer, expected, inputs, hint)


def _judge_leaks(answer: Plain, expected: Plain, inputs: Plain, hint: str) -> Verdict:
    """Judge the memory that an answer with right results kept on the GPU and in the computer.

    `answer` and `expected` are the observations of the answer and of the script. `hint` is added to
    the message about a leak.
    """
    grown, script_grown = _grown(answer["held"]), _grown(expected["held"])
    if grown > 0:
        steps = STEPS + 1 + LATE.start - (EARLY.stop - 1)
        return not_yet(
            f"the GPU still held {units.byte_text(grown)} more after {steps} more steps. "
            f"The script held {units.byte_text(script_grown)} more. {hint}"
        )
    first = min(answer["held"][2:STEPS]) - answer["held"][1]
    if first > FEW:
        return not_yet(
            f"the GPU still held {units.byte_text(first)} of the first step during all other "
            f"steps. {hint}"
        )
    most, step = _most(answer["held"], inputs["bad"])
    if most > FEW:
        return not_yet(
            f"after step {step}, the GPU held {units.byte_text(most)} more than after the first "
            f"step. {hint}"
        )
    if answer["retained"]:
        return not_yet(
            "a backward pass had not freed the tensors that it used when the next batch came. "
            "Which argument asks for that?"
        )
    if _grown(answer["graphs"]) > 0 or _most(answer["graphs"], inputs["bad"])[0] > 0:
        return not_yet(
            f"the graphs of earlier steps were still there, in the computer's memory. {hint}"
        )
    if answer["backwards"] > expected["backwards"]:
        return not_yet(
            f"your function ran {answer['backwards']} backward passes, "
            f"the script {expected['backwards']}. "
            "A backward pass only to free a graph costs time and changes the gradients."
        )
    if not answer["own hook"]:
        return not_yet(
            "your function removed a hook that was there before. Remove only your own hooks."
        )
    if _grown(answer["hooks"]) > 0 or _most(answer["hooks"], inputs["bad"])[0] > 0:
        more = max(answer["hooks"]) - answer["hooks"][1]
        compared = f"the model had {more} more hooks than after the first"
        return not_yet(f"after the last step, {compared}. {hint}")
    if answer["left"] > 0:
        return not_yet(
            f"{units.byte_text(answer['left'])} were still in memory after your function had "
            f"returned. {hint}"
        )
    return right(
        f"In the steps compared, the script kept {units.byte_text(script_grown)}, and your "
        "function kept nothing."
    )


def _grown(held: list[int]) -> int:
    """Return by how much the smallest late number exceeds the largest early number.

    `held` are the allocated bytes before each batch.
    """
    return min(held[LATE]) - max(held[EARLY])


def _most(seen: list[int], bad: list[int]) -> tuple[int, int]:
    """Return the largest excess over the number after the first step, and the step that left it.

    This also finds leaks that are freed from time to time. The last batch is larger, so its step is
    left out. The steps with a `bad` batch are left out, too, because they stop early and may keep
    their tensors until the next step.
    """
    whole = [step for step in range(2, STEPS) if step - 1 not in bad]
    step = max(whole, key=lambda step: seen[step])
    return seen[step] - seen[1], step


def _short(value: Plain) -> str:
    """Describe a value that the answer returned in a few words."""
    if isinstance(value, dict):
        if "shape" not in value:
            return value["type"]
        graph = ", with a graph" if value.get("graph") else ""
        return f"a tensor of shape {value['shape']} on {value['device']}{graph}"
    if isinstance(value, list):
        more = ", …" if len(value) > 2 else ""
        return f"[{', '.join(map(_short, value[:2]))}{more}] ({len(value)} entries)"
    if isinstance(value, float):
        return f"{value:.5g}"
    return repr(value)


def fix(exercise: str, script: Callable[..., Any], hint: str, section: str, bad: int = 0) -> Check:
    """Return the check of an exercise that asks learners to fix a leak in `script`.

    `bad` is the number of batches whose targets are nan, `hint` is added to the message about a
    leak, and `section` is the lesson's section that explains it.
    """
    return Check(
        exercise,
        partial(draw, bad=bad),
        partial(observe, script=script),
        partial(judge, hint=hint),
        script=script,
        alters=("values",),
        section=section,
    )


GRAPHS = "What holds the graphs that nobody calls backward on?"
TENSORS = "Where are the tensors in your list?"
AVERAGE = "What does the average remember besides its value?"
HOOKS = "What does the hook keep, and how many hooks are there?"
SEVERAL = (
    "What does a loss keep, what does the hook keep, "
    "and what does an exception know besides its message?"
)

CHECKS = [
    fix("06.1", scripts.train_and_validate, GRAPHS, "Find it"),
    fix("06.2", scripts.train_and_collect, TENSORS, "What to keep"),
    fix("06.3", scripts.train_smoothed, AVERAGE, "Six loops"),
    fix("06.4", scripts.train_watched, HOOKS, "A hook"),
    fix("06.5", scripts.train_robustly, SEVERAL, "Build it: three leaks at once", bad=3),
]
