"""Checks of lesson 01, device basics. Where a check names a device, the current one is another."""

import random
from collections.abc import Iterator
from itertools import cycle
from typing import Any

import torch
from torch import nn

from labkit import machine
from labkit.checks.checking import (
    Check,
    Plain,
    Verdict,
    describe,
    during,
    not_yet,
    one_number,
    plural,
    quote,
    right,
    wrong_type,
)

DEVICES = ("cpu", "cuda:0", "cuda:1")


def _from_elsewhere(device: str, answer: Any, *arguments: Any) -> Any:
    """What the answer returns while another GPU than `device` is current."""
    with torch.cuda.device(0 if device == "cuda:1" else 1):
        return answer(*arguments)


# 01.1: a mask is made where its lengths are


def draw_masks(generator: random.Random) -> Plain:
    """A case on each device, with an empty sentence. In the first the longest sentence fills the row; in the others it does not."""
    cases = []
    for spare, device in enumerate(generator.sample(DEVICES, k=3)):
        lengths = [0, 5, *(generator.randint(1, 5) for _ in range(generator.choice([1, 2, 6])))]
        generator.shuffle(lengths)
        cases.append({"device": device, "size": 5 + spare, "lengths": lengths})
    return cases


def observe_masks(padding_mask: Any, cases: Plain) -> Plain:
    masks = []
    for case in cases:
        lengths = torch.tensor(case["lengths"], device=case["device"])
        with during(f"lengths on {case['device']}"):
            mask = _from_elsewhere(case["device"], padding_mask, lengths, case["size"])
        masks.append({**describe(mask), "lengths": lengths.tolist()})
    return masks


def judge_masks(masks: Plain, cases: Plain) -> Verdict:
    for mask, case in zip(masks, cases, strict=True):
        lengths, size, device = case["lengths"], case["size"], case["device"]
        if mask["type"] != "Tensor":
            return wrong_type(mask["type"], "a tensor")
        if mask["device"] != device:
            return not_yet(
                f"the lengths were on {device}, your mask is on {mask['device']}. What does lengths.device tell you?"
            )
        if mask["dtype"] != "torch.bool" or mask["shape"] != [len(lengths), size]:
            return not_yet(
                f"expected a mask of dtype torch.bool and shape [{len(lengths)}, {size}]. "
                f"Yours has dtype {mask['dtype']} and shape {mask['shape']}."
            )
        if mask["values"] != [position < length for length in lengths for position in range(size)]:
            return not_yet(
                f"for lengths {lengths} and size {size} some values are wrong. Row i has lengths[i] times True, then False."
            )
        if mask["lengths"] != lengths:
            return not_yet(
                f"the mask is right, but your function changed the lengths it was given: they were {lengths}."
            )
    return right("One function serves every device.")


# 01.2: work runs on a device, and the current device is put back


class Interrupted(Exception):  # noqa: N818 (it is no error of the learner's)
    """What the work raises in some of the tries."""


def draw_work(generator: random.Random) -> Plain:
    """Every pair of devices, the same one twice as well, with an exception and with results of which some are false."""
    cases = [
        {"before": before, "on": on, "raises": raises, "result": result}
        for before in (0, 1)
        for on in (0, 1)
        for raises, result in (
            (True, None),
            *((False, result) for result in (None, 0, "", "a tensor", generator.randint(1, 999))),
        )
    ]
    generator.shuffle(cases)
    return cases


def observe_work(on_device: Any, cases: Plain) -> Plain:
    observations = []
    for case in cases:
        seen: list[int] = []
        torch.cuda.set_device(case["before"])
        result, raised, tensor = None, None, torch.zeros(1)
        try:
            with during(f"GPU {case['on']}, while GPU {case['before']} was current"):
                result = on_device(case["on"], _work(case, seen, tensor))
        except Interrupted as error:
            raised = quote(error)
        told = (
            "a tensor"
            if result is tensor
            else result
            if isinstance(result, int | str | None)
            else f"another {type(result).__name__}"
        )
        observations.append(
            {"seen": seen, "after": torch.cuda.current_device(), "result": told, "raised": raised}
        )
    return observations


