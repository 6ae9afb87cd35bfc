"""Checks of lesson 13, the articles on trial."""

import calendar
import contextlib
import io
import random
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from gpulessons.autograd_graphs import Graphs
from gpulessons.lesson_13.deprecated import deprecated_calls
from labkit.checks.checking import Check, Plain, Verdict, describe, during, not_yet, number, number_or_type, right, wrong_type
from labkit.checks.comparing import near

# 13.1: a tensor like another

DTYPES = {"torch.float32": torch.float32, "torch.float16": torch.float16, "torch.int64": torch.int64}
PLACES = ("cuda:0", "cuda:1", "cpu")
CLOSE = 1e-5  # closer than float16 rounds


def draw_tensors(generator: random.Random) -> Plain:
    """Tensors of each place, of several types and shapes; one has no dimensions."""
    places = [*PLACES, generator.choice(PLACES)]
    dtypes = [*generator.sample(list(DTYPES), len(DTYPES)), generator.choice(list(DTYPES))]
    shapes = [[generator.randint(2, 9) for _ in range(dimensions)] for dimensions in generator.sample(range(4), 4)]
    return [{"device": d, "dtype": t, "shape": s} for d, t, s in zip(places, dtypes, shapes, strict=True)]


def observe_zeros(zeros_beside: Any, cases: Plain) -> Plain:
    """What the function made beside each tensor, of numbers that no arithmetic makes 0, and whether that still holds them.

    Whoever writes to what was made changes nothing else: neither another number in it, nor what is made the next time.
    """
    observations = []
    for case in cases:
        dtype = DTYPES[case["dtype"]]
        t = torch.full(case["shape"], torch.inf if dtype.is_floating_point else 1, dtype=dtype, device=case["device"])
        before = t.clone()
        with torch.cuda.device(_elsewhere(case)), during(f"a tensor of {case['dtype']}, shape {case['shape']}, on {case['device']}"):
            made = zeros_beside(t)
            observed = {"made": describe(made), "kept": torch.equal(t, before)}
            if observed["made"]["type"] == "Tensor":
                with contextlib.suppress(RuntimeError):  # several elements that are one number in memory
                    made += 1
                observed["written"], observed["next"] = describe(made)["values"], describe(zeros_beside(t))["values"]
        observations.append(observed)
    return observations


def _elsewhere(case: Plain) -> int:
    """The current device while the function runs: not the tensor's own."""
    return 0 if case["device"] == "cuda:1" else 1


def judge_zeros(observations: Plain, cases: Plain) -> Verdict:
    for observed, case in zip(observations, cases, strict=True):
        made = observed["made"]
        if made["type"] != "Tensor":
            return wrong_type(made["type"], "a tensor")
        if not observed["kept"]:
            return not_yet("the tensor that you were given has changed. Make a new one beside it.")
        for what in ("device", "dtype", "shape"):
            if made[what] != case[what]:
                return not_yet(f"beside a tensor with {what} {case[what]} you made one with {what} {made[what]}.")
        if any(made["values"]):
            return not_yet("not all of its numbers are 0. The tensor that you were given may hold inf and nan.")
        if not all(observed["written"]):
            return not_yet("nobody can add 1 to what you made. Has each of its elements a place of its own in memory?")
        if any(observed["next"]):
            return not_yet("what your function makes at its next call is no longer 0 when the first tensor was written to. Make a new one.")
    return right("A tensor tells its own device, type and shape.")


# 13.2: memory, by today's names

MIB = 1 << 20
FIGURES = ("allocated", "reserved", "max_allocated", "max_reserved")


def memory_report(device):  # what the exercise hands out; without types, as in a notebook
    """Bytes of a device's memory: allocated and reserved, now and at most."""
    return {
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_cached(),
        "max_allocated": torch.cuda.max_memory_allocated(),
        "max_reserved": torch.cuda.max_memory_cached(),
    }


