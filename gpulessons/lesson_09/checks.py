"""Checks of lesson 09, fitting in memory."""

import copy
import random
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gpulessons.autograd_graphs import Graphs
from gputrace import units
from labkit.checks.checking import Check, Plain, Verdict, describe, during, not_yet, number_or_type, right, wrong_type
from labkit.checks.comparing import near

DEVICE = "cuda:0"
RELATIVE, ABSOLUTE = 1e-4, 1e-5  # how close numbers must be: closer than float16 rounds

# 09.1: what is there besides activations

OPTIMIZERS = {"SGD": {}, "momentum": {"momentum": 0.9}, "Adam": {}}


def draw_models(generator: random.Random) -> Plain:
    """For each optimizer a model with a frozen layer, a layer in half precision, a weight that two layers share, and buffers."""
    return [{"optimizer": name, "sizes": [generator.randint(3, 40) for _ in range(4)]} for name in OPTIMIZERS]


def observe_bytes(training_bytes: Any, models: Plain) -> Plain:
    found = []
    for item in models:
        model = _mixed_model(item["sizes"], DEVICE)
        with during(f"a model and {item['optimizer']!r}"):
            answer = training_bytes(model, item["optimizer"])
        found.append(number_or_type(answer))
    return found


def expect_bytes(models: Plain) -> Plain:
    return [_bytes_of_training(_mixed_model(item["sizes"], "cpu"), item["optimizer"]) for item in models]


def _mixed_model(sizes: list[int], device: str) -> nn.Sequential:
    first, second, third, fourth = sizes
    layers = [nn.Linear(first, second), nn.BatchNorm1d(second), nn.Linear(second, third), nn.Linear(third, fourth).half()]
    model = nn.Sequential(*layers, nn.Linear(first, second))
    model[4].weight = model[0].weight
    model[2].requires_grad_(False)
    model.register_buffer("scale", torch.ones(first), persistent=False)  # no part of the state_dict
    return model.to(device)


