"""Checks of lesson 01, device basics."""

import random
from typing import Any

import torch

from labkit import machine
from labkit.checks.checking import Check, Plain, Verdict, describe, during, not_yet, quote, right

DEVICES = ("cpu", "cuda:0", "cuda:1")


# 01.1: a mask is made where its lengths are


def draw_masks(generator: random.Random) -> Plain:
    devices = generator.sample(DEVICES, k=3)
    size = generator.randint(4, 7)
    return [{"device": device, "size": size, "lengths": [generator.randint(0, size) for _ in range(3)]} for device in devices]


def observe_masks(padding_mask: Any, cases: Plain) -> Plain:
    """The mask for each case; the current device is never the one that a case's tensor is on."""
    masks = []
    for case in cases:
        lengths = torch.tensor(case["lengths"], device=case["device"])
        with torch.cuda.device(0 if case["device"] == "cuda:1" else 1), during(f"lengths on {case['device']}"):
            masks.append(describe(padding_mask(lengths, case["size"])))
    return masks


def judge_masks(masks: Plain, cases: Plain) -> Verdict:
    for mask, case in zip(masks, cases, strict=True):
        lengths, size, device = case["lengths"], case["size"], case["device"]
        if mask["type"] != "Tensor":
            return not_yet(f"your function returned {mask['type']}, not a tensor.")
        if mask["device"] != device:
            return not_yet(f"the lengths were on {device}, your mask is on {mask['device']}. What does lengths.device tell you?")
        if mask["dtype"] != "torch.bool" or mask["shape"] != [len(lengths), size]:
            return not_yet(f"a mask of torch.bool and shape [{len(lengths)}, {size}] was due; yours is {mask['dtype']}, {mask['shape']}.")
        if mask["values"] != [position < length for length in lengths for position in range(size)]:
            return not_yet(f"for lengths {lengths} and size {size} some values are wrong. Row i has lengths[i] times True, then False.")
    return right("One function serves every device.")


# 01.2: a nested batch is moved, and what is there already stays
#
# A node of a batch is ["dict", [[key, node], …]], ["list", [node, …]], ["tuple", [node, …]], ["tensor", values, device] or
# ["value", value].


def draw_batch(generator: random.Random) -> Plain:
    target = generator.choice(DEVICES[1:])
    other = "cuda:0" if target == "cuda:1" else "cuda:1"

    def tensor(device: str) -> Plain:
        return ["tensor", [float(generator.randint(-9, 9)) for _ in range(3)], device]

    inside = ["list", [tensor(generator.choice(DEVICES)) for _ in range(generator.randint(1, 3))]]
    entries = [
        ["inputs", ["tuple", [tensor("cpu"), tensor(target), ["dict", [["deeper", inside]]]]]],
        ["targets", ["list", [tensor(other), tensor(target)]]],
        ["names", ["list", [["value", f"image {generator.randint(0, 99)}"], ["value", generator.randint(0, 99)]]]],
    ]
    generator.shuffle(entries)
    return {"device": target, "batch": ["dict", entries]}


def observe_batch(move: Any, inputs: Plain) -> Plain:
    """The tree that `move` returns, which of its tensors are the very ones given, and the batch as it is afterwards."""
    given: set[int] = set()
    batch = _build(inputs["batch"])
    _tree(batch, given, collect=True)
    with torch.cuda.device(1 - torch.device(inputs["device"]).index), during("a batch of dicts, lists and tuples"):
        moved = move(batch, torch.device(inputs["device"]))
    return {"moved": _tree(moved, given), "batch": _tree(batch, given)}


def _build(node: Plain) -> Any:
    kind, content = node[0], node[1]
    if kind == "dict":
        return {key: _build(child) for key, child in content}
    if kind in ("list", "tuple"):
        return [_build(child) for child in content] if kind == "list" else tuple(_build(child) for child in content)
    return torch.tensor(content, device=node[2]) if kind == "tensor" else content


