"""An operator that was launched and may not have run yet: enough of it to run it again on what it would have met."""

import heapq
import itertools
import sys
import weakref
from types import FrameType
from typing import Any

import torch
from torch._C import _DisableTorchDispatch

from virtualgpu.clock.machine_clock import StreamTime
from virtualgpu.ops.call import Call
from virtualgpu.source_lines import is_users
from virtualgpu.streams.accesses import Place, Region, at, has_region, mapped, whole
from virtualgpu.tensor import plain_set, tensors

UserLine = tuple[str, int, str]  # file, number, function: the file is not read before a race is reported
_numbers = itertools.count()


class Arrival:
    """Values under way to the host: they stand in `target` once the host has waited for the copy, and not before.

    The copy is piece `count` of the work of its stream.
    """

    __slots__ = ("count", "stream", "target", "value")

    def __init__(self, stream: StreamTime, target: torch.Tensor, value: torch.Tensor) -> None:
        self.stream = stream
        self.count = stream.count
        self.target = target
        self.value = value

    def arrive(self) -> None:
        with _DisableTorchDispatch(), torch.inference_mode(self.target.is_inference()):  # else nobody may write into such a tensor
            self.target.copy_(self.value)


class Launch:
    """One operator on one stream.

    `count` numbers the last of its pieces of work on the stream; `seconds` is the host's time at the launch, `start` and `end` that of
    the work on the machine's clock. The arguments are kept as they were, for as long as the host may afford it.
    """

    __slots__ = (
        "call", "count", "dependents", "end", "line", "name", "nbytes", "number", "of_nccl", "outputs", "places", "seconds",
        "start", "stream",
    )  # fmt: skip

    def __init__(self, stream: StreamTime, name: str, seconds: float, line: UserLine | None) -> None:
        self.stream = stream
        self.name = name
        self.seconds = seconds
        self.line = line
        self.number = next(_numbers)
        self.count: float = stream.count + 1  # infinite for a collective that has not begun
        self.of_nccl = False  # on NCCL's own stream
        self.start = self.end = seconds
        self.call: Call | None = None  # with copies of the arguments
        self.nbytes = 0
        self.places: dict[int, Place] = {}  # of the arguments kept, by their id
        self.outputs: list[tuple[Any, Place, Region]] = []  # a weak reference to a storage or an Arrival; the place; what was written
        self.dependents: list[Launch] = []  # those that read what this one wrote

    @property
    def device(self) -> int:
        return self.stream.device_index

    def forget(self) -> None:
        """It cannot be run again any more; who it was is still known."""
        self.call, self.places, self.nbytes = None, {}, 0
        self.outputs, self.dependents = [], []

    def run_again(self, changed: dict[Place, torch.Tensor]) -> None:
        """Compute its results, and all that was made of them since, as if these places had held these bytes when it ran."""
        waiting, seen = [(self.number, self)], {self}
        results: dict[Place, tuple[Launch, Any, Region, torch.Tensor]] = {}
        while waiting:
            _, launch = heapq.heappop(waiting)
            for target, place, region, value in launch._computed(changed):
                changed[place] = _content(region, value)
                results[place] = launch, target, region, value
            for later in launch.dependents:
                if later not in seen:
                    seen.add(later)
                    heapq.heappush(waiting, (later.number, later))
        for place, (launch, target, region, value) in results.items():
            last = place.writer(region)
            if last is None or last.launch is launch:  # else somebody has written there since
                _put(target, region, value)

    def _computed(self, changed: dict[Place, torch.Tensor]) -> list[tuple[Any, Place, Region, torch.Tensor]]:
        """Its outputs with the values that come of the changed places; none if PyTorch cannot say so on the CPU."""
        if self.call is None or torch.Tag.nondeterministic_seeded in self.call.func.tags:
            return []

        def argument(x: torch.Tensor) -> torch.Tensor:
            content = changed.get(self.places[id(x)]) if id(x) in self.places else None
            return at((whole(x) if content is None else content).clone(), Region.of(x))

        with _DisableTorchDispatch():
            call = Call(self.call.op, mapped(self.call.args, argument), mapped(self.call.kwargs, argument))
            try:
                made = call.on_cpu()
            except (RuntimeError, NotImplementedError):
                return []
            values = outputs_of(call, made)
        if [tuple(x.size()) for x in values] != [region.size for _, _, region in self.outputs]:
            return []
        return [(*output, value) for output, value in zip(self.outputs, values, strict=True)]


def outputs_of(call: Call, result: Any) -> list[torch.Tensor]:
    """What an operator has written: arguments, then new tensors, each once."""
    found = [x for x in call.written() if has_region(x)]
    storages = {x.untyped_storage()._cdata for x in found}
    return found + [x for x in tensors(result) if has_region(x) and x.untyped_storage()._cdata not in storages]


def reference(tensor: torch.Tensor) -> Any:
    """A weak reference to the tensor's storage, so that its memory is freed as if nobody remembered it."""
    return weakref.ref(tensor.untyped_storage())


def _content(region: Region, value: torch.Tensor) -> torch.Tensor:
    """The bytes of a storage into which the value was written."""
    with _DisableTorchDispatch():
        if Region.of(value) == region:
            return whole(value)
        content = torch.zeros(region.bytes()[1], dtype=torch.uint8, device="cpu")
        at(content, region).copy_(value)
        return content


def _put(target: Any, region: Region, value: torch.Tensor) -> None:
    if isinstance(target, Arrival):
        target.value = value
    elif (storage := target()) is not None:
        with _DisableTorchDispatch():
            plain_set(torch.empty(0, dtype=region.dtype, device="cpu"), storage, *region[:3]).copy_(value)


def user_line() -> UserLine | None:
    """The innermost line of the user's own that is being run."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
