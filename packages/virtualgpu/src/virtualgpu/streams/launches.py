"""Launches that may not have run yet, with what is needed to compute them again."""

import heapq
import itertools
import sys
import weakref
from types import FrameType
from typing import Any

import torch
from torch._C import _DisableTorchDispatch

from virtualgpu import hardware
from virtualgpu.clock.machine_clock import StreamTime
from virtualgpu.ops.call import Call
from virtualgpu.source_lines import is_users
from virtualgpu.streams.accesses import AccessLog, Region, at, has_region, mapped, whole
from virtualgpu.tensor import plain_set, tensors

UserLine = tuple[str, int, str]  # file, line number, function
_numbers = itertools.count()


class Arrival:
    """Values that a copy brings to the host.

    They appear in `target` when the host has waited for the copy, which is launch `count` of its
    stream.
    """

    __slots__ = ("count", "stream", "target", "value")

    def __init__(self, stream: StreamTime, target: torch.Tensor, value: torch.Tensor) -> None:
        self.stream = stream
        self.count = stream.count
        self.target = target
        self.value = value

    def arrive(self) -> None:
        """Write the copied values into the target, because the host has waited for the copy."""
        # Outside inference mode PyTorch forbids writing to an inference tensor.
        inference = torch.inference_mode(self.target.is_inference())
        with _DisableTorchDispatch(), inference:
            self.target.copy_(self.value)


class Launch:
    """One operator on one stream.

    count: the number of the last kernel of the operator on its stream, infinite for a collective
        that has not started
    of_nccl: whether it runs on NCCL's own stream
    seconds: the host's time at the launch
    start, end: when the work runs on the machine's clock
    call: the call with copies of its arguments, as long as the host has memory for them
    nbytes: the bytes of these copies
    logs: the access logs of the kept arguments, by the argument's id
    outputs: for each output a weak reference to its storage or its Arrival, its log and its region
    dependents: the launches that read what this one wrote
    """

    __slots__ = (
        "call", "count", "dependents", "end", "line", "logs", "name", "nbytes", "number",
        "of_nccl", "outputs", "seconds", "start", "stream",
    )  # fmt: skip

    def __init__(
        self, stream: StreamTime, name: str, seconds: float, line: UserLine | None
    ) -> None:
        self.stream = stream
        self.name = name
        self.seconds = seconds
        self.line = line
        self.number = next(_numbers)
        self.count: float = stream.count + 1
        self.of_nccl = False
        self.start = self.end = seconds
        self.call: Call | None = None
        self.nbytes = 0
        self.logs: dict[int, AccessLog] = {}
        self.outputs: list[tuple[Any, AccessLog, Region]] = []
        self.dependents: list[Launch] = []

    @property
    def device(self) -> int:
        """The index of the GPU that runs the launch."""
        return self.stream.device_index

    def forget(self) -> None:
        """Drop the copies of the launch's arguments, so that it cannot be computed again."""
        self.call, self.logs, self.nbytes = None, {}, 0
        self.outputs, self.dependents = [], []

    def run_again(self, changed: dict[AccessLog, torch.Tensor]) -> None:
        """Compute this launch and its dependents again, and store their results.

        `changed` holds, by access log, the bytes of memory blocks that differ from those that the
        launch read.
        """
        waiting = [(self.number, self)]
        seen = {self}
        results: dict[AccessLog, tuple[Launch, Any, Region, torch.Tensor]] = {}
        while waiting:
            _, launch = heapq.heappop(waiting)
            for target, log, region, value in launch._computed(changed):
                changed[log] = _content(region, value)
                results[log] = launch, target, region, value
            for later in launch.dependents:
                if later not in seen:
                    seen.add(later)
                    heapq.heappush(waiting, (later.number, later))
        for log, (launch, target, region, value) in results.items():
            last = log.writer(region)
            if last is None or last.launch is launch:  # nobody has written there since
                _put(target, region, value)

    def _computed(
        self, changed: dict[AccessLog, torch.Tensor]
    ) -> list[tuple[Any, AccessLog, Region, torch.Tensor]]:
        """Return the outputs of the launch, each with the values that follow from `changed`.

        `changed` is that of `run_again`. Returns [] if PyTorch cannot compute the operator on the
        CPU.
        """
        if self.call is None or torch.Tag.nondeterministic_seeded in self.call.func.tags:
            return []
        gpu = hardware.machine().gpus[self.device]

        def argument(x: torch.Tensor) -> torch.Tensor:
            content = None
            if id(x) in self.logs:
                content = changed.get(self.logs[id(x)])
            if content is None:
                content = whole(x)
            plain: Any = at(content.clone(), Region.of(x))
            plain._gpu = gpu  # kernels ask whether it computes in TF32
            return plain

        with _DisableTorchDispatch():
            args = mapped(self.call.args, argument)
            kwargs = mapped(self.call.kwargs, argument)
            call = Call(self.call.op, args, kwargs)
            try:
                made = call.on_cpu()
            except (RuntimeError, NotImplementedError):
                return []
            values = outputs_of(call, made)
        if [tuple(x.size()) for x in values] != [region.size for _, _, region in self.outputs]:
            return []
        return [(*output, value) for output, value in zip(self.outputs, values, strict=True)]


def outputs_of(call: Call, result: Any) -> list[torch.Tensor]:
    """Return the tensors that an operator has written: first arguments, then new tensors.

    Each is returned once.
    """
    found = [x for x in call.written() if has_region(x)]
    storages = {x.untyped_storage()._cdata for x in found}
    for x in tensors(result):
        if has_region(x) and x.untyped_storage()._cdata not in storages:
            found.append(x)
    return found


def reference(tensor: torch.Tensor) -> Any:
    """Return a weak reference to the tensor's storage, which does not keep its memory alive."""
    return weakref.ref(tensor.untyped_storage())


def _content(region: Region, value: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a storage in which `value` is in `region`, and all other bytes are 0."""
    with _DisableTorchDispatch():
        if Region.of(value) == region:
            return whole(value)
        content = torch.zeros(region.bytes()[1], dtype=torch.uint8, device="cpu")
        at(content, region).copy_(value)
        return content


def _put(target: Any, region: Region, value: torch.Tensor) -> None:
    """Store a new value for an output of a launch.

    `target` is an Arrival, or a weak reference to a storage in which the value goes to `region`.
    """
    if isinstance(target, Arrival):
        target.value = value
        return
    storage = target()
    if storage is not None:
        with _DisableTorchDispatch():
            empty = torch.empty(0, dtype=region.dtype, device="cpu")
            plain_set(empty, storage, *region[:3]).copy_(value)


def user_line() -> UserLine | None:
    """Return the innermost running line of the user's code, or None."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return None
    return frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
