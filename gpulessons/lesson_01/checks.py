"""Checks of lesson 01, device basics.

An answer runs while another GPU than the one that the check names is current.
"""

import random
from collections.abc import Iterator
from functools import partial
from itertools import cycle, product
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


def from_elsewhere(device: str, answer: Any, *arguments: Any) -> Any:
    """Call the answer while another GPU than `device` is current, and return its result."""
    with torch.cuda.device(0 if device == "cuda:1" else 1):
        return answer(*arguments)


# 01.1: make a mask on the device of its lengths


def draw_masks(generator: random.Random) -> Plain:
    """Draw sentences of different lengths for each device, one of them empty.

    The longest sentence fills its row only in the first case.
    """
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
            mask = from_elsewhere(case["device"], padding_mask, lengths, case["size"])
        masks.append({**describe(mask), "lengths": lengths.tolist()})
    return masks


def judge_masks(masks: Plain, cases: Plain) -> Verdict:
    for mask, case in zip(masks, cases, strict=True):
        lengths, size, device = case["lengths"], case["size"], case["device"]
        if mask["type"] != "Tensor":
            return wrong_type(mask["type"], "a tensor")
        if mask["device"] != device:
            return not_yet(
                f"the lengths are on {device}, and your mask is on {mask['device']}. "
                "What is lengths.device?"
            )
        if mask["dtype"] != "torch.bool" or mask["shape"] != [len(lengths), size]:
            return not_yet(
                f"expected a mask of dtype torch.bool and shape [{len(lengths)}, {size}], "
                f"got dtype {mask['dtype']} and shape {mask['shape']}."
            )
        if mask["values"] != [position < length for length in lengths for position in range(size)]:
            return not_yet(
                f"for lengths {lengths} and size {size} some values are wrong. "
                "Row i starts with lengths[i] times True. The other values are False."
            )
        if mask["lengths"] != lengths:
            return not_yet(
                "the mask is right, but your function changed the lengths. "
                f"They were {lengths} and are now {mask['lengths']}."
            )
    return right("Your function works on every device.")


# 01.2: run work on a device, then restore the current device


class Interrupted(Exception):  # noqa: N818 (the learner made no error)
    """Exception that the work of some cases raises."""


def draw_work(generator: random.Random) -> Plain:
    """Draw work for each pair of devices, also pairs in which the device is already current.

    The work of one case raises an exception. The work of the others returns a result. Some results
    are false in an `if`.
    """
    cases: list[Plain] = []
    for before, on in product((0, 1), repeat=2):
        cases.append({"before": before, "on": on, "raises": True, "result": None})
        for result in (None, 0, "", "a tensor", generator.randint(1, 999)):
            cases.append({"before": before, "on": on, "raises": False, "result": result})
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
        if result is tensor:
            result = "a tensor"
        elif not isinstance(result, int | str | None):
            result = f"another {type(result).__name__}"
        observations.append(
            {"seen": seen, "after": torch.cuda.current_device(), "result": result, "raised": raised}
        )
    return observations


# what the work notes instead of its device, unless the default stream is current
ANOTHER_STREAM = -1


def _work(case: Plain, seen: list[int], tensor: torch.Tensor) -> Any:
    """Return a function that adds its current device to `seen`, and returns or raises.

    `case` says what the function returns or raises. `tensor` is the tensor that it may return.
    """

    def work() -> Any:
        if torch.cuda.current_stream() == torch.cuda.default_stream():
            seen.append(torch.cuda.current_device())
        else:
            seen.append(ANOTHER_STREAM)
        if case["raises"]:
            raise Interrupted(f"while GPU {seen[-1]} was current")
        if case["result"] == "a tensor":
            return tensor
        return case["result"]

    return work