def _work(case: Plain, seen: list[int], tensor: torch.Tensor) -> Any:
    def work() -> Any:
        seen.append(
            torch.cuda.current_device()
            if torch.cuda.current_stream() == torch.cuda.default_stream()
            else -1
        )
        if case["raises"]:
            raise Interrupted(f"while GPU {seen[-1]} was current")
        return tensor if case["result"] == "a tensor" else case["result"]

    return work


def judge_work(observations: Plain, cases: Plain) -> Verdict:
    for observed, case in zip(observations, cases, strict=True):
        before, on = case["before"], case["on"]
        if observed["seen"] != [on]:
            ran = f"saw device {observed['seen'][0]}" if observed["seen"] else "did not run"
            ran = "ran on another stream" if observed["seen"] == [-1] else ran
            ran = "ran more than once" if len(observed["seen"]) > 1 else ran
            return not_yet(f"expected work to run once on device {on}; it {ran}.")
        if case["raises"] and observed["raised"] is None:
            return not_yet(
                "work raised an exception, and your function kept it to itself. Let it go up to the caller."
            )
        if observed["after"] != before:
            how = "after work raised an exception" if case["raises"] else "afterwards"
            return not_yet(f"the current device was {before} before and {observed['after']} {how}.")
        if not case["raises"] and observed["result"] != case["result"]:
            return not_yet(
                f"work returned {case['result']!r}, and your function {observed['result']!r}."
            )
    return right("The device was put back, also after an exception.")


# 01.3: the bytes of a model on each device

ITEM_BYTES = {"float32": 4, "float16": 2, "float64": 8, "bool": 1}


class Masked(nn.Module):
    """Keeps a mask, which is not saved with the model."""

    def __init__(self, size: int, device: str) -> None:
        super().__init__()
        self.register_buffer(
            "mask", torch.ones(size, size, dtype=torch.bool, device=device), persistent=False
        )


def draw_models(generator: random.Random) -> Plain:
    """The layers of a model on all devices, whose own children share a weight, and of two models on two, with two layers on each."""
    on_all, *on_two = [
        _layers(generator, generator.sample(on, k=len(on)) * 2)
        for on in (DEVICES, DEVICES[1:], DEVICES[::2])
    ]
    return [sorted(on_all, key=lambda layer: layer["kind"] == "shared"), *on_two]


def _layers(generator: random.Random, devices: list[str]) -> Plain:
    sizes = [generator.randint(2, 9) for _ in range(8)]
    layers = [
        {"kind": "linear", "device": device, "dtype": dtype, "in": size, "out": out}
        for device, dtype, size, out in zip(
            devices, ["float32", "float16", "float64"], sizes, sizes[1:], strict=False
        )
    ]
    layers += [
        {"kind": "norm", "device": devices[0], "features": sizes[4]},
        {"kind": "mask", "device": devices[1], "size": sizes[5]},
        {
            "kind": "shared",
            "device": devices[2],
            "dtype": "float32",
            "in": sizes[6],
            "out": sizes[7],
        },
    ]
    generator.shuffle(layers)
    return layers


def observe_models(bytes_per_device: Any, models: Plain) -> Plain:
    """The answer for each model, whose layers lie each deeper than the one before. A shared weight is frozen."""
    observations: list[Plain] = []
    for layers in models:
        model = nn.Sequential()
        for layer in layers:
            model = nn.Sequential(*_modules(layer), model)
        answer = bytes_per_device(model)
        told, keys = None, []
        if isinstance(answer, dict):
            told = {str(device): one_number(count) for device, count in answer.items()}
            keys = sorted({type(device).__name__ for device in answer})
        observations.append({"type": type(answer).__name__, "bytes": told, "keys": keys})
    return observations