def _bytes_of_training(model: nn.Sequential, optimizer: str) -> dict[str, int]:
    """What is really there after a step: bytes of parameters and buffers, of gradients, of the state; not the counters of Adam."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    make: Any = torch.optim.Adam if optimizer == "Adam" else torch.optim.SGD
    chosen = make(trained, lr=0.1, **OPTIMIZERS[optimizer])
    chosen.step()
    slots = [value for slot in chosen.state.values() for value in slot.values() if isinstance(value, torch.Tensor) and value.dim()]
    kept = [*model.parameters(), *model.buffers()]
    parts: dict[str, list[Any]] = {"parameters and buffers": kept, "gradients": [p.grad for p in trained], "optimizer state": slots}
    return {name: sum(tensor.nbytes for tensor in tensors) for name, tensors in parts.items()}


def judge_bytes(observed: Plain, models: Plain, expected: Plain) -> Verdict:
    for answer, each, item in zip(observed, expected, models, strict=True):
        due = sum(each.values())
        if isinstance(answer, str):
            return wrong_type(answer, "a number")
        if answer != due:
            parts = ", ".join(f"{name} {nbytes} B" for name, nbytes in each.items())
            hint = "A layer is frozen, one is in half precision, two share a weight, and some buffers are never saved."
            return not_yet(f"with {item['optimizer']} there are {due} B: {parts}. You said {answer:.0f} B. {hint}")
    return right("What is left to know is the activations.")


# 09.2: micro-batches

FEATURES, HIDDEN = 8, 256  # so that a graph of some rows is much larger than the parameters and their gradients


def draw_batch(generator: random.Random) -> Plain:
    """A batch that the micro-batches do not divide; of its classes, the last rows have others than the first."""
    rows = generator.randint(100, 200)
    return {
        "seed": generator.randrange(1 << 30),
        "rows": rows,
        "batch": 5 * rows + generator.randint(1, rows // 3),
        "old": generator.uniform(0.5, 1.0),
    }


def expect_accumulate(inputs: Plain) -> Plain:
    """The gradients of the whole batch at once."""
    model, x, y = _batch_and_model(inputs, "cpu")
    F.cross_entropy(model(x), y).backward()
    return [_values(parameter.grad) for parameter in model.parameters()]


def _batch_and_model(inputs: Plain, device: str) -> tuple[nn.Sequential, torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(inputs["seed"])
    x = torch.randn(inputs["batch"], FEATURES, generator=draws)
    y = (x[:, 0] + torch.linspace(-2, 2, inputs["batch"]) > 0).long()
    model = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 2)).to(device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draws) / 4)
            parameter.grad = torch.full_like(parameter, inputs["old"])
    return model, x.to(device), y.to(device)


def observe_accumulate(accumulate: Any, inputs: Plain) -> Plain:
    model, x, y = _batch_and_model(inputs, DEVICE)
    _take_workspaces()
    before = [_values(parameter) for parameter in model.parameters()]
    seen: list[int] = []
    held: list[int] = []  # bytes, when each forward began
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


def judge_accumulate(observed: Plain, inputs: Plain, due: Plain) -> Verdict:
    seen, rows = observed["seen"], inputs["rows"]
    if not seen or max(seen) > rows:
        return not_yet(f"the model met {max(seen, default=0)} rows at once; at most {rows} were allowed.")
    if sum(seen) < inputs["batch"]:
        return not_yet(f"the model met {sum(seen)} of {inputs['batch']} rows.")
    if not near(observed["got"], due, RELATIVE, ABSOLUTE):
        hint = f"The parts have {seen[0]} rows, and the last {seen[-1]}. What was in .grad before stays in the sum."
        return not_yet(f"these are not the gradients of the whole batch. {hint}")
    least = -(-inputs["batch"] // rows)
    if len(seen) > 2 * least:
        return not_yet(f"{len(seen)} micro-batches, where {least} of {rows} rows would do. Is {rows} a size, or a number?")
    if observed["kept"] > rows * HIDDEN * 4 / 2:  # half of what one layer keeps of a full part
        kept = units.byte_text(observed["kept"])
        return not_yet(f"when a forward began, {kept} of earlier micro-batches were still there. What keeps their graphs?")
    if observed["graphs"] > 1:  # that of the one before goes with the next loss
        return not_yet(f"when a forward began, {observed['graphs']} graphs were still there, if without their tensors. What keeps them?")
    if not observed["unchanged"]:
        return not_yet("the parameters have changed. Only the gradients should change.")
    return right(f"{len(seen)} micro-batches, the gradients of one batch.")


def _take_workspaces() -> None:
    """cuBLAS takes its workspaces at its first products, of this thread and of the backward's, and keeps them: no answer's bytes."""
    layer = nn.Linear(8, 8, device=DEVICE)  # of two, the backward computes the first one's forward again
    checkpoint(nn.Sequential(layer, layer), torch.ones(8, 8, device=DEVICE), use_reentrant=False).sum().backward()


def _values(tensor: Any) -> Plain:
    return None if tensor is None else tensor.detach().float().cpu().flatten().tolist()


# 09.3: a prediction that keeps nothing

MODES = ("training", "evaluation", "training, with a frozen BatchNorm", "evaluation, with an active Dropout")


def draw_prediction(generator: random.Random) -> Plain:
    """A model in each mode, in any order, two of another dtype. No rest of one row: in training mode BatchNorm would refuse it."""
    rows = generator.randint(100, 200)
    shape = {"rows": rows, "batch": 8 * rows + generator.randint(2, 50)}
    modes = zip(generator.sample(MODES, k=len(MODES)), ("float32", "float64") * 2, strict=True)
    return [{"seed": generator.randrange(1 << 30), **shape, "mode": mode, "dtype": dtype} for mode, dtype in modes]


def observe_predict(predict: Any, tries: Plain) -> Plain:
    return [_prediction(predict, inputs) for inputs in tries]


def _prediction(predict: Any, inputs: Plain) -> Plain:
    draws, dtype = torch.Generator().manual_seed(inputs["seed"]), getattr(torch, inputs["dtype"])
    norm, dropout = nn.BatchNorm1d(256), nn.Dropout(0.5)
    model = nn.Sequential(nn.Linear(32, 256), nn.Sequential(norm, nn.ReLU(), dropout), nn.Linear(256, 4)).to(DEVICE, dtype)
    x = torch.randn(inputs["batch"], 32, generator=draws).to(DEVICE, dtype)
    statistics = _values(nn.init.normal_(norm.get_buffer("running_mean")))
    model.eval()[0].get_parameter("bias").requires_grad_(False)  # an answer that freezes all would thaw it afterwards
    twin = copy.deepcopy(model)  # which predicts when the answer has
    with torch.no_grad():
        model(x[: inputs["rows"]])
    model.train(inputs["mode"].startswith("training"))
    norm.train(inputs["mode"] == "training")
    dropout.train(inputs["mode"] != "evaluation")
    forwards: list[tuple[int, bool]] = []
    handle = model[0].register_forward_hook(lambda module, given, output: forwards.append((len(output), output.requires_grad)))
    torch.cuda.reset_peak_memory_stats(DEVICE)
    held = torch.cuda.memory_allocated(DEVICE)
    try:
        with during(f"a model in {inputs['mode']} mode"):
            result = predict(model, x, inputs["rows"])
    finally:
        handle.remove()
    if not isinstance(result, torch.Tensor):
        return {"type": type(result).__name__}
    peak = torch.cuda.max_memory_allocated(DEVICE) - held
    with torch.no_grad():
        due = twin(x)
    return {
        **describe(result),
        "due": _values(due),
        "peak": peak,
        "allowed": 3 * due.nbytes + 3 * inputs["rows"] * 256 * due.element_size() + 2 * sum(p.nbytes for p in model.parameters()),  # a copy
        "met": [rows for rows, _ in forwards],
        "graph": result.requires_grad or any(graph for _, graph in forwards),
        "inference": result.is_inference(),
        "statistics": _values(norm.running_mean) == statistics,
    }


def judge_predict(found: Plain, tries: Plain) -> Verdict:
    verdicts = [_judge_prediction(observed, inputs) for observed, inputs in zip(found, tries, strict=True)]
    return next((verdict for verdict in verdicts if not verdict.passed), verdicts[0])


def _judge_prediction(observed: Plain, inputs: Plain) -> Verdict:
    if observed["type"] != "Tensor":
        return wrong_type(observed["type"], "a tensor")
    if not observed["statistics"]:
        return not_yet("BatchNorm's averages have changed: it learned from rows that it should only predict. In which mode was the model?")
    if observed["shape"] != [inputs["batch"], 4] or not near(observed["values"], observed["due"], RELATIVE, ABSOLUTE):
        return not_yet("these are not the model's predictions in evaluation mode, all of them in order.")
    if not observed["device"].startswith("cuda"):
        return not_yet(f"the predictions are on {observed['device']}. They should stay on the GPU.")
    if observed["graph"]:
        return not_yet("the model made a graph, and a graph keeps all activations until it is gone.")
    if not observed["peak"] <= observed["allowed"]:
        found, allowed = units.byte_text(observed["peak"]), units.byte_text(observed["allowed"])
        return not_yet(f"at its peak it took {found} more; micro-batches of {inputs['rows']} rows need less than {allowed}.")
    if max(observed["met"], default=0) > inputs["rows"]:
        return not_yet(f"the model met {max(observed['met'])} rows at once; {inputs['rows']} were asked for.")
    if len(observed["met"]) > 2 * -(-inputs["batch"] // inputs["rows"]):
        return not_yet(f"the model was called {len(observed['met'])} times. Is {inputs['rows']} a size, or a number?")
    if observed["dtype"] != f"torch.{inputs['dtype']}":
        return not_yet(f"the model answers in torch.{inputs['dtype']}; your predictions are {observed['dtype']}.")
    if observed["inference"]:
        return not_yet("the predictions are inference tensors, which no later training may use. What is less strict than inference_mode?")
    return right(f"At most {units.byte_text(observed['peak'])} more.")


# 09.4: checkpoints

WIDTH, ROWS = 64, 1024
KEPT = ROWS * WIDTH * 4  # bytes of one block's input


def draw_blocks(generator: random.Random) -> Plain:
    """A number of blocks that leaves a rest, and for which `every` parts have another size than parts of `every` blocks."""
    every = generator.randint(2, 4)
    counts = [blocks for blocks in range(2 * every + 1, 5 * every) if blocks % every and -(-blocks // every) != every]
    return {"seed": generator.randrange(1 << 30), "every": every, "blocks": generator.choice(counts)}


def observe_checkpoints(run: Any, inputs: Plain) -> Plain:
    torch.manual_seed(inputs["seed"])
    torch.cuda.manual_seed_all(inputs["seed"])
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.GELU(), nn.Dropout(0.3), nn.Tanh()) for _ in range(inputs["blocks"])]
    for block in blocks:
        nn.init.normal_(block[0].get_parameter("weight"), std=2 / WIDTH**0.5)  # so that many blocks leave something of x
    x = torch.randn(ROWS, WIDTH)
    model, x = nn.ModuleList(blocks).to(DEVICE), x.to(DEVICE).requires_grad_()
    _take_workspaces()
    twin = copy.deepcopy(model)  # which the answer cannot change
    answers = [_pass(run, model, given, inputs) for given in (x.detach(), x)]  # a batch that needs no gradient, and one that does
    return {"expected": _pass(lambda blocks, x, every: nn.Sequential(*blocks)(x), twin, x, inputs), "answers": answers}


def _pass(run: Any, model: nn.ModuleList, x: torch.Tensor, inputs: Plain) -> Plain:
    """What a forward returns and keeps, which blocks its backward runs again, and the gradients that come of it."""
    calls: list[int] = []
    handles = [block.register_forward_pre_hook(lambda *_, index=index: calls.append(index)) for index, block in enumerate(model)]
    torch.cuda.manual_seed_all(inputs["seed"])
    leaves = [*([x] if x.requires_grad else []), *model.parameters()]
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
    return {"type": "Tensor", "result": _values(result), "kept": kept, "again": calls[forward:], "gradients": gradients}


def judge_checkpoints(observed: Plain, inputs: Plain) -> Verdict:
    expected, every = observed["expected"], inputs["every"]
    due = [list(range(inputs["blocks"]))[first : first + every] for first in range(0, inputs["blocks"], every)][::-1]
    allowed = (len(due) + 1) * KEPT  # inputs of the parts but the first, the result, and a little
    without = units.byte_text(expected["kept"])
    for answer in observed["answers"]:
        if answer["type"] != "Tensor":
            return wrong_type(answer["type"], "a tensor")
        if not near(answer["result"], expected["result"], RELATIVE, ABSOLUTE):
            return not_yet("this is not what the blocks make of x, one after the other.")
        if answer["gradients"] is None:
            return not_yet("the result has no gradient, though the blocks' weights are trained. What if x itself needs none?")
        if not near(answer["gradients"], expected["gradients"][-len(answer["gradients"]) :], RELATIVE, ABSOLUTE):
            return not_yet("the gradients are not those of the blocks without checkpoints.")
        kept = units.byte_text(answer["kept"])
        if answer["kept"] > allowed:
            less = f"{len(due)} checkpoints need less than {units.byte_text(allowed)}"
            return not_yet(f"{kept} were kept (without checkpoints {without}); {less}.")
        if answer["again"] != [index for part in due for index in part]:
            wanted = f"with a checkpoint for every {every} of {inputs['blocks']} blocks, the backward computes {due} again, part by part"
            return not_yet(f"{wanted}; it computed {answer['again']}, and kept {kept}. The longest part decides about the peak.")
    return right(f"{kept} kept instead of {without}.")


# 09.5: the largest batch

CALLS = 3
MEMORY = 128 << 30  # bytes of the GPU on which steps are measured: more than any limit


def draw_steps(generator: random.Random) -> Plain:
    """Fixed bytes, bytes a row, and a limit: a little above many rows, far above, on the byte; for one row, none, nothing."""

    def case(rows: float) -> Plain:
        fixed, row = generator.randint(1 << 26, 1 << 32), generator.randint(1 << 10, 1 << 24)
        return {"fixed": fixed, "row": row, "limit": max(fixed // 2, fixed + int(row * rows))}

    above = (generator.uniform(0.1, 0.4), generator.uniform(0.6, 0.9), 0)
    return [*(case(generator.randint(2, 5000) + rest) for rest in above), case(1), case(1.5), case(0.5), case(-1e9)]


def observe_largest(most_rows: Any, cases: Plain) -> Plain:
    found = []
    for case in cases:
        asked: list[int] = []

        def peak(rows: int, case: Plain = case, asked: list[int] = asked) -> int:
            asked.append(rows)
            nbytes = case["fixed"] + case["row"] * rows
            if nbytes > MEMORY:
                needed = f"a step of {rows:,} rows needs {nbytes >> 30:,} GiB"
                there = f"the GPU has {MEMORY >> 30} GiB"
                raise torch.OutOfMemoryError(f"CUDA out of memory: {needed}, and {there}")
            return nbytes

        with during(f"a limit of {case['limit']} bytes"):
            answer = most_rows(peak, case["limit"])
        found.append({"answer": number_or_type(answer), "asked": asked})
    return found


def judge_largest(found: Plain, cases: Plain) -> Verdict:
    for got, case in zip(found, cases, strict=True):
        if isinstance(got["answer"], str):
            return wrong_type(got["answer"], "a number of rows")
        due = max(0, (case["limit"] - case["fixed"]) // case["row"])
        line = f"a step takes {case['fixed']} B and {case['row']} B a row, the limit is {case['limit']} B"
        if len(got["asked"]) > CALLS:
            return not_yet(f"you measured {len(got['asked'])} times; a straight line needs fewer than that ({CALLS} are allowed).")
        if any(rows < 1 for rows in got["asked"]):
            return not_yet("a step with no row at all cannot be measured.")
        if got["answer"] != due:
            fit = "row fits" if due == 1 else "rows fit"
            said = f"{got['answer']:.9g}" if isinstance(got["answer"], float) else got["answer"]
            reason = _why_not(got["answer"], due, case)
            return not_yet(f"{line}: {due} {fit}, you said {said}. {reason}")
    return right("Two points make a line.")


def _why_not(answer: float, due: int, case: Plain) -> str:
    """Say what is wrong with this number of rows."""
    if answer != answer or not float(answer).is_integer():
        return "A batch has a whole number of rows."
    if due == 0:
        return "Not even one row fits."
    fitting = case["fixed"] + case["row"] * due
    if answer == due + 1:
        too_large = fitting + case["row"]
        return f"A step of {due + 1} rows takes {too_large} B, which is above the limit."
    if answer == due - 1 and fitting == case["limit"]:
        return f"A step of {due} rows takes exactly the limit, and the limit may be reached."
    if answer == due - 1:
        return f"A step of {due} rows takes {fitting} B, which is within the limit."
    return "What does a step take that does not grow with the rows?"


CHECKS = [
    Check(
        "09.1", draw_models, observe_bytes, judge_bytes, section="Where a step's memory goes", expect=expect_bytes, alters=("values",)
    ),  # a step may be tried
    Check("09.2", draw_batch, observe_accumulate, judge_accumulate, section="Smaller parts of a batch", expect=expect_accumulate),
    Check("09.3", draw_prediction, observe_predict, judge_predict, section="What you need not keep"),
    Check("09.4", draw_blocks, observe_checkpoints, judge_checkpoints, section="Memory for time"),
    Check("09.5", draw_steps, observe_largest, judge_largest, section="Will it fit?"),
]