def draw_sizes(generator: random.Random) -> Plain:
    """For each device, MiB that stay allocated, that are cached, and that were given back: one has more of each, so no sums agree."""
    ranges = (range(10, 20, 2), range(20, 40, 2), range(40, 60, 2))
    less, more = zip(*(sorted(generator.sample(sizes, k=2)) for sizes in ranges), strict=True)
    return generator.sample([list(less), list(more)], k=2)


def observe_report(report: Any, sizes: Plain) -> Plain:
    """For each device what the function said, what is so, and the warnings."""
    held = [_fill(device, *mebibytes) for device, mebibytes in enumerate(sizes)]
    for device, (_, cached, _) in enumerate(sizes):
        _take(device, cached)  # and let go of it at once
    truths = [_truth(device) for device in range(len(sizes))]
    observations = []
    for device, truth in enumerate(truths):
        with torch.cuda.device(1 - device), deprecated_calls() as warned, during(f"device {device}"):
            said = report(torch.device("cuda", device))
        said = {str(name): number(value) for name, value in said.items()} if isinstance(said, dict) else type(said).__name__
        observations.append({"said": said, "truth": truth, "after": _truth(device), "warned": warned})
    del held
    return observations


def _fill(device: int, kept: int, cached: int, returned: int) -> torch.Tensor:
    """Take MiB that stay, and before, some that do not, so that no two of a device's four figures are the same."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    stays = _take(device, kept)
    _take(device, cached)
    _take(device, returned)  # larger than what is cached, so it is taken from the device
    torch.cuda.empty_cache()
    return stays


def _take(device: int, mebibytes: int) -> torch.Tensor:
    return torch.empty(mebibytes * MIB - 1, dtype=torch.uint8, device=f"cuda:{device}")  # allocated is more than requested


def _truth(device: int) -> dict[str, int]:
    statistics = torch.cuda.memory_stats(device)
    return {
        "allocated": statistics["allocated_bytes.all.current"],
        "reserved": statistics["reserved_bytes.all.current"],
        "max_allocated": statistics["allocated_bytes.all.peak"],
        "max_reserved": statistics["reserved_bytes.all.peak"],
        "requests": statistics["allocation.all.allocated"],
    }


def judge_report(observations: Plain, sizes: Plain) -> Verdict:
    for device, observed in enumerate(observations):
        said, truth = observed["said"], observed["truth"]
        if isinstance(said, str):
            return wrong_type(said, "a dict")
        if observed["warned"]:
            return not_yet(f"PyTorch warns, though you may have silenced it: {observed['warned'][0]}.")
        numbers = [name for name in FIGURES if said.get(name) is not None]
        if len(numbers) < len(FIGURES):
            return not_yet(f"expected numbers of bytes for {', '.join(FIGURES)}; yours are for {', '.join(numbers) or 'nothing'}.")
        for name in FIGURES:
            if said[name] != truth[name]:
                return not_yet(f"on cuda:{device}, {name} is {truth[name]:,} bytes; you said {said[name]:,}.")
        if observed["after"] != truth:
            return not_yet(f"asking has changed the figures of cuda:{device}. What empties the cache, resets the peaks, or takes memory?")
    return right("Of the device that was asked for, and without a warning.")


# 13.3: the article's training, mended


def train(model, batches):  # what the exercise hands out
    """Train a model from the CPU on the GPU, a step a batch of CPU tensors; returns the mean loss as a number."""
    criterion = nn.MSELoss().to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01).to("cuda")
    model.to("cuda")
    total_loss = 0
    for x, y in batches:
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        total_loss += loss
    return total_loss / len(batches)


SCALE = 1 / 32


def draw_training(generator: random.Random) -> Plain:
    """Batches of one size, but for the last, which is smaller."""
    rows = [16] * generator.randint(3, 7) + [generator.randint(4, 8)]
    return {"seed": generator.randrange(1 << 30), "rows": rows, "features": generator.randint(3, 8)}


def _to_train(inputs: Plain) -> tuple[nn.Linear, list[tuple[torch.Tensor, torch.Tensor]]]:
    maker = torch.Generator().manual_seed(inputs["seed"])
    model = nn.Linear(inputs["features"], 1)
    with torch.no_grad():
        model.weight.copy_(SCALE * torch.randn(model.weight.shape, generator=maker))
        model.bias.copy_(SCALE * torch.randn(1, generator=maker))
    # The targets grow, so that no single loss is near the mean of all, which is small, so that nobody rounds it unseen.
    batches = [
        (torch.randn(rows, inputs["features"], generator=maker), SCALE * (place + 1) * torch.randn(rows, 1, generator=maker))
        for place, rows in enumerate(inputs["rows"])
    ]
    return model, batches


def expect_training(inputs: Plain) -> Plain:
    """The expected mean loss and parameters, from the same training on the CPU.

    `accumulated` are the parameters if gradients are never cleared.
    """
    accumulated, _ = _trained_on_cpu(inputs, clear=False)
    parameters, losses = _trained_on_cpu(inputs, clear=True)
    return {"loss": sum(losses) / len(losses), "parameters": parameters, "accumulated": accumulated}


def _trained_on_cpu(inputs: Plain, clear: bool) -> tuple[list[float], list[float]]:
    """The parameters after training, and the loss of each batch."""
    model, batches = _to_train(inputs)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.01), []
    for x, y in batches:
        loss = nn.functional.mse_loss(model(x), y)
        if clear:
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return _numbers(model), losses


def observe_training(answer: Any, inputs: Plain) -> Plain:
    """The mean loss and the parameters that the answer came to."""
    model, batches = _to_train(inputs)
    forwards: list[str] = []
    graphs, kept = Graphs(), 0

    def begin(module: nn.Module, given: Any) -> None:
        nonlocal kept
        forwards.append(given[0].device.type)
        kept = max(kept, graphs.alive)

    model.register_forward_pre_hook(begin)
    model.register_forward_hook(graphs.mark)
    with during(f"{len(batches)} batches"):
        loss = answer(model, batches)
    return {
        "loss": number_or_type(loss),
        "kept": kept,
        "forwards": forwards,
        "parameters": _numbers(model),
        "device": str(model.weight.device),
    }


def _numbers(model: nn.Module) -> list[float]:
    return [value for parameter in model.parameters() for value in parameter.detach().cpu().flatten().tolist()]


def judge_training(observed: Plain, inputs: Plain, due: Plain) -> Verdict:
    if isinstance(observed["loss"], str):
        return not_yet(f"expected a number; your function returned {observed['loss']}.")
    if "cpu" in observed["forwards"]:
        return not_yet("the model computed on the CPU. It should train on the GPU.")
    off = _furthest(observed["parameters"], due["parameters"])
    if not off < 1e-3 * SCALE:
        if observed["device"] == "cpu":
            return not_yet("the model that you were given is still on the CPU, and is not trained.")
        hint = "Does every batch make one step of SGD with lr=0.01, and with that batch's gradient only?"
        if _furthest(observed["parameters"], due["accumulated"]) < 1e-3 * SCALE:
            hint = "What do gradients do from one step to the next?"
        return not_yet(f"the model's parameters are off by up to {off:.3g}. {hint}")
    if not abs(observed["loss"] - due["loss"]) < 1e-4 * due["loss"]:
        return not_yet(f"the mean loss is {due['loss']:.5g}; you said {observed['loss']:.5g}.")
    if observed["kept"] > 1:  # that of the step before goes with the next loss
        return not_yet(f"when a forward began, the graphs of {observed['kept']} earlier steps were still there. What keeps them?")
    return right("The model first, then its optimizer; and a number for a loss.")


def _furthest(found: list[float], expected: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(found, expected, strict=True))


# 13.4: a trial of one's own

SNIPPETS = {
    "{name} = {number}": "ok",
    "y = {name} + 1": "NameError",  # unless a snippet before has left its name
    "import colorsys": "ok",
    "colorsys.rgb_to_hsv({number}, 0, 0)": "NameError",
    "for i in range({number}) print(i)": "SyntaxError",
    "torch.cuda.empy_cache()": "AttributeError",
    "torch.ones({number}, device='cuda') + torch.ones({number})": "RuntimeError",
    "torch.ones({number}, device='cuda').numpy()": "TypeError",
    "nn.Linear(2, {number}).cuda()(torch.ones(1, 2).cuda())": "ok",
    "def half(n):\n    return n / 2\n\ndef quarter(n):\n    return half(half(n))\n\nquarter({number})": "ok",  # one uses another
    "try:\n    {number} / 0\nexcept ZeroDivisionError:\n    pass": "ok",
    "class {name}Error(ValueError):\n    pass\n\nraise {name}Error({number})": "{name}Error",
    "numbers = []; numbers[{number}]": "IndexError",
    "raise NotImplementedError({number})": "NotImplementedError",  # a RuntimeError too
    "try:\n    [].pop()\nexcept IndexError as error:\n    raise KeyError({number}) from error": "KeyError",
    "import calendar as n\nn.runs = getattr(n, 'runs', 0) + 1\nif n.runs == 1:\n    raise LookupError({number})": "LookupError",  # once
    "for name in list(globals()):\n    assert name in ('torch', 'nn', 'name') or name.startswith('__')": "ok",
}


def draw_snippets(generator: random.Random) -> Plain:
    """Text and outcome of each, of one twice; what needs a name of another comes after it."""
    drawn: dict[str, Any] = {"name": f"left_{generator.randint(10, 99)}", "number": generator.randint(3, 90)}
    order = generator.sample(range(len(SNIPPETS)), len(SNIPPETS))
    for leaves in (0, 2):
        first, second = sorted((order.index(leaves), order.index(leaves + 1)))
        order[first], order[second] = leaves, leaves + 1
    order.insert(generator.randrange(len(order)), list(SNIPPETS).index("torch.cuda.empy_cache()"))
    return [[text.format(**drawn) for text in list(SNIPPETS.items())[index]] for index in order]


def observe_outcomes(outcomes: Any, snippets: Plain) -> Plain:
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            found = outcomes([text for text, _ in snippets])
    finally:
        vars(calendar).pop("runs", None)
    return [str(outcome) for outcome in found] if isinstance(found, list | tuple) else type(found).__name__


def judge_outcomes(found: Plain, snippets: Plain) -> Verdict:
    if isinstance(found, str):
        return wrong_type(found, "a list")
    if len(found) != len(snippets):
        return not_yet(f"you gave the outcomes of {len(found)} programs; there were {len(snippets)}.")
    for outcome, (text, due) in zip(found, snippets, strict=True):
        if outcome != due:
            unseen = {"NameError", "AssertionError"} & {outcome, due} and due not in outcome
            hint = "Whose names does it see?" if unseen else "The class's name is asked for."
            return not_yet(f"the snippet that begins with `{text.splitlines()[0]}` comes to {due!r}; you said {outcome!r}. {hint}")
    return right("Every snippet in a world of its own, and none that stops the trial.")


# 13.5: a network on two GPUs

HALVES = ["cuda:0"] * 2 + ["cuda:1"] * 2  # where weight and bias of both halves belong


class _CopiesToHost(TorchFunctionMode):
    """Notice whether a function that moves tensors makes one on the CPU from one on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False
        # Virtual GPUs put functions of their own in the places of these, so they are looked up now.
        self._moves = {torch.Tensor.cpu, torch.Tensor.to, torch.Tensor.type, torch.Tensor.copy_}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        moved = function in self._moves and isinstance(made, torch.Tensor)
        if moved and made.device.type == "cpu":
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            self.seen |= any(tensor.is_cuda for tensor in tensors)
        return made


