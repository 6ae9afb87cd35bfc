"""Checks of lesson 09, fitting in memory."""

import copy
import numbers
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gpulessons.autograd_graphs import Graphs
from gputrace import units
from labkit.checks.checking import (
    Check,
    Plain,
    Verdict,
    during,
    not_yet,
    number_or_type,
    right,
    wrong_type,
)
from labkit.checks.comparing import near

DEVICE = "cuda:0"
RELATIVE, ABSOLUTE = 1e-4, 1e-5  # Numbers must agree within these errors. float16 rounds more.

# 09.1: the bytes besides activations

OPTIMIZERS = {"SGD": {}, "momentum": {"momentum": 0.9}, "Adam": {}}


def draw_models(generator: random.Random) -> Plain:
    """Draw the sizes of a model's layers for each optimizer."""
    models = []
    for name in OPTIMIZERS:
        sizes = [generator.randint(3, 40) for _ in range(4)]
        models.append({"optimizer": name, "sizes": sizes})
    return models


def observe_bytes(training_bytes: Any, models: Plain) -> Plain:
    """Return the answer's number of bytes for each model, or the type's name of another result."""
    found = []
    for item in models:
        model = _mixed_model(item["sizes"], DEVICE)
        with during(f"a model and {item['optimizer']!r}"):
            answer = training_bytes(model, item["optimizer"])
        found.append(number_or_type(answer))
    return found


def expect_bytes(models: Plain) -> Plain:
    """Return the expected bytes of each kind (such as gradients), for each model."""
    expected = []
    for item in models:
        model = _mixed_model(item["sizes"], "cpu")
        expected.append(_bytes_of_training(model, item["optimizer"]))
    return expected


def _mixed_model(sizes: list[int], device: str) -> nn.Sequential:
    """Return a model with several kinds of layers.

    One layer is frozen, one is in half precision, and two share a weight. One buffer is not in the
    state_dict.
    """
    first, second, third, fourth = sizes
    layers = [
        nn.Linear(first, second),
        nn.BatchNorm1d(second),
        nn.Linear(second, third),
        nn.Linear(third, fourth).half(),
    ]
    model = nn.Sequential(*layers, nn.Linear(first, second))
    model[4].weight = model[0].weight
    model[2].requires_grad_(False)
    model.register_buffer("scale", torch.ones(first), persistent=False)
    return model.to(device)