def judge_work(observations: Plain, cases: Plain) -> Verdict:
    for observed, case in zip(observations, cases, strict=True):
        before, on = case["before"], case["on"]
        if observed["seen"] != [on]:
            ran = _how_work_ran(observed["seen"])
            return not_yet(f"expected work to run once on device {on}. It {ran}.")
        if case["raises"] and observed["raised"] is None:
            return not_yet(
                "work raised an exception, and your function did not pass it on. "
                "The caller should get it."
            )
        if observed["after"] != before:
            how = "after work raised an exception" if case["raises"] else "afterwards"
            return not_yet(f"the current device was {before} before and {observed['after']} {how}.")
        if not case["raises"] and observed["result"] != case["result"]:
            return not_yet(
                f"work returned {case['result']!r}, and your function "
                f"returned {observed['result']!r}."
            )
    return right("The device is restored, also after an exception.")


def _how_work_ran(seen: list[int]) -> str:
    if not seen:
        return "did not run"
    if len(seen) > 1:
        return "ran more than once"
    if seen == [ANOTHER_STREAM]:
        return "ran on another stream"
    return f"ran on device {seen[0]}"


# 01.3: count the bytes of a model on each device

ITEM_BYTES = {"float32": 4, "float16": 2, "float64": 8, "bool": 1}


class Masked(nn.Module):
    """Layer with a buffer that `state_dict()` does not contain."""

    def __init__(self, size: int, device: str) -> None:
        super().__init__()
        mask = torch.ones(size, size, dtype=torch.bool, device=device)
        self.register_buffer("mask", mask, persistent=False)


def draw_models(generator: random.Random) -> Plain:
    """Draw the layers of three models: one on all three devices, two on two devices each.

    In the first model, two direct children of the model share a weight.
    """
    on_all, *on_two = [
        _layers(generator, generator.sample(on, k=len(on)) * 2)
        for on in (DEVICES, DEVICES[1:], DEVICES[::2])
    ]
    return [sorted(on_all, key=lambda layer: layer["kind"] == "shared"), *on_two]


def _layers(generator: random.Random, devices: list[str]) -> Plain:
    sizes = [generator.randint(2, 9) for _ in range(8)]
    layers: list[Plain] = []
    for index, dtype in enumerate(["float32", "float16", "float64"]):
        layers.append(_linear("linear", devices[index], dtype, sizes[index], sizes[index + 1]))
    layers += [
        {"kind": "norm", "device": devices[0], "features": sizes[4]},
        {"kind": "mask", "device": devices[1], "size": sizes[5]},
        _linear("shared", devices[2], "float32", sizes[6], sizes[7]),
    ]
    generator.shuffle(layers)
    return layers


def _linear(kind: str, device: str, dtype: str, inputs: int, outputs: int) -> Plain:
    return {"kind": kind, "device": device, "dtype": dtype, "in": inputs, "out": outputs}


def observe_models(bytes_per_device: Any, models: Plain) -> Plain:
    """Call the answer for each model, whose layers are nested in one another."""
    observations: list[Plain] = []
    for layers in models:
        model = nn.Sequential()
        for layer in layers:
            model = nn.Sequential(*_modules(layer), model)
        answer = bytes_per_device(model)
        counted, keys = None, []
        if isinstance(answer, dict):
            counted = {str(device): one_number(count) for device, count in answer.items()}
            keys = sorted({type(device).__name__ for device in answer})
        observations.append({"type": type(answer).__name__, "bytes": counted, "keys": keys})
    return observations


def _modules(layer: Plain) -> list[nn.Module]:
    if layer["kind"] == "norm":
        norm = nn.BatchNorm1d(layer["features"], device=layer["device"])
        return [norm, norm]  # used twice, but its bytes exist once
    if layer["kind"] == "mask":
        return [Masked(layer["size"], layer["device"])]
    linear = nn.Linear(
        layer["in"], layer["out"], device=layer["device"], dtype=getattr(torch, layer["dtype"])
    )
    linear.weight.grad = torch.zeros_like(linear.weight)  # gradients do not count
    if layer["kind"] == "linear":
        return [linear]
    twin = nn.Linear(layer["in"], layer["out"], bias=False, device=layer["device"])
    twin.weight = linear.weight.requires_grad_(False)
    return [linear, twin]


