"""Checks of lesson 13, the articles on trial."""

import contextlib
import gc
import math
import random
from typing import Any
from unittest import mock

import torch
from torch import nn

from gpulessons.autograd_graphs import Graphs
from gpulessons.lesson_13.defence import is_example, misjudged, refused, try_on
from gpulessons.lesson_13.defence import observe as observe_defence
from gpulessons.lesson_13.deprecated import deprecated_calls
from gpulessons.lesson_13.stand_ins import ALLOCATED
from labkit.checks.checking import (
    Check,
    Plain,
    Verdict,
    describe,
    during,
    not_yet,
    number,
    number_or_type,
    right,
    wrong_type,
)

# 13.1: a tensor like another

DTYPES = {
    "torch.float32": torch.float32,
    "torch.float16": torch.float16,
    "torch.int64": torch.int64,
}
PLACES = ("cuda:0", "cuda:1", "cpu")


def draw_tensors(generator: random.Random) -> Plain:
    """Draw tensors on each device, of several dtypes and shapes. One has no dimensions."""
    places = [*PLACES, generator.choice(PLACES)]
    dtypes = [*generator.sample(list(DTYPES), len(DTYPES)), generator.choice(list(DTYPES))]
    shapes = [
        [generator.randint(2, 9) for _ in range(dimensions)]
        for dimensions in generator.sample(range(4), 4)
    ]
    return [
        {"device": d, "dtype": t, "shape": s}
        for d, t, s in zip(places, dtypes, shapes, strict=True)
    ]


def observe_zeros(zeros_beside: Any, cases: Plain) -> Plain:
    """Return the function's result for each tensor, and whether the tensor keeps its numbers.

    A write to the result must change neither another number of it nor the next result.
    """
    observations = []
    for case in cases:
        dtype = DTYPES[case["dtype"]]
        t = _unlike_numbers(case["shape"], dtype).to(case["device"])
        before = t.clone()
        with (
            torch.cuda.device(_elsewhere(case)),
            during(f"a tensor of {case['dtype']}, shape {case['shape']}, on {case['device']}"),
        ):
            made = zeros_beside(t)
            observed = {
                "made": describe(made),
                "kept": torch.allclose(t, before, rtol=0, atol=0, equal_nan=True),
            }
            if observed["made"]["type"] == "Tensor":
                # Elements that share memory raise an error.
                with contextlib.suppress(RuntimeError), torch.no_grad():
                    made += 1
                observed["written"], observed["next"] = (
                    describe(made)["values"],
                    describe(zeros_beside(t))["values"],
                )
        observations.append(observed)
    return observations