def _bytes_of_training(model: nn.Sequential, optimizer: str) -> dict[str, int]:
    """Measure the bytes of each kind after a training step, without Adam's counters."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    if optimizer == "Adam":
        make: Any = torch.optim.Adam
    else:
        make = torch.optim.SGD
    chosen = make(trained, lr=0.1, **OPTIMIZERS[optimizer])
    chosen.step()
    slots = [value for slot in chosen.state.values() for value in slot.values()]
    parts: dict[str, list[Any]] = {
        "parameters and buffers": [*model.parameters(), *model.buffers()],
        "gradients": [parameter.grad for parameter in trained],
        "optimizer state": [
            slot for slot in slots if isinstance(slot, torch.Tensor) and slot.dim()
        ],
    }
    return {name: sum(tensor.nbytes for tensor in tensors) for name, tensors in parts.items()}


def judge_bytes(observed: Plain, models: Plain, expected: Plain) -> Verdict:
    for answer, each, item in zip(observed, expected, models, strict=True):
        total = sum(each.values())
        if isinstance(answer, str):
            return wrong_type(answer, "a number")
        if answer != total:
            parts = ", ".join(f"{name} {nbytes} B" for name, nbytes in each.items())
            return not_yet(
                f"with {item['optimizer']} there are {total} B: {parts}. You said {answer:.0f} B. "
                "A layer is frozen, one is in half precision, two share a weight, and some buffers "
                "are never saved."
            )
    return right("Now you need only the bytes of the activations.")


# 09.4: micro-batches

# With these sizes, a graph of some rows is much larger than the parameters and their gradients.
FEATURES, HIDDEN = 8, 256


def draw_batch(generator: random.Random) -> Plain:
    """Draw a batch whose rows cannot be divided into equal micro-batches.

    Its last rows have other classes. All parameters but one have a gradient from before. It is
    small, so that it hides no rounding.
    """
    rows = generator.randint(100, 200)
    return {
        "seed": generator.randrange(1 << 30),
        "rows": rows,
        "batch": 5 * rows + generator.randint(1, rows // 3),
        "old": generator.uniform(0.01, 0.02),
        "without": generator.randrange(4),
    }


def expect_accumulate(inputs: Plain) -> Plain:
    """Return the expected gradients, those of the whole batch at once."""
    model, x, y = _batch_and_model(inputs, "cpu")
    F.cross_entropy(model(x), y).backward()
    return [_values(parameter.grad) for parameter in model.parameters()]


def _batch_and_model(
    inputs: Plain, device: str
) -> tuple[nn.Sequential, torch.Tensor, torch.Tensor]:
    """Return the model, the inputs and the classes on a device."""
    draws = torch.Generator().manual_seed(inputs["seed"])
    x = torch.randn(inputs["batch"], FEATURES, generator=draws)
    y = (x[:, 0] + torch.linspace(-2, 2, inputs["batch"]) > 0).long()
    model = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 2)).to(device)
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=draws) / 4)
            if index != inputs["without"]:
                parameter.grad = torch.full_like(parameter, inputs["old"])
    return model, x.to(device), y.to(device)


def observe_accumulate(accumulate: Any, inputs: Plain) -> Plain:
    """Return the gradients, the rows of each forward pass, and the graphs and bytes that remain."""
    model, x, y = _batch_and_model(inputs, DEVICE)
    _take_workspaces()
    before = [_values(parameter) for parameter in model.parameters()]
    seen: list[int] = []
    held: list[int] = []  # allocated bytes at the start of each forward pass
    graphs, alive = Graphs(), [0]

    def watch(module: nn.Module, given: Any) -> None:
        seen.append(len(given[0]))
        held.append(torch.cuda.memory_allocated(DEVICE))
        alive.append(graphs.alive)

    model[0].register_forward_pre_hook(watch)
    model[0].register_forward_hook(graphs.mark)
    accumulate(model, x, y, inputs["rows"])
    got = [_values(parameter.grad) for parameter in model.parameters()]
    unchanged = before == [_values(parameter) for parameter in model.parameters()]
    kept = {"kept": max(held, default=0) - min(held, default=0), "graphs": max(alive)}
    return {"got": got, "seen": seen, **kept, "unchanged": unchanged}


def judge_accumulate(observed: Plain, inputs: Plain, expected: Plain) -> Verdict:
    seen, rows = observed["seen"], inputs["rows"]
    if not seen or max(seen) > rows:
        return not_yet(
            f"the model got {max(seen, default=0)} rows at once. At most {rows} are allowed."
        )
    if sum(seen) < inputs["batch"]:
        return not_yet(
            f"the model got {sum(seen)} of {inputs['batch']} rows. "
            "Each row must go through the model once."
        )
    if not near(observed["got"], expected, RELATIVE, ABSOLUTE):
        return not_yet(
            "these are not the gradients of the whole batch. The micro-batches have "
            f"{seen[0]} rows, and the last has {seen[-1]}. "
            "What was in .grad before stays in the sum."
        )
    fewest = -(-inputs["batch"] // rows)
    if len(seen) > 2 * fewest:
        return not_yet(
            f"expected {fewest} micro-batches of {rows} rows, got {len(seen)}. "
            f"Is {rows} a size, or a number?"
        )
    if observed["kept"] > rows * HIDDEN * 4 / 2:  # half of what a layer keeps of a micro-batch
        kept = units.byte_text(observed["kept"])
        return not_yet(
            f"when a forward pass began, {kept} of earlier micro-batches were still there. "
            "What keeps their graphs?"
        )
    if observed["graphs"] > 1:  # The graph of the micro-batch before is freed with the next loss.
        return not_yet(
            f"when a forward pass began, {observed['graphs']} graphs were still there, "
            "without their tensors. What keeps them?"
        )
    if not observed["unchanged"]:
        return not_yet("the parameters have changed. Only the gradients should change.")
    return right(f"{len(seen)} micro-batches, the gradients of one batch.")


def _take_workspaces() -> None:
    """Make cuBLAS allocate its workspaces, so that they do not count as the answer's bytes.

    cuBLAS allocates one for this thread and one for the thread of the backward pass. With two
    layers in a checkpoint, the backward pass also runs a forward product.
    """
    layer = nn.Linear(8, 8, device=DEVICE)
    x = torch.ones(8, 8, device=DEVICE)
    checkpoint(nn.Sequential(layer, layer), x, use_reentrant=False).sum().backward()


def _values(tensor: Any) -> Plain:
    if tensor is None:
        return None
    return tensor.detach().float().cpu().flatten().tolist()


# 09.3: checkpoints

WIDTH, ROWS = 64, 1024
KEPT = ROWS * WIDTH * 4  # bytes of one block's input


def draw_blocks(generator: random.Random) -> Plain:
    """Draw a number of blocks that is no multiple of `every`.

    Groups of `every` blocks have another size than `every` groups would have.
    """
    every = generator.randint(2, 4)
    counts = range(2 * every + 1, 5 * every)
    allowed = [count for count in counts if count % every and -(-count // every) != every]
    seed = generator.randrange(1 << 30)
    return {"seed": seed, "every": every, "blocks": generator.choice(allowed)}


def observe_checkpoints(run: Any, inputs: Plain) -> Plain:
    """Run the answer with a batch that needs no gradient, and with one that does.

    Also return what the blocks do without checkpoints.
    """
    torch.manual_seed(inputs["seed"])
    torch.cuda.manual_seed_all(inputs["seed"])
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.GELU(), nn.Dropout(0.3), nn.Tanh())
        for _ in range(inputs["blocks"])
    ]
    for block in blocks:
        # With these weights, the result of many blocks still depends on x.
        nn.init.normal_(block[0].get_parameter("weight"), std=2 / WIDTH**0.5)
    x = torch.randn(ROWS, WIDTH)
    model, x = nn.ModuleList(blocks).to(DEVICE), x.to(DEVICE).requires_grad_()
    _take_workspaces()
    twin = copy.deepcopy(model)  # The answer cannot change this copy.
    answers = [_pass(run, model, given, inputs) for given in (x.detach(), x)]
    expected = _pass(lambda blocks, x, every: nn.Sequential(*blocks)(x), twin, x, inputs)
    return {"expected": expected, "answers": answers}


def _pass(run: Any, model: nn.ModuleList, x: torch.Tensor, inputs: Plain) -> Plain:
    """Run a forward and a backward pass.

    Return the result, the bytes that the forward pass keeps, the blocks that the backward pass runs
    again, and the gradients.
    """
    calls: list[int] = []
    handles = [
        block.register_forward_pre_hook(lambda *_, index=index: calls.append(index))
        for index, block in enumerate(model)
    ]
    torch.cuda.manual_seed_all(inputs["seed"])
    leaves: list[torch.Tensor] = list(model.parameters())
    if x.requires_grad:
        leaves.insert(0, x)
    before = torch.cuda.memory_allocated(DEVICE)
    try:
        result = run(list(model), x, inputs["every"])
        if not isinstance(result, torch.Tensor):
            return {"type": type(result).__name__}
        kept, forward = torch.cuda.memory_allocated(DEVICE) - before, len(calls)
        if not result.requires_grad:
            return {"type": "Tensor", "result": _values(result), "gradients": None}
        result.sum().backward()
    finally:
        for handle in handles:
            handle.remove()
    gradients = [_values(leaf.grad) for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    found = {"type": "Tensor", "result": _values(result), "kept": kept}
    return found | {"again": calls[forward:], "gradients": gradients}


def judge_checkpoints(observed: Plain, inputs: Plain) -> Verdict:
    expected, every = observed["expected"], inputs["every"]
    blocks = list(range(inputs["blocks"]))
    groups = [blocks[first : first + every] for first in range(0, len(blocks), every)]
    groups.reverse()  # The backward pass runs the last group first.
    # The inputs of all groups but the first, the result, and a little more.
    allowed = (len(groups) + 1) * KEPT
    without = units.byte_text(expected["kept"])
    for answer in observed["answers"]:
        if answer["type"] != "Tensor":
            return wrong_type(answer["type"], "a tensor")
        if not near(answer["result"], expected["result"], RELATIVE, ABSOLUTE):
            return not_yet("the result is not what the blocks make of x, one after the other.")
        gradients = answer["gradients"]
        if gradients is None:
            return not_yet(
                "the result has no gradient, although the blocks' weights are trained. "
                "What if x itself needs none?"
            )
        if not near(gradients, expected["gradients"][-len(gradients) :], RELATIVE, ABSOLUTE):
            return not_yet("the gradients are not those of the blocks without checkpoints.")
        kept = units.byte_text(answer["kept"])
        if answer["kept"] > allowed:
            needed = f"{len(groups)} checkpoints need less than {units.byte_text(allowed)}"
            return not_yet(f"{kept} were kept (without checkpoints {without}); {needed}.")
        if answer["again"] != [index for group in groups for index in group]:
            return not_yet(
                f"expected a checkpoint for every {every} of the {inputs['blocks']} blocks. Then "
                f"the backward pass computes these groups of blocks again: {groups}. "
                f"Yours computed {answer['again']} again. The longest group decides the peak."
            )
    return right(f"{kept} kept instead of {without}.")


# 09.2: the largest batch

ALL_ROWS, CALLS = 4096, 26
BROKEN = "the labels are broken"  # an error that has nothing to do with memory
BROKEN_ERROR = f"RuntimeError: {BROKEN}"


def draw_limits(generator: random.Random) -> Plain:
    """Draw the number of rows that fit in each case: some, none, one, all, and two with errors.

    `breaks_at` is the number of the call that raises an error of another kind. 0 means none.
    """
    some = [generator.randint(2, 200), generator.randint(201, ALL_ROWS - 2)]
    cases = [{"fit": fit, "breaks_at": 0} for fit in (*some, 1, 0, ALL_ROWS, ALL_ROWS - 1)]
    generator.shuffle(cases)
    broken = [(generator.randint(201, ALL_ROWS - 2), call) for call in (1, generator.randint(2, 5))]
    return [*cases, *({"fit": fit, "breaks_at": call} for fit, call in broken)]


def observe_most(most_rows: Any, cases: Plain) -> Plain:
    found: Plain = []
    for case in cases:
        asked: list[int | str] = []
        step = _step_with_limit(case, asked)
        if case["breaks_at"]:
            error = _error_of(partial(most_rows, step))
            found.append({"error": error, "asked": asked})
            continue
        with during(f"a step for which {_rows_text(case['fit'])}"):
            answer = most_rows(step)
        found.append({"answer": number_or_type(answer), "asked": asked})
    return found


def _step_with_limit(case: Plain, asked: list[int | str]) -> Any:
    """Return a function that acts like a training step, which may fail for too many rows.

    It appends the number of rows of each call to `asked`.
    """

    def step(rows: int) -> None:
        whole = isinstance(rows, numbers.Integral) and not isinstance(rows, bool)
        asked.append(int(rows) if whole else type(rows).__name__)
        if len(asked) > 3 * ALL_ROWS:  # an endless loop
            raise ValueError(f"step was called {len(asked)} times")
        if 0 < case["breaks_at"] <= len(asked):
            raise RuntimeError(BROKEN)
        if not whole or not 1 <= rows <= ALL_ROWS:
            raise ValueError(f"step({rows!r}): give a whole number of rows from 1 to {ALL_ROWS}")
        if rows > case["fit"]:
            raise torch.OutOfMemoryError(f"CUDA out of memory, with {rows} rows")

    return step


def _error_of(work: Callable[[], object]) -> str:
    """Return the class and the text of the error that the work raises, or ""."""
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _rows_text(rows: int) -> str:
    """Return words for a message that say how many rows fit."""
    if rows == 0:
        return "not even one row fits"
    if rows == 1:
        return "1 row fits"
    return f"{rows} rows fit"


def judge_most(found: Plain, cases: Plain) -> Verdict:
    for got, case in zip(found, cases, strict=True):
        if case["breaks_at"]:
            if got["error"] != BROKEN_ERROR or len(got["asked"]) > case["breaks_at"]:
                return not_yet(
                    f"call {case['breaks_at']} of step raised a RuntimeError that has nothing to "
                    "do with memory, and your function caught it. Which errors should it catch?"
                )
            continue
        if isinstance(got["answer"], str):
            return wrong_type(got["answer"], "a number of rows")
        if len(got["asked"]) > CALLS:
            return not_yet(
                f"you called step {len(got['asked'])} times; {CALLS} times are allowed. "
                "How can one call halve what is left to search?"
            )
        if got["answer"] != case["fit"]:
            tried = ", ".join(map(str, got["asked"])) or "nothing"
            return not_yet(
                f"{_rows_text(case['fit'])}. You said {got['answer']:g}. You tried {tried}."
            )
    return right("Few steps, and no row is wasted.")


# 09.5: a step that fits

WIDE = 32


def draw_fitting(generator: random.Random) -> Plain:
    """Draw a batch and a limit for each case. Halves of odd numbers are rounded up.

    `fails` says what raises the error: the forward pass, the backward pass or the optimizer's step.
    """

    def case(halvings: int, fails: str) -> Plain:
        batch = generator.randint(50, 90)
        rows = batch
        for _ in range(halvings):
            rows = (rows + 1) // 2
        seed, old = generator.randrange(1 << 30), generator.uniform(0.5, 1.0)
        return {"seed": seed, "batch": batch, "limit": rows, "fails": fails, "old": old}

    some = [case(0, "forward"), case(2, "forward"), case(1, "backward"), case(3, "backward")]
    one_row = case(0, "forward") | {"limit": 1}
    none = [case(0, fails) | {"limit": 0} for fails in ("forward", "backward")]
    broken = case(1, "forward") | {"fails": "broken"}
    return [*some, one_row, *none, broken, case(0, "step")]


class _Limited(torch.autograd.Function):
    """Autograd function that returns its input, and whose backward pass may fail.

    It raises an error if there are too many rows.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, most: int) -> torch.Tensor:
        ctx.most = most
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        [gradient] = gradients
        if len(gradient) > ctx.most:
            raise torch.OutOfMemoryError("CUDA out of memory, in the backward pass")
        return gradient, None