def _tree(value: Any, given: set[int], collect: bool = False) -> Plain:
    """`value` as a node; a tensor's node says whether it is one of `given`, to which `collect` adds it."""
    if isinstance(value, dict):
        return ["dict", [[key, _tree(child, given, collect)] for key, child in value.items()]]
    if isinstance(value, list | tuple):
        return ["list" if isinstance(value, list) else "tuple", [_tree(child, given, collect) for child in value]]
    if isinstance(value, torch.Tensor):
        if collect:
            given.add(id(value))
        return ["tensor", value.detach().cpu().tolist(), str(value.device), id(value) in given]
    return ["value", value if isinstance(value, str | int) else type(value).__name__]


def judge_batch(observed: Plain, inputs: Plain) -> Verdict:
    trouble = _difference(inputs["batch"], observed["moved"], inputs["device"], "batch")
    if trouble is None and (_difference(inputs["batch"], observed["batch"], None, "batch") is not None):
        trouble = "the batch you were given has changed; build a new one and leave it as it was."
    return not_yet(trouble) if trouble else right("Tensors that were there already were not copied.")


def _difference(given: Plain, found: Plain, target: str | None, path: str) -> str | None:
    """What is wrong with `found`, the node that `given` became on `target` (None: where each tensor was), in a sentence."""
    kind = given[0]
    if found[0] != kind:
        return f"{path} was a {kind} and became a {found[0]}."
    if kind == "value":
        return None if found[1] == given[1] else f"{path} was {given[1]!r} and became {found[1]!r}."
    if kind == "tensor":
        return _tensor_difference(given, found, target or given[2], path)
    named = kind == "dict"
    if len(found[1]) != len(given[1]) or (named and [key for key, _ in found[1]] != [key for key, _ in given[1]]):
        return f"{path} had {len(given[1])} entries; it now has others."
    pairs = zip(given[1], found[1], strict=True)
    steps = [(f"{path}[{a[0]!r}]", a[1], b[1]) for a, b in pairs] if named else [(f"{path}[{i}]", a, b) for i, (a, b) in enumerate(pairs)]
    return next(filter(None, (_difference(before, after, target, name) for name, before, after in steps)), None)


def _tensor_difference(given: Plain, found: Plain, device: str, path: str) -> str | None:
    if found[2] != device:
        return f"{path} is on {found[2]}, not on {device}."
    if found[1] != given[1]:
        return f"{path} has other values than before."
    if given[2] == device and not found[3]:
        return f"{path} was on {device} already and was copied all the same. Does Tensor.to copy then?"
    return None


# 01.3: the bytes of a model on each device

ITEM_BYTES = {"float32": 4, "float16": 2, "float64": 8}


def draw_model(generator: random.Random) -> Plain:
    """Layers in a random order: on two devices at least, of two dtypes at least, one with buffers, and one weight that two layers share."""
    first, second = generator.sample(DEVICES, k=2)
    sizes = [generator.randint(2, 9) for _ in range(5)]
    layers = [
        {"kind": "linear", "device": first, "dtype": "float32", "in": sizes[0], "out": sizes[1]},
        {"kind": "linear", "device": second, "dtype": generator.choice(["float16", "float64"]), "in": sizes[1], "out": sizes[2]},
        {"kind": "norm", "device": generator.choice([first, second]), "features": sizes[3]},
        {"kind": "shared", "device": second, "dtype": "float32", "in": sizes[4], "out": sizes[4]},
    ]
    generator.shuffle(layers)
    return layers


def observe_model(bytes_per_device: Any, layers: Plain) -> Plain:
    modules: list[torch.nn.Module] = []
    for layer in layers:
        if layer["kind"] == "norm":
            modules.append(torch.nn.BatchNorm1d(layer["features"], device=layer["device"]))
            continue
        dtype = getattr(torch, layer["dtype"])
        modules.append(torch.nn.Linear(layer["in"], layer["out"], device=layer["device"], dtype=dtype))
        if layer["kind"] == "shared":
            modules.append(torch.nn.Linear(layer["in"], layer["out"], bias=False, device=layer["device"], dtype=dtype))
            modules[-1].weight = modules[-2].weight
    answer = bytes_per_device(torch.nn.Sequential(*modules))
    if not isinstance(answer, dict):
        return {"type": type(answer).__name__}
    return {"type": "dict", "bytes": {str(device): int(count) for device, count in answer.items()}}