def _unlike_numbers(shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor on the CPU with all kinds of numbers, such as nan and infinity.

    So no arithmetic turns all of them into 0.
    """
    if dtype.is_floating_point:
        kinds = [torch.nan, torch.inf, -2.0, 0.0, 1.0]
    else:
        kinds = [-2, 0, 1]
    count = math.prod(shape)
    return torch.tensor(kinds, dtype=dtype).repeat(count // len(kinds) + 1)[:count].reshape(shape)


def _elsewhere(case: Plain) -> int:
    """Return the GPU that is current while the function runs, which is not the tensor's GPU."""
    return 0 if case["device"] == "cuda:1" else 1


def judge_zeros(observations: Plain, cases: Plain) -> Verdict:
    for observed, case in zip(observations, cases, strict=True):
        made = observed["made"]
        if made["type"] != "Tensor":
            return wrong_type(made["type"], "a tensor")
        if not observed["kept"]:
            return not_yet(
                "the tensor that you were given has changed. Return a new tensor instead."
            )
        for what in ("device", "dtype", "shape"):
            if made[what] != case[what]:
                return not_yet(
                    f"expected a tensor with the {what} of the given one, {case[what]}. "
                    f"Yours has the {what} {made[what]}."
                )
        if any(made["values"]):
            return not_yet(
                "not all of its numbers are 0. The tensor that you were given may hold inf and nan."
            )
        if not all(observed["written"]):
            return not_yet(
                "adding 1 to the tensor that you made fails, because its elements share memory. "
                "Give each element its own memory."
            )
        if any(observed["next"]):
            return not_yet(
                "after a write to your first tensor, the tensor of the next call is not 0 any "
                "more. Make a new tensor in each call."
            )
    return right("A tensor knows its device, type and shape.")


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
    """Draw for each device the MiB that stay allocated, are cached, and were given back.

    One device has more of each, so that no sums agree by chance.
    """
    ranges = (range(10, 20, 2), range(20, 40, 2), range(40, 60, 2))
    less, more = zip(*(sorted(generator.sample(sizes, k=2)) for sizes in ranges), strict=True)
    return generator.sample([list(less), list(more)], k=2)


def observe_report(report: Any, sizes: Plain) -> Plain:
    """Return for each device the function's report, the true figures, and the warnings."""
    held = [_fill(device, *mebibytes) for device, mebibytes in enumerate(sizes)]
    for device, (_, cached, _) in enumerate(sizes):
        _take(device, cached)  # and let go of it at once
    truths = [_truth(device) for device in range(len(sizes))]
    observations = []
    for device, truth in enumerate(truths):
        with (
            torch.cuda.device(1 - device),
            deprecated_calls() as warned,
            during(f"device {device}"),
        ):
            said = report(torch.device("cuda", device))
        if isinstance(said, dict):
            said = {str(name): number(value) for name, value in said.items()}
        else:
            said = type(said).__name__
        observations.append(
            {"said": said, "truth": truth, "after": _truth(device), "warned": warned}
        )
    del held
    return observations


def _fill(device: int, kept: int, cached: int, returned: int) -> list[torch.Tensor]:
    """Allocate tensors of `kept` MiB that stay, `cached` MiB and `returned` MiB.

    So no two of a device's four figures are the same. One of the tensors that stay is small,
    because PyTorch counts small blocks in another pool.
    """
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    stays = [_take(device, kept), torch.empty(1000, dtype=torch.uint8, device=f"cuda:{device}")]
    _take(device, cached)
    _take(device, returned)  # larger than what is cached, so it is taken from the device
    torch.cuda.empty_cache()
    return stays


def _take(device: int, mebibytes: int) -> torch.Tensor:
    # allocated is more than requested
    return torch.empty(mebibytes * MIB - 1, dtype=torch.uint8, device=f"cuda:{device}")


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
            return not_yet(
                f"your function uses a deprecated name, for which PyTorch has a warning: "
                f"{observed['warned'][0]}."
            )
        numbers = [name for name in FIGURES if said.get(name) is not None]
        if len(numbers) < len(FIGURES):
            return not_yet(
                f"expected numbers of bytes for {', '.join(FIGURES)}. Yours are for "
                f"{', '.join(numbers) or 'nothing'}."
            )
        for name in FIGURES:
            if said[name] != truth[name]:
                return not_yet(
                    f"on cuda:{device}, {name} is {truth[name]:,} bytes. You said {said[name]:,}."
                )
        if observed["after"] != truth:
            return not_yet(
                f"asking has changed the figures of cuda:{device}. "
                "What empties the cache, resets the peaks, or takes memory?"
            )
    return right("The figures are those of the given device, and no name is deprecated.")


# 13.3: the article's training, mended


def train(model, batches):  # what the exercise hands out
    """Train a model from the CPU on the GPU, one step per batch. Return the mean loss."""
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
CLOSE = 1e-4  # relative to SCALE; a weight decay of 0.01 differs by ten times as much


def draw_training(generator: random.Random) -> Plain:
    """Draw batches of one size, except for the last one, which is smaller."""
    rows = [16] * generator.randint(3, 7) + [generator.randint(4, 8)]
    return {"seed": generator.randrange(1 << 30), "rows": rows, "features": generator.randint(3, 8)}


def _to_train(inputs: Plain) -> tuple[nn.Linear, list[tuple[torch.Tensor, torch.Tensor]]]:
    maker = torch.Generator().manual_seed(inputs["seed"])
    model = nn.Linear(inputs["features"], 1)
    with torch.no_grad():
        model.weight.copy_(SCALE * torch.randn(model.weight.shape, generator=maker))
        model.bias.copy_(SCALE * torch.randn(1, generator=maker))
    # The targets grow, so that no single loss is near the mean. The mean is small, so that rounding
    # shows.
    batches = [
        (
            torch.randn(rows, inputs["features"], generator=maker),
            SCALE * (place + 1) * torch.randn(rows, 1, generator=maker),
        )
        for place, rows in enumerate(inputs["rows"])
    ]
    return model, batches


def expect_training(inputs: Plain) -> Plain:
    """Return the expected mean loss and parameters, from the same training on the CPU.

    `accumulated` are the parameters if gradients are never cleared.
    """
    accumulated, _ = _trained_on_cpu(inputs, clear=False)
    parameters, losses = _trained_on_cpu(inputs, clear=True)
    return {"loss": sum(losses) / len(losses), "parameters": parameters, "accumulated": accumulated}


def _trained_on_cpu(inputs: Plain, clear: bool) -> tuple[list[float], list[float]]:
    """Train on the CPU, and return the parameters and the loss of each batch.

    `clear` says whether gradients are cleared before each step.
    """
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
    """Return the mean loss and the trained parameters of the answer."""
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
    return [
        value
        for parameter in model.parameters()
        for value in parameter.detach().cpu().flatten().tolist()
    ]


def judge_training(observed: Plain, inputs: Plain, due: Plain) -> Verdict:
    if isinstance(observed["loss"], str):
        return not_yet(f"expected a number. Your function returned {observed['loss']}.")
    if "cpu" in observed["forwards"]:
        return not_yet("the model computed on the CPU. It should train on the GPU.")
    off = _furthest(observed["parameters"], due["parameters"])
    if not off < CLOSE * SCALE:
        if observed["device"] == "cpu":
            return not_yet("the model that you were given is still on the CPU, and is not trained.")
        hint = (
            "Does every batch make one step of SGD with lr=0.01, "
            "and with that batch's gradient only?"
        )
        if _furthest(observed["parameters"], due["accumulated"]) < CLOSE * SCALE:
            hint = "What do gradients do from one step to the next?"
        return not_yet(f"the model's parameters are off by up to {off:.3g}. {hint}")
    if not abs(observed["loss"] - due["loss"]) < 1e-4 * due["loss"]:
        return not_yet(f"the mean loss is {due['loss']:.5g}. You said {observed['loss']:.5g}.")
    if observed["kept"] > 1:  # that of the step before goes with the next loss
        return not_yet(
            f"when a forward pass began, the graphs of {observed['kept']} earlier steps were "
            "still there. What keeps them?"
        )
    return right("The model moves first, and each loss is a number without a graph.")


def _furthest(found: list[float], expected: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(found, expected, strict=True))


# 13.4: an experiment that decides

CACHED = (1, 66)  # MiB that lie in the cache of each GPU while the experiment runs
ANSWERS_BY_PYTORCH = (
    "memory.memory_allocated",
    "memory_allocated",
    "memory_stats",
    "memory_stats_as_nested_dict",
    "memory.memory_snapshot",
    "memory_snapshot",
)


def draw_memory(generator: random.Random) -> Plain:
    """Draw the MiB of tensors that stay on each GPU, and the current GPU.

    The numbers are even. An odd number could leave 1 MiB of a segment free, which the allocator
    would give to the next tensor.
    """
    return {
        "kept": [generator.randrange(2, 10, 2), generator.randrange(10, 18, 2)],
        "current": generator.randrange(2),
    }


def observe_memory(experiment: Any, inputs: Plain) -> Plain:
    """Try the experiment on all stand-ins, with an empty cache and with a full one."""
    gc.collect()  # or what an earlier answer left goes while this one counts
    kept = [_take(gpu, mebibytes) for gpu, mebibytes in enumerate(inputs["kept"])]
    tried = []
    with contextlib.ExitStack() as stack:
        for name in ANSWERS_BY_PYTORCH:
            stack.enter_context(mock.patch(f"torch.cuda.{name}", _not_this_one))
        stack.enter_context(torch.cuda.device(inputs["current"]))
        for cached in CACHED:
            for gpu in range(len(kept)):
                torch.cuda.synchronize(gpu)
            torch.cuda.empty_cache()
            for gpu in range(len(kept)):
                _take(gpu, cached)  # and let go of it at once
            tried += try_on(experiment, ALLOCATED)
    return tried


def _not_this_one(*_: Any) -> int:
    raise RuntimeError("call the function that the experiment is given, not one of PyTorch's own")


def judge_memory(tried: Plain, inputs: Plain) -> Verdict:
    for run in tried:
        if not run["raised"] and run["result"] not in ("True", "False"):
            return not_yet(
                f"your experiment returned {run['result']}. It must return True or False."
            )
    results = {run["result"] for run in tried}
    if len(results) == 1 and not any(run["raised"] for run in tried):
        told = f"your experiment gives {results.pop()} for every function. So it decides nothing."
        if tried[0]["result"] == "False":
            told += " Other tensors may lie on the GPUs already, and PyTorch rounds sizes up."
        return not_yet(told)
    told = misjudged(tried)
    if told:
        return not_yet(told)
    return right("It tells what the sentence says from ten other things.")


# 13.5: a verdict of one's own


def draw_nothing(generator: random.Random) -> Plain:
    return {}


def observe_verdict(answer: Any, inputs: Plain) -> Plain:
    """Run the experiment of the verdict that the answer returns.

    GPU 0 is the current one, as in the lesson.
    """
    with torch.cuda.device(0):
        with during("it was called"):
            given = answer()
        if isinstance(given, dict):
            return observe_defence(given)
        return type(given).__name__


def judge_verdict(observed: Plain, inputs: Plain) -> Verdict:
    if isinstance(observed, str):
        return wrong_type(observed, "a dict")
    told = refused(observed)
    if not told and is_example(observed):
        told = (
            "the experiment decides, but this is the sentence that the lesson defends. "
            "Choose another sentence."
        )
    if told:
        return not_yet(told)
    return right(f"The experiment decides, and the verdict is: {observed['verdict']}.")


CHECKS = [
    Check(
        "13.1", draw_tensors, observe_zeros, judge_zeros, gpus=2, section="A tensor beside another"
    ),
    Check(
        "13.2",
        draw_sizes,
        observe_report,
        judge_report,
        gpus=2,
        script=memory_report,
        section="Old lines",
    ),
    Check(
        "13.3",
        draw_training,
        observe_training,
        judge_training,
        script=train,
        expect=expect_training,
        alters=("values",),
        section="Misspelt or invented",
    ),
    Check(
        "13.4",
        draw_memory,
        observe_memory,
        judge_memory,
        gpus=2,
        section="An experiment that can fail",
    ),
    Check(
        "13.5",
        draw_nothing,
        observe_verdict,
        judge_verdict,
        gpus=2,
        section="Build it: a verdict of your own",
    ),
]