def expected_bytes(layers: Plain) -> dict[str, int]:
    """Return the bytes of the parameters and buffers on each device.

    BatchNorm1d has weight, bias, running mean and running variance in float32, and a count of
    batches in int64.
    """
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
                f"the model is on {', '.join(sorted(expected))}, and "
                f"your dict has {', '.join(sorted(counted)) or 'nothing'}."
            )
        if observed["keys"] != ["str"]:
            return not_yet(
                'expected keys that are strings, such as "cuda:0". The keys of your dict are of '
                f"type {' and '.join(observed['keys'])}. What does str(device) return?"
            )
        wrong = [device for device in sorted(expected) if counted[device] != expected[device]]
        if wrong:
            actual, yours = expected[wrong[0]], counted[wrong[0]]
            hint = "Are parameters all that a layer keeps, and do all dtypes have the same size?"
            if yours is not None and yours > actual:
                hint = (
                    "Did you count a shared parameter or buffer twice, "
                    "or use one size for all dtypes?"
                )
            return not_yet(
                f"on {wrong[0]} the model has {actual} bytes, and you counted {yours}. {hint}"
            )
    return right()


# 01.4: copy while other work runs

# On real GPUs the best of several tries counts. The copies are also larger there, because a copy
# must take much longer than the check's own calls (0.5 ms on the host of an H100).
TRIES = 3
REAL_SIZE_FACTOR = 8


def draw_copies(generator: random.Random) -> Plain:
    """Draw cases in which the copy takes twice as long as the work, and one with half as long.

    So no fixed waiting time suits all cases.
    """
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
    """Measure the seconds of a pinned copy, of the work, and of the answer that does both.

    On real GPUs the answer runs several times for each case.
    """
    observations: list[Plain] = []
    count, size_factor = TRIES, REAL_SIZE_FACTOR
    if machine.in_use().virtual:
        count, size_factor = 1, 1
    for case in cases:
        device = torch.device(case["device"])
        length = case["numbers"] * size_factor
        numbers = torch.arange(length, dtype=torch.int32).add_(case["first"])
        source = numbers.pin_memory()
        copy = min(_seconds(partial(source.to, device), device) for _ in range(count))
        tries = []
        for _ in range(count):
            calls: list[float] = []

            def work(calls: list[float] = calls, seconds: float = case["work"] * copy) -> None:
                calls.append(_keep_busy(seconds))

            with during(f"a pinned tensor and {device}"):
                start = machine.host_time()
                result = from_elsewhere(case["device"], copy_while, source, device, work)
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
    """Return the host seconds from the call of `work` until `device` has finished it."""
    torch.cuda.synchronize(device)
    start = machine.host_time()
    work()
    torch.cuda.synchronize(device)
    return machine.host_time() - start


def _keep_busy(seconds: float) -> float:
    """Keep the CPU busy for at least `seconds`, and return the seconds that this really took."""
    numbers = torch.ones(1 << 15)  # PyTorch would share the work on a larger tensor among threads.
    start = machine.host_time()
    while machine.host_time() - start < seconds:
        torch.add(numbers, numbers)
    return machine.host_time() - start


def judge_copies(observations: Plain, cases: Plain) -> Verdict:
    for observed, case in zip(observations, cases, strict=True):
        for attempt in observed["tries"]:
            if attempt["calls"] != 1:
                return not_yet(
                    "expected work to run once before your function returns. "
                    f"It ran {plural(attempt['calls'], 'time')}."
                )
            if "same" not in attempt:
                return wrong_type(attempt["type"], "the copy")
            if attempt["device"] != case["device"]:
                return not_yet(
                    f"expected a copy on {case['device']}, got one on {attempt['device']}."
                )
            if attempt["shape"] != observed["shape"]:
                return not_yet(
                    f"expected a copy of shape {observed['shape']}, got shape {attempt['shape']}."
                )
            if not attempt["same"]:
                return not_yet("the copy's values or its dtype differ from the source's.")
        copy = observed["copy"]
        if not min(attempt["left"] for attempt in observed["tries"]) <= copy / 4:
            return not_yet(
                f"your function returned before the copy on {case['device']} was complete. "
                f"Which call waits for a GPU that is not the current one?"
            )
        best = min(observed["tries"], key=lambda attempt: attempt["total"])
        took = (
            f"copy {copy * 1e3:.2f} ms, work {best['work'] * 1e3:.2f} ms, "
            f"together {best['total'] * 1e3:.2f} ms"
        )
        if not best["total"] <= max(copy, best["work"]) + min(copy, best["work"]) / 2:
            return not_yet(
                f"the copy ({copy * 1e3:.2f} ms) and the work ({best['work'] * 1e3:.2f} ms) took "
                f"{best['total'] * 1e3:.2f} ms together. They ran one after the other. "
                "Which argument of Tensor.to makes it return at once, and when do you wait?"
            )
    return right(f"{took.capitalize()}.")