def draw_halves(generator: random.Random) -> Plain:
    return {"seed": generator.randrange(1 << 30), "sizes": [generator.randint(2, 9) for _ in range(3)], "inputs": list(PLACES)}


def observe_halves(two_halves: Any, inputs: Plain) -> Plain:
    """Where parameters, outputs of halves and of all, and gradients lie, and the outputs and gradients beside those due."""
    torch.manual_seed(inputs["seed"])
    a, b, c = inputs["sizes"]
    first, second = nn.Sequential(nn.Linear(a, b), nn.Tanh()), nn.Sequential(nn.Linear(b, c), nn.Softplus())
    x = torch.randn(5, a, requires_grad=True)
    due = second(first(x))
    leaves = [*first.parameters(), *second.parameters(), x]
    due_gradients = [g.flatten().tolist() for g in torch.autograd.grad(due.square().sum(), leaves)]
    values = [parameter.flatten().tolist() for half in (first, second) for parameter in half.parameters()]
    computed: list[list[str]] = []
    for index, half in enumerate((first, second)):
        half.register_forward_hook(lambda half, given, output, index=index: computed.append([str(index), str(output.device)]))
    with torch.cuda.device(1), during("two modules on the CPU"):
        network = two_halves(first, second)
    if not isinstance(network, nn.Module):
        return {"type": type(network).__name__}
    found = {tuple(parameter.detach().cpu().flatten().tolist()): parameter for parameter in network.parameters()}
    parameters = [found.get(tuple(numbers)) for numbers in values]
    places = ["nowhere" if parameter is None else str(parameter.device) for parameter in parameters]
    runs = []
    for index, place in enumerate(inputs["inputs"] if places == HALVES else []):
        network.zero_grad()
        x.grad = None
        computed.clear()
        with torch.cuda.device(1 - index % 2), during(f"an input on {place}"):
            given = x.to(place)
            with _CopiesToHost() as copies:
                y = network(given)
            if isinstance(y, torch.Tensor) and y.requires_grad:
                y.square().sum().backward()
        gradients = [None if p is None or p.grad is None else p.grad.cpu().flatten().tolist() for p in [*parameters, x]]
        runs.append({"output": describe(y), "computed": list(computed), "gradients": gradients, "by_host": copies.seen})
    return {"type": "Module", "places": places, "runs": runs, "due": due.flatten().tolist(), "due_gradients": due_gradients}