def expected_bytes(layers: Plain) -> dict[str, int]:
    """Bytes on each device. BatchNorm1d: weight, bias, running mean and variance in float32, and one int64 that counts batches."""
    total: dict[str, int] = {}
    for layer in layers:
        linear = layer["kind"] != "norm"
        count = (layer["in"] + 1) * layer["out"] * ITEM_BYTES[layer["dtype"]] if linear else 4 * layer["features"] * 4 + 8
        total[layer["device"]] = total.get(layer["device"], 0) + count
    return total


def judge_model(observed: Plain, layers: Plain) -> Verdict:
    if observed["type"] != "dict":
        return not_yet(f"your function returned {observed['type']}, not a dict from device to bytes.")
    expected = expected_bytes(layers)
    if observed["bytes"] == expected:
        return right()
    if observed["bytes"].keys() != expected.keys():
        return not_yet(f"the model is on {', '.join(sorted(expected))}; your dict has {', '.join(sorted(observed['bytes'])) or 'nothing'}.")
    device = next(name for name in sorted(expected) if observed["bytes"][name] != expected[name])
    hint = "Do all dtypes have the same size? Does BatchNorm keep more than its parameters? Did you count a shared weight twice?"
    return not_yet(f"on {device} the model has {expected[device]} bytes, you counted {observed['bytes'][device]}. {hint}")


# 01.4: work runs on a device, and the current device is put back


class Interrupted(Exception):  # noqa: N818 (it is no error of the learner's)
    """What the work raises in some of the tries."""


def draw_work(generator: random.Random) -> Plain:
    cases = [
        {"before": before, "on": on, "raises": raises, "result": generator.randint(1, 999)}
        for before, on, raises in [(0, 1, False), (1, 0, False), (0, 1, True), (1, 0, True)]
    ]
    generator.shuffle(cases)
    return cases


def observe_work(on_device: Any, cases: Plain) -> Plain:
    observations = []
    for case in cases:
        seen: list[int] = []

        def work(case: Plain = case, seen: list[int] = seen) -> int:
            seen.append(torch.cuda.current_device())
            if case["raises"]:
                raise Interrupted(f"try {case['result']}")
            return case["result"]

        torch.cuda.set_device(case["before"])
        result, raised = None, None
        try:
            result = on_device(case["on"], work)
        except Interrupted as error:
            raised = quote(error)
        result = result if isinstance(result, int) else None
        observations.append({"seen": seen, "after": torch.cuda.current_device(), "result": result, "raised": raised})
    return observations


def judge_work(observations: Plain, cases: Plain) -> Verdict:
    for observed, case in zip(observations, cases, strict=True):
        before, on = case["before"], case["on"]
        if observed["seen"] != [on]:
            ran = f"saw device {observed['seen'][0]}" if observed["seen"] else "did not run"
            ran = "ran more than once" if len(observed["seen"]) > 1 else ran
            return not_yet(f"work was to run once on device {on}; it {ran}.")
        if case["raises"] and observed["raised"] is None:
            return not_yet("work raised an exception, and your function kept it to itself. Let it go up to the caller.")
        if observed["after"] != before:
            how = "after work raised an exception" if case["raises"] else "afterwards"
            return not_yet(f"the current device was {before} before and {observed['after']} {how}.")
        if not case["raises"] and observed["result"] != case["result"]:
            return not_yet("your function did not return what work returned.")
    return right("The device was put back, also after an exception.")


# 01.5: a copy and other work at the same time

COPY_BYTES = 32 << 20
TRIES = 3  # on a real GPU the best of them counts