def _modules(layer: Plain) -> list[nn.Module]:
    if layer["kind"] == "norm":
        norm = nn.BatchNorm1d(layer["features"], device=layer["device"])
        return [norm, norm]  # used twice, to be counted once
    if layer["kind"] == "mask":
        return [Masked(layer["size"], layer["device"])]
    linear = nn.Linear(
        layer["in"], layer["out"], device=layer["device"], dtype=getattr(torch, layer["dtype"])
    )
    linear.weight.grad = torch.zeros_like(linear.weight)  # not to be counted
    if layer["kind"] == "linear":
        return [linear]
    twin = nn.Linear(layer["in"], layer["out"], bias=False, device=layer["device"])
    twin.weight = linear.weight.requires_grad_(False)
    return [linear, twin]


def expected_bytes(layers: Plain) -> dict[str, int]:
    """Bytes on each device. BatchNorm1d: weight, bias, running mean and variance in float32, and one int64 that counts batches."""
    total = dict.fromkeys([layer["device"] for layer in layers], 0)
    for layer in layers:
        if layer["kind"] == "norm":
            count = 4 * layer["features"] * ITEM_BYTES["float32"] + 8
        elif layer["kind"] == "mask":
            count = layer["size"] ** 2 * ITEM_BYTES["bool"]
        else:
            count = (layer["in"] + 1) * layer["out"] * ITEM_BYTES[layer["dtype"]]
        total[layer["device"]] += count
    return total


def judge_models(observations: Plain, models: Plain) -> Verdict:
    for observed, layers in zip(observations, models, strict=True):
        expected, counted = expected_bytes(layers), observed["bytes"]
        if counted is None:
            return wrong_type(observed["type"], "a dict from device to bytes")
        if counted.keys() != expected.keys():
            return not_yet(
                f"the model is on {', '.join(sorted(expected))}; your dict has {', '.join(sorted(counted)) or 'nothing'}."
            )
        if observed["keys"] != ["str"]:
            return not_yet(
                f"the keys of your dict are of type {' and '.join(observed['keys'])}. "
                'Expected strings such as "cuda:0". What does str(device) give?'
            )
        wrong = [device for device in sorted(expected) if counted[device] != expected[device]]
        if wrong:
            due, yours = expected[wrong[0]], counted[wrong[0]]
            hint = "Are parameters all that a layer keeps, and do all dtypes have the same size?"
            if yours is not None and yours > due:
                hint = "Did you count a shared parameter or buffer twice, or take one size for all dtypes?"
            return not_yet(f"on {wrong[0]} the model has {due} bytes, you counted {yours}. {hint}")
    return right()


# 01.4: a copy and other work at the same time

TRIES = 3  # on a real GPU, where the best of them counts,
LARGER = (
    8  # and where a copy must take much longer than the check's own calls, 0.5 ms beside an H100
)


def draw_copies(generator: random.Random) -> Plain:
    """Copies to each GPU that take twice as long as their work, and one that takes half as long: no fixed pause suits both."""
    sizes = [
        (8 << 20, 0.5, "cuda:0"),
        (8 << 20, 0.5, "cuda:1"),
        (4 << 20, 2.0, generator.choice(DEVICES[1:])),
    ]
    return [
        {"numbers": count, "work": work, "device": device, "first": generator.randint(1, 999)}
        for count, work, device in sizes
    ]


def observe_copies(copy_while: Any, cases: Plain) -> Plain:
    """Seconds of a plain pinned copy, of the work, and of both in the answer's hands; on real GPUs in several tries of each case."""
    observations: list[Plain] = []
    count, larger = (1, 1) if machine.in_use().virtual else (TRIES, LARGER)
    for case in cases:
        device = torch.device(case["device"])
        numbers = torch.arange(case["numbers"] * larger, dtype=torch.int32).add_(case["first"])
        source = numbers.pin_memory()
        copy, tries = (
            min(
                _seconds(lambda source=source, device=device: source.to(device), device)
                for _ in range(count)
            ),
            [],
        )
        for _ in range(count):
            calls: list[float] = []

            def work(calls: list[float] = calls, seconds: float = case["work"] * copy) -> None:
                calls.append(_keep_busy(seconds))

            with during(f"a pinned tensor and {device}"):
                start = machine.host_time()
                result = _from_elsewhere(case["device"], copy_while, source, device, work)
                returned = machine.host_time()
            tried: Plain = {
                "total": returned - start,
                "calls": len(calls),
                "work": sum(calls),
                "type": type(result).__name__,
            }
            torch.cuda.synchronize(device)
            tried["left"] = machine.host_time() - returned
            if isinstance(result, torch.Tensor):
                same = result.dtype == numbers.dtype and torch.equal(result.detach().cpu(), numbers)
                tried |= {"device": str(result.device), "shape": list(result.shape), "same": same}
            tries.append(tried)
            del result
        observations.append({"copy": copy, "shape": list(source.shape), "tries": tries})
    return observations