# 01.5: move a nested batch, but copy no tensor that is on the device already
# A node of a batch is ["dict", [[key, node], …]], ["list", [node, …]], ["tuple", [node, …]],
# ["tensor", values, dtype, device] or ["value", value].


def draw_batch(generator: random.Random) -> Plain:
    """Draw a batch to move to the CPU, and one to move to a GPU.

    Each level has a tensor to move, a tensor on its device already, other values, and a nested
    container of another kind.
    """
    targets = ["cpu", generator.choice(DEVICES[1:])]
    return [
        {"device": target, "batch": _nested(generator, target, tops)}
        for target, tops in zip(targets, ("tuple", "dict"), strict=True)
    ]


def _nested(generator: random.Random, target: str, top: str) -> Plain:
    others = cycle(generator.sample([device for device in DEVICES if device != target], k=2))
    # In the two batches together, each kind of container contains each other kind.
    kinds = cycle(["list", "dict", "tuple"] if top == "tuple" else ["list", "tuple", "dict"])
    # Of each dtype there are tensors to move and tensors that stay.
    dtypes = cycle(generator.sample(["float32", "float16", "int64"], k=3))

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
        if kind == "dict":  # One key is a number, not a string.
            keys = [level, *(f"{key}{level}" for key in "abcdefghi")]
            inside = [[key, child] for key, child in zip(keys, inside, strict=True)]
        node = [kind, inside]
    return node


def observe_batch(move: Any, cases: Plain) -> Plain:
    """Return the content of each batch before and after the call, and of the moved batch."""
    observations = []
    for case in cases:
        batch, device = _build(case["batch"]), torch.device(case["device"])
        given = list(_content(batch))
        with during(f"a batch of dicts, lists and tuples, and {device}"):
            moved = from_elsewhere(case["device"], move, batch, device)
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
    if kind == "list":
        return [_build(child) for child in content]
    if kind == "tuple":
        return tuple(_build(child) for child in content)
    if kind == "tensor":
        return torch.tensor(content, dtype=getattr(torch, node[2]), device=node[3])
    return content


def _content(value: Any, path: str = "batch") -> Iterator[Plain]:
    """Yield [path, kind, content] of `value` and of everything inside it.

    A tensor's entry also has its device and the address of its memory.
    """
    if isinstance(value, torch.Tensor):
        content = f"{value.tolist()} of {value.dtype}"
        yield [path, "tensor", content, str(value.device), value.data_ptr()]
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
            difference = _difference(was, moved.get(path), case["device"])
            if difference is not None:
                return not_yet(f"{path} {difference}")
        if observed["batch"] != observed["given"]:
            return not_yet(
                "your function changed the batch that it was given. "
                "Build a new batch and leave the given one unchanged."
            )
    return right("Tensors that were on the device already were not copied.")


def _difference(was: Plain, now: Plain, device: str) -> str | None:
    """Return what is wrong with an entry of the moved batch, or None.

    `was` and `now` are the entry before and after, and `device` is where its tensors should be. The
    text follows the entry's path in a message.
    """
    if now is None:
        return "is missing."
    if was[0] != now[0]:
        return f"was of type {was[0]} and is now of type {now[0]}."
    if was[0] == "tensor" and now[2] != device:
        return f"was expected on {device} and is on {now[2]}."
    if was[1] != now[1]:
        if isinstance(was[1], int):
            return f"had {was[1]} entries and now has {now[1]}."
        return f"was {was[1]} and is now {now[1]}."
    if was[0] == "tensor" and was[2] == device and was[3] != now[3]:
        return f"was on {device} already, but was copied. Does Tensor.to copy in that case?"
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