def draw_copy(generator: random.Random) -> Plain:
    count = COPY_BYTES // 4
    return {"device": generator.choice(DEVICES[1:]), "first": generator.randint(1, 999), "sampled": generator.sample(range(count), k=5)}


def observe_copy(copy_while: Any, inputs: Plain) -> Plain:
    """Seconds of a plain pinned copy, of the work, and of both in the answer's hands; the best of several tries."""
    device = torch.device(inputs["device"])
    source = torch.arange(COPY_BYTES // 4, dtype=torch.int32).add_(inputs["first"]).pin_memory()
    copy = min(_seconds(lambda: source.to(device), device) for _ in range(TRIES))
    tries = []
    for _ in range(TRIES):
        calls: list[float] = []
        start = machine.host_time()
        result = copy_while(source, device, lambda calls=calls: calls.append(_keep_busy(copy / 2)))
        returned = machine.host_time()
        torch.cuda.synchronize(device)
        left = machine.host_time() - returned
        if not isinstance(result, torch.Tensor):
            return {"type": type(result).__name__}
        values = result.detach().flatten().cpu()[inputs["sampled"]].tolist() if result.shape == source.shape else []
        tried = {"total": returned - start, "left": left, "calls": len(calls), "work": sum(calls)}
        tries.append({**tried, "device": str(result.device), "shape": list(result.shape), "values": values})
        del result
    return {"type": "Tensor", "copy": copy, "tries": tries}


def _seconds(work: Any, device: torch.device) -> float:
    torch.cuda.synchronize(device)
    start = machine.host_time()
    work()
    torch.cuda.synchronize(device)
    return machine.host_time() - start


def _keep_busy(seconds: float) -> float:
    """Let the CPU work for `seconds` on the machine's clock; return how long it took."""
    numbers = torch.ones(1 << 12)
    start = machine.host_time()
    while machine.host_time() - start < seconds:
        torch.add(numbers, numbers)
    return machine.host_time() - start


def judge_copy(observed: Plain, inputs: Plain) -> Verdict:
    if observed["type"] != "Tensor":
        return not_yet(f"your function returned {observed['type']}, not the copy.")
    expected = [inputs["first"] + index for index in inputs["sampled"]]
    for attempt in observed["tries"]:
        if attempt["calls"] != 1:
            return not_yet(f"work was to run once; it ran {attempt['calls']} times.")
        if attempt["device"] != inputs["device"]:
            return not_yet(f"the copy is on {attempt['device']}, not on {inputs['device']}.")
        if attempt["shape"] != [COPY_BYTES // 4]:
            return not_yet(f"the copy's shape is {attempt['shape']}, the source's {[COPY_BYTES // 4]}.")
        if attempt["values"] != expected:
            return not_yet("the copy has other values than the source.")
    copy = observed["copy"]
    if not min(attempt["left"] for attempt in observed["tries"]) <= copy / 4:
        return not_yet("your function returned before the copy had arrived. What waits for a GPU?")
    best = min(observed["tries"], key=lambda attempt: attempt["total"])
    if best["total"] > copy + best["work"] / 2:
        return not_yet(
            f"a copy of {copy * 1e3:.2f} ms and work of {best['work'] * 1e3:.2f} ms took {best['total'] * 1e3:.2f} ms together: "
            "they ran one after the other. Which argument of Tensor.to lets it return at once, and when do you wait?"
        )
    return right(f"Copy {copy * 1e3:.2f} ms, work {best['work'] * 1e3:.2f} ms, together {best['total'] * 1e3:.2f} ms.")


CHECKS = [
    Check("01.1", draw_masks, observe_masks, judge_masks, gpus=2),
    Check("01.2", draw_batch, observe_batch, judge_batch, gpus=2),
    Check("01.3", draw_model, observe_model, judge_model, gpus=2),
    Check("01.4", draw_work, observe_work, judge_work, gpus=2),
    Check("01.5", draw_copy, observe_copy, judge_copy, gpus=2),
]