def _seconds(work: Any, device: torch.device) -> float:
    torch.cuda.synchronize(device)
    start = machine.host_time()
    work()
    torch.cuda.synchronize(device)
    return machine.host_time() - start


def _keep_busy(seconds: float) -> float:
    """Let the CPU work for `seconds` on the machine's clock; return how long it took."""
    numbers = torch.ones(1 << 15)  # a larger one would be shared among threads
    start = machine.host_time()
    while machine.host_time() - start < seconds:
        torch.add(numbers, numbers)
    return machine.host_time() - start


def judge_copies(observations: Plain, cases: Plain) -> Verdict:
    for observed, case in zip(observations, cases, strict=True):
        for attempt in observed["tries"]:
            if attempt["calls"] != 1:
                return not_yet(
                    f"expected work to run once before your function returns; it ran {plural(attempt['calls'], 'time')}."
                )
            if "same" not in attempt:
                return wrong_type(attempt["type"], "the copy")
            if attempt["device"] != case["device"]:
                return not_yet(f"the copy is on {attempt['device']}, not on {case['device']}.")
            if attempt["shape"] != observed["shape"]:
                return not_yet(
                    f"the copy's shape is {attempt['shape']}, the source's {observed['shape']}."
                )
            if not attempt["same"]:
                return not_yet("the copy has other values than the source, or another dtype.")
        copy = observed["copy"]
        if not min(attempt["left"] for attempt in observed["tries"]) <= copy / 4:
            return not_yet(
                "your function returned before the copy had arrived. What waits for a GPU that need not be the current one?"
            )
        best = min(observed["tries"], key=lambda attempt: attempt["total"])
        took = f"copy {copy * 1e3:.2f} ms, work {best['work'] * 1e3:.2f} ms, together {best['total'] * 1e3:.2f} ms"
        if not best["total"] <= max(copy, best["work"]) + min(copy, best["work"]) / 2:
            return not_yet(
                f"a copy of {copy * 1e3:.2f} ms and work of {best['work'] * 1e3:.2f} ms took {best['total'] * 1e3:.2f} ms together, "
                "no less than one after the other. Which argument of Tensor.to lets it return at once? "
                "Do you wait only for what is still missing?"
            )
    return right(f"{took.capitalize()}.")


# 01.5: a nested batch is moved, and what is there already stays
# A node of a batch is ["dict", [[key, node], …]], ["list", [node, …]], ["tuple", [node, …]], ["tensor", values, dtype, device] or
# ["value", value].


def draw_batch(generator: random.Random) -> Plain:
    """A batch for the CPU and one for a GPU. At each level: a tensor to move, one to leave, other values, a container of another kind."""
    targets = ["cpu", generator.choice(DEVICES[1:])]
    return [
        {"device": target, "batch": _nested(generator, target, tops)}
        for target, tops in zip(targets, ("tuple", "dict"), strict=True)
    ]


