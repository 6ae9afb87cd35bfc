"""Calls of PyTorch's operators with a tensor on the wrong device, on virtual GPUs and fake tensors.

PyTorch's own database gives the operators and their arguments. In each call, one tensor is on
the CPU and the others are on a GPU, or the other way round. Fake tensors compute nothing, but C++
sees CUDA tensors, so that its own checks run and raise CUDA's words.

Prints, as JSON, a list of [operator, kind, pattern, finding, on fake tensors, on a virtual GPU].
"""

import json
import sys
import types
import unittest
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

import virtualgpu

try:
    import expecttest  # noqa: F401
except ImportError:  # the database needs it only for a class of tests
    stand_in = types.ModuleType("expecttest")
    stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    stand_in.assert_expected_inline = None  # type: ignore[attr-defined]
    sys.modules["expecttest"] = stand_in

SAMPLES, LOOKED_AT = 3, 40
# These errors are limits of fake tensors, and say nothing about CUDA.
UNKNOWN = ("not linked", "not compiled", "not allocated", "wrapped to wrong device")
# CUDA's kernels and generated code refuse these. Fake tensors do not reach them.
CUDA_ALONE = ("in method wrapper_CUDA", "too many CPU scalars", "Input type (")


class Sample:
    """The arguments of one call.

    `leaves` are the leaves of the tree `spec`, and `tensors` the positions of tensors among them.
    """

    def __init__(self, sample: Any) -> None:
        self.leaves, self.spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        self.tensors = [n for n, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)]

    @property
    def key(self) -> tuple:
        return tuple(self.leaves[n].dim() == 0 for n in self.tensors)

    def patterns(self) -> Iterator[tuple[str, list[str]]]:
        """Yield a name and the devices of the tensors, for each way to call the operator."""
        count = len(self.tensors)
        for odd, others in (("cpu", "cuda"), ("cuda", "cpu")):
            for place in range(count if count > 2 or odd == "cpu" else 0):
                yield f"{odd}@{place}", [odd if n == place else others for n in range(count)]

    def placed(
        self, place: Callable[[torch.Tensor, str], torch.Tensor], devices: list[str]
    ) -> tuple:
        leaves = list(self.leaves)
        for n, device in zip(self.tensors, devices, strict=True):
            leaves[n] = place(leaves[n].detach(), device)
        return pytree.tree_unflatten(leaves, self.spec)


def samples(operator: Any) -> list[Sample]:
    """Return a few calls of an operator that differ in which tensors have no dimensions."""
    kinds = sorted(operator.dtypes, key=str)
    if not kinds:
        return []
    dtype = torch.float32 if torch.float32 in kinds else kinds[0]
    found: dict[tuple, Sample] = {}
    for number, given in enumerate(operator.sample_inputs("cpu", dtype)):
        if number > LOOKED_AT or len(found) == SAMPLES:
            break
        sample = Sample(given)
        if len(sample.tensors) > 1:
            found.setdefault(sample.key, sample)
    return list(found.values())


def outcome(function: Callable, arguments: tuple) -> list[str]:
    first, args, kwargs = arguments
    try:
        result = function(first, *args, **kwargs)
    except Exception as error:
        return ["error", type(error).__name__, str(error).split("\n")[0]]
    devices = {str(x.device) for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor)}
    return ["ok", ",".join(sorted(devices)), ""]


def on_virtual_gpu(x: torch.Tensor, device: str) -> torch.Tensor:
    return x.clone().to(device)


def finding(fake: list[str], virtual: list[str]) -> str | None:
    """Return what is wrong with a virtual GPU's answer, compared with fake tensors, or None."""
    if virtual[0] == "error" and virtual[1] not in ("RuntimeError", "NotImplementedError"):
        return "another error"
    words_known = (
        fake[0] == "error" and "evice" in fake[2] and not any(words in fake[2] for words in UNKNOWN)
    )
    if words_known and virtual[0] == "ok":
        return "accepted"
    if words_known and fake[1] == "RuntimeError" and fake[2] != virtual[2]:
        return "other words"
    if (
        fake[0] == "ok"
        and virtual[0] == "error"
        and not any(words in virtual[2] for words in CUDA_ALONE)
    ):
        return "refused"
    if fake[0] == virtual[0] == "ok" and fake[1] != virtual[1]:
        return "another device"
    return None


def main() -> None:
    from torch.testing._internal.common_methods_invocations import op_db

    warnings.simplefilter("ignore")
    mode = FakeTensorMode()

    def fake(x: torch.Tensor, device: str) -> torch.Tensor:
        if x.layout is not torch.strided:
            return mode.from_tensor(x)
        shape = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta")
        return FakeTensor(mode, shape, torch.device("cuda:0" if device == "cuda" else "cpu"))

    cases: list[tuple[Any, str, Callable, Sample]] = []
    for operator in op_db:
        kinds = {"function": operator.op, "in place": operator.inplace_variant}
        for sample in samples(operator):
            cases += [
                (operator, kind, function, sample)
                for kind, function in kinds.items()
                if function is not None
            ]
    known: list[list[list[str]]] = []
    for _, _, function, sample in cases:
        answers = []
        for _, devices in sample.patterns():
            arguments = sample.placed(fake, devices)
            with mode:
                answers.append(outcome(function, arguments))
        known.append(answers)
    found = []
    virtualgpu.use(gpus=1, like="H200")
    for (operator, kind, function, sample), answers in zip(cases, known, strict=True):
        count = len(sample.tensors)
        alike = [
            outcome(function, sample.placed(on_virtual_gpu, [device] * count))
            for device in ("cuda", "cpu")
        ]
        if any(answer[0] != "ok" for answer in alike):
            continue
        for (pattern, devices), expected in zip(sample.patterns(), answers, strict=True):
            answer = outcome(function, sample.placed(on_virtual_gpu, devices))
            wrong = finding(expected, answer)
            if wrong is not None:
                found.append([operator.name, kind, pattern, wrong, expected, answer])
    print(json.dumps({"calls": sum(map(len, known)), "found": found}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