class _LimitedLayer(nn.Module):
    """Layer between two others that runs out of memory if it gets too many rows."""

    def __init__(self, case: Plain) -> None:
        super().__init__()
        self.case = case

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.case["fails"] == "broken":
            raise RuntimeError(BROKEN)
        if self.case["fails"] == "forward" and len(x) > self.case["limit"]:
            raise torch.OutOfMemoryError("CUDA out of memory, in the forward pass")
        if self.case["fails"] == "backward":
            most = self.case["limit"]
        else:
            most = len(x)
        return _Limited.apply(x, most)


def _fitting_model(
    case: Plain, device: str
) -> tuple[nn.Sequential, Any, torch.Tensor, torch.Tensor]:
    """Return the model, its optimizer and the batch.

    The optimizer has a state from a step before, and the gradients of that step are still there.
    """
    draws = torch.Generator().manual_seed(case["seed"])
    x = torch.randn(case["batch"], FEATURES, generator=draws)
    y = (x[:, 0] + torch.linspace(-2, 2, case["batch"]) > 0).long()
    layers = [nn.Linear(FEATURES, WIDE), _LimitedLayer(case), nn.Tanh(), nn.Linear(WIDE, 2)]
    model = nn.Sequential(*layers)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draws) / 4)
    model = model.to(device)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, case["old"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    optimizer.step()
    return model, optimizer, x.to(device), y.to(device)


def expect_fitting(cases: Plain) -> Plain:
    """Return the expected weights after a step on the whole batch, and the weights before it."""
    expected = []
    for case in cases:
        whole = case | {"fails": "nothing"}
        model, optimizer, x, y = _fitting_model(whole, "cpu")
        before = [_values(parameter) for parameter in model.parameters()]
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        after = [_values(parameter) for parameter in model.parameters()]
        expected.append({"before": before, "after": after})
    return expected


def observe_fitting(step_that_fits: Any, cases: Plain) -> Plain:
    return [_fitted(step_that_fits, case) for case in cases]


def _fitted(step_that_fits: Any, case: Plain) -> Plain:
    """Run the answer on one case, and return what it did."""
    model, optimizer, x, y = _fitting_model(case, DEVICE)
    seen: list[int] = []
    alive: list[int] = []  # graphs at the start of each forward pass
    steps: list[int] = []  # forward passes before each step of the optimizer
    graphs = Graphs()

    def watch(module: nn.Module, given: Any) -> None:
        seen.append(len(given[0]))
        alive.append(graphs.alive)
        if len(seen) > 50 * case["batch"]:
            raise ValueError(f"the model was called {len(seen)} times")

    def count(*_: Any) -> None:
        steps.append(len(seen))
        if case["fails"] == "step":
            raise torch.OutOfMemoryError("CUDA out of memory, in the optimizer's step")

    model[0].register_forward_pre_hook(watch)
    model[0].register_forward_hook(graphs.mark)
    optimizer.register_step_pre_hook(count)
    answer, error = None, ""
    if _has_result(case):
        with during(f"{case['batch']} rows, of which {case['limit']} fit at once"):
            answer = step_that_fits(model, optimizer, x, y)
    else:
        error = _error_of(lambda: step_that_fits(model, optimizer, x, y))
    weights = [_values(parameter) for parameter in model.parameters()]
    found = {"answer": number_or_type(answer), "error": error, "weights": weights}
    return found | {"seen": seen, "alive": alive, "steps": steps}


def _has_result(case: Plain) -> bool:
    """Return whether a step with fewer rows succeeds, instead of raising an error in any case."""
    return case["limit"] > 0 and case["fails"] in ("forward", "backward")


def judge_fitting(found: Plain, cases: Plain, expected: Plain) -> Verdict:
    for got, case, weights in zip(found, cases, expected, strict=True):
        if _has_result(case):
            verdict = _judge_step(got, case, weights)
        else:
            verdict = _judge_failure(got, case, weights)
        if not verdict.passed:
            return verdict
    return right("The batch is whole, and the micro-batches fit.")


def _judge_failure(got: Plain, case: Plain, weights: Plain) -> Verdict:
    """Judge a case in which the step fails with any number of rows.

    `got` is the observation, and `weights` are the expected weights.
    """
    if case["fails"] == "broken":
        if got["error"] != BROKEN_ERROR or len(got["seen"]) > 1:
            return not_yet(
                "the model raised a RuntimeError that has nothing to do with memory, and your "
                "function caught it. Which errors should it catch?"
            )
    elif case["fails"] == "step":
        if not got["error"].startswith("OutOfMemoryError") or len(got["steps"]) > 1:
            return not_yet(
                "optimizer.step() raised a torch.OutOfMemoryError, and your function caught it. "
                "Some weights may have changed by then, so the batch must not be trained again."
            )
    elif not got["error"].startswith("OutOfMemoryError"):
        raised = got["error"] or "no error"
        return not_yet(
            f"not even one row fits, and your function raised {raised}. "
            "Expected the torch.OutOfMemoryError."
        )
    if not near(got["weights"], weights["before"], RELATIVE, ABSOLUTE):
        return not_yet("the step failed, but the weights have changed.")
    return right("")


def _judge_step(got: Plain, case: Plain, weights: Plain) -> Verdict:
    """Judge a case in which the step succeeds with fewer rows per micro-batch.

    `got` is the observation, and `weights` are the expected weights.
    """
    setting = f"{case['batch']} rows, of which {case['limit']} fit at once"
    if isinstance(got["answer"], str):
        return wrong_type(got["answer"], "the rows of a micro-batch")
    if got["seen"][:1] != [case["batch"]]:
        return not_yet(f"with {setting}: your function did not try all rows at once first.")
    if not near(got["weights"], weights["after"], RELATIVE, ABSOLUTE):
        if near(got["weights"], weights["before"], RELATIVE, ABSOLUTE):
            return not_yet(f"with {setting}: the weights have not changed.")
        return not_yet(
            f"with {setting}: these are not the weights of a step on the whole batch. "
            "Which gradients are there when an attempt begins, and how much does each micro-batch "
            "count?"
        )
    expected, sizes = _halves(case["batch"], case["limit"]), list(dict.fromkeys(got["seen"]))
    left_over = {case["batch"] % rows for rows in expected}
    if [size for size in sizes if size in expected or size not in left_over] != expected:
        return not_yet(
            f"with {setting}: expected attempts with {', '.join(map(str, expected))} rows per "
            f"micro-batch. Your micro-batches had {', '.join(map(str, sizes))} rows."
        )
    if got["answer"] != case["limit"]:
        return not_yet(f"with {setting}: you returned {got['answer']:g}. Expected {case['limit']}.")
    if max(got["alive"]) > 1:
        return not_yet(
            f"with {setting}: when a forward pass began, {max(got['alive'])} graphs were still "
            "there. Each keeps its activations. Inside `except`, the error still holds the failed "
            "attempt."
        )
    followed = zip(got["seen"], got["alive"][1:], strict=False)  # the last pass has no successor
    if any(graphs for rows, graphs in followed if rows > case["limit"]):
        return not_yet(
            f"with {setting}: the graph of a failed attempt was still there when the next attempt "
            "began. Variables such as the loss hold it, and so does the error inside `except`."
        )
    return right("")


def _halves(rows: int, last: int) -> list[int]:
    """Return the rows per micro-batch that are tried in turn, from all `rows` down to `last`."""
    tried = [rows]
    while tried[-1] > last:
        tried.append((tried[-1] + 1) // 2)
    return tried


CHECKS = [
    Check(
        "09.1",
        draw_models,
        observe_bytes,
        judge_bytes,
        section="The bytes at the peak",
        expect=expect_bytes,
        alters=("values",),  # a step may be tried
    ),
    Check("09.2", draw_limits, observe_most, judge_most, section="Fewer rows"),
    Check("09.3", draw_blocks, observe_checkpoints, judge_checkpoints, section="Checkpoints"),
    Check(
        "09.4",
        draw_batch,
        observe_accumulate,
        judge_accumulate,
        section="Micro-batches",
        expect=expect_accumulate,
    ),
    Check(
        "09.5",
        draw_fitting,
        observe_fitting,
        judge_fitting,
        section="Build it: a step that fits",
        expect=expect_fitting,
        alters=("values",),
    ),
]