def _nested(generator: random.Random, target: str, top: str) -> Plain:
    others = cycle(generator.sample([device for device in DEVICES if device != target], k=2))
    kinds = cycle(
        ["list", "dict", "tuple"] if top == "tuple" else ["list", "tuple", "dict"]
    )  # each kind in each other one
    dtypes = cycle(
        generator.sample(["float32", "float16", "int64"], k=3)
    )  # each is moved, and each stays

    def tensor(device: str) -> Plain:
        values = [generator.randint(0, 9) for _ in range(2)]
        return ["tensor", [values, values[::-1]] if level % 2 else values[0], next(dtypes), device]

    node: Plain = [top, []]
    for level in range(6):
        inside = [
            tensor(next(others)),
            tensor(target),
            *(["value", value] for value in (None, "image", 7, True, "", 0, 0.5)),
            node,
        ]
        generator.shuffle(inside)
        kind = next(kinds)
        keys = [level, *(f"{key}{level}" for key in "abcdefghi")]  # a number too, which is no text
        node = [
            kind,
            [[key, child] for key, child in zip(keys, inside, strict=True)]
            if kind == "dict"
            else inside,
        ]
    return node


def observe_batch(move: Any, cases: Plain) -> Plain:
    """What each batch held, what the moved one holds, and what the batch holds afterwards."""
    observations = []
    for case in cases:
        batch, device = _build(case["batch"]), torch.device(case["device"])
        given = list(_content(batch))
        with during(f"a batch of dicts, lists and tuples, and {device}"):
            moved = _from_elsewhere(case["device"], move, batch, device)
        for index in range(2):
            torch.cuda.synchronize(index)
        observations.append(
            {"given": given, "moved": list(_content(moved)), "batch": list(_content(batch))}
        )
    return observations


def _build(node: Plain) -> Any:
    kind, content = node[0], node[1]
    if kind == "dict":
        return {key: _build(child) for key, child in content}
    if kind in ("list", "tuple"):
        return (
            [_build(child) for child in content]
            if kind == "list"
            else tuple(_build(child) for child in content)
        )
    return (
        torch.tensor(content, dtype=getattr(torch, node[2]), device=node[3])
        if kind == "tensor"
        else content
    )


def _content(value: Any, path: str = "batch") -> Iterator[Plain]:
    """All that `value` holds, and itself: path, kind, content; of a tensor also its device and the address of its memory."""
    if isinstance(value, torch.Tensor):
        yield [
            path,
            "tensor",
            f"{value.tolist()} of {value.dtype}",
            str(value.device),
            value.data_ptr(),
        ]
    elif isinstance(value, dict | list | tuple):
        yield [path, type(value).__name__, len(value)]
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _content(child, f"{path}[{key!r}]")
    else:
        yield [path, type(value).__name__, repr(value)]


def judge_batch(observations: Plain, cases: Plain) -> Verdict:
    for observed, case in zip(observations, cases, strict=True):
        moved = {path: what for path, *what in observed["moved"]}
        for path, *was in observed["given"]:
            if trouble := _difference(was, moved.get(path), case["device"]):
                return not_yet(f"{path} {trouble}")
        if observed["batch"] != observed["given"]:
            return not_yet(
                "the batch you were given has changed; build a new one and leave it as it was."
            )
    return right("Tensors that were there already were not copied.")


def _difference(was: Plain, now: Plain, device: str) -> str | None:
    """What is wrong with what an entry became, in words that follow its path."""
    if now is None:
        return "is missing."
    if was[0] != now[0]:
        return f"was of type {was[0]} and is now of type {now[0]}."
    if was[0] == "tensor" and now[2] != device:
        return f"is on {now[2]}, not on {device}."
    if was[1] != now[1]:
        return (
            f"had {was[1]} entries and has {now[1]}."
            if isinstance(was[1], int)
            else f"was {was[1]} and became {now[1]}."
        )
    if was[0] == "tensor" and was[2] == device and was[3] != now[3]:
        return f"was on {device} already and was copied all the same. Does Tensor.to copy then?"
    return None


CHECKS = [
    Check(
        "01.1",
        draw_masks,
        observe_masks,
        judge_masks,
        gpus=2,
        section="Which operations work across devices",
    ),
    Check("01.2", draw_work, observe_work, judge_work, gpus=2, section="The current GPU"),
    Check("01.3", draw_models, observe_models, judge_models, gpus=2, section="Moving a model"),
    Check("01.4", draw_copies, observe_copies, judge_copies, gpus=2, section="What a copy costs"),
    Check("01.5", draw_batch, observe_batch, judge_batch, gpus=2, section="Moving a model"),
]