def judge_halves(observed: Plain, inputs: Plain) -> Verdict:
    if observed["type"] != "Module":
        return wrong_type(observed["type"], "a module: an optimizer must find the parameters")
    if observed["places"] != HALVES:
        return not_yet(
            f"weight and bias of the first half belong on cuda:0, of the second on cuda:1; yours: {', '.join(observed['places'])}."
        )
    for run, place in zip(observed["runs"], inputs["inputs"], strict=True):
        output = run["output"]
        if output["type"] != "Tensor" or output["device"] != "cuda:1":
            return not_yet(f"for an input on {place} the output belongs on cuda:1; yours is on {output.get('device', output['type'])}.")
        if not near(output["values"], observed["due"], CLOSE, CLOSE):
            return not_yet(f"for an input on {place} the output is not what both halves make of it, one after the other.")
        if run["computed"] != [["0", "cuda:0"], ["1", "cuda:1"]]:
            calls = ", ".join(f"the {('first', 'second')[int(half)]} on {device}" for half, device in run["computed"]) or "none"
            return not_yet(f"each half should be called once, on its own GPU; you called {calls}.")
        if run["by_host"]:
            return not_yet(f"for an input on {place} the outputs are right, but a tensor went through the CPU. Copy it from GPU to GPU.")
        for gradient, due in zip(run["gradients"], observed["due_gradients"], strict=True):
            if gradient is None or not near(gradient, due, CLOSE, CLOSE):
                found = "no" if gradient is None else "another"
                return not_yet(f"for an input on {place} it, or a parameter, has {found} gradient. Who cut the graph?")
    return right("Copies between GPUs have gradients.")


CHECKS = [
    Check("13.1", draw_tensors, observe_zeros, judge_zeros, gpus=2, section="Code that nobody ran"),
    Check("13.2", draw_sizes, observe_report, judge_report, gpus=2, script=memory_report, section="What is deprecated or outdated"),
    Check(
        "13.3",
        draw_training,
        observe_training,
        judge_training,
        script=train,
        expect=expect_training,
        alters=("values",),
        section="Names that never existed",
    ),
    Check("13.4", draw_snippets, observe_outcomes, judge_outcomes, section="A claim, its code, its verdict"),
    Check("13.5", draw_halves, observe_halves, judge_halves, gpus=2, alters=("values", "hooks"), section="What holds, with surprises"),
]
