"""The memory events of a recording in columns: what happened, when, and on which line of Python."""

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from functools import cache
from itertools import count
from types import CodeType, FrameType

import numpy as np

from virtualgpu import front_end
from virtualgpu.source_lines import SourceLine

# PyTorch's names (`device_traces` of torch.cuda.memory._snapshot). A free is requested by the program and completed when no stream
# uses the block any more.
ACTIONS = (
    "alloc",
    "free_requested",
    "free_completed",
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
    "snapshot",
    "oom",
)
ALLOC, FREE_REQUESTED, FREE_COMPLETED, SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP, SNAPSHOT, OOM = range(len(ACTIONS))
ACTION_OF = {name: index for index, name in enumerate(ACTIONS)}

CATEGORIES = ("parameters", "gradients", "activations", "optimizer state", "workspace", "other", "in flight")
PARAMETERS, GRADIENTS, ACTIVATIONS, OPTIMIZER_STATE, WORKSPACE, OTHER, IN_FLIGHT = range(len(CATEGORIES))

Stack = tuple[SourceLine, ...]  # innermost first


class StackTable:
    """Gives each stack of Python calls a number, the same for the same stack. Number 0 is the empty stack."""

    def __init__(self) -> None:
        self._numbers: dict[tuple, int] = {(): 0}
        self._codes: dict[int, CodeType] = {}  # by identity, which no other code has while it is held
        self._next = count(1)
        self._lock = threading.RLock()  # what Python clears up between any two steps may free a tensor, whose stack is looked up too

    def of_frame(self, frame: FrameType | None) -> int:
        """The number of the stack that `frame` ends; cheap, as the lines are looked up only at the end.

        Code counts by its identity. Python compares it without its file, so that two cells of the same text would be one, and hashes
        it by all it holds, a module's with that of all its functions.
        """
        numbers: list[int] = []
        caller = frame
        while caller is not None:
            numbers += id(caller.f_code), caller.f_lasti
            caller = caller.f_back
        key = tuple(numbers)
        number = self._numbers.get(key)
        if number is None:
            while frame is not None:
                self._codes[id(frame.f_code)] = frame.f_code
                frame = frame.f_back
            number = self._number(key)
        return number

    def of_lines(self, lines: Stack) -> int:
        return self._number(lines)

    def _number(self, key: tuple) -> int:
        number = self._numbers.get(key)
        if number is None:
            with self._lock:  # or two threads could give it two
                number = self._numbers.get(key)
                if number is None:
                    number = self._numbers[key] = next(self._next)
        return number

    def stacks(self) -> list[Stack]:
        """All stacks by number, without the kit's own calls. A number whose giving was interrupted has the empty one."""
        keys = {number: key for key, number in list(self._numbers.items())}
        line = cache(self._line)
        return [_resolved(keys.get(number, ()), line) for number in range(max(keys) + 1)]

    def _line(self, identity: int, last: int) -> SourceLine:
        """The line of the instruction at `last` in the code of this identity."""
        code = self._codes[identity]
        lines = (line for start, end, line in code.co_lines() if start <= last < end and line is not None)
        return SourceLine.read(code.co_filename, next(lines, code.co_firstlineno), code.co_name)


def _resolved(key: tuple, line: Callable[[int, int], SourceLine]) -> Stack:
    if not key or isinstance(key[0], SourceLine):
        return key
    lines = (line(identity, last) for identity, last in zip(key[::2], key[1::2], strict=True))
    return tuple(one for one in lines if not front_end.is_ours(one.filename))


@dataclass(frozen=True, slots=True)
class MemoryEvent:
    """One event as its source has it. `time` in seconds from the start of the recording; `size` is what the block takes, 0 where
    the source knows only `requested`; of an "oom" `address` is the device's free bytes. `stack` numbers a stack of the table."""

    time: float
    device: int
    stream: int
    action: int
    address: int
    size: int
    requested: int
    stack: int


@dataclass(frozen=True, slots=True, eq=False)
class Events:
    """Columns of equal length, in order of time; bytes and seconds.

    `birth` is, of an event about a block, the index of the event that allocated it, -1 if that was before the recording.
    `category` indexes CATEGORIES, `action` ACTIONS, `stack` the trace's stacks.
    """

    time: np.ndarray
    device: np.ndarray
    stream: np.ndarray
    action: np.ndarray
    address: np.ndarray
    size: np.ndarray
    requested: np.ndarray
    stack: np.ndarray
    birth: np.ndarray
    category: np.ndarray

    def __len__(self) -> int:
        return len(self.time)

    def __iter__(self) -> Iterator[MemoryEvent]:
        return map(MemoryEvent, *(getattr(self, name).tolist() for name in _RECORDED))

    def row(self, index: int) -> MemoryEvent:
        """One of the events."""
        return MemoryEvent(*(getattr(self, name)[index].item() for name in _RECORDED))

    @property
    def rises(self) -> np.ndarray:
        """Bytes by which each event changes what is allocated on its device."""
        return np.where(self.action == ALLOC, self.size, 0) - np.where(self.action == FREE_REQUESTED, self.size, 0)

    @property
    def deaths(self) -> np.ndarray:
        """Of each event that allocated a block, the index of the one that asked for its free; -1 of others, and of what lives on."""
        freed = np.flatnonzero((self.action == FREE_REQUESTED) & (self.birth >= 0))
        deaths = np.full(len(self), -1)
        deaths[self.birth[freed]] = freed
        return deaths

    @classmethod
    def of(cls, events: Iterable[MemoryEvent]) -> "Events":
        """The columns of these events, in order of time; `birth` and `category` are not known yet."""
        rows = sorted(events, key=lambda event: event.time)
        count = len(rows)
        columns = {name: np.fromiter((getattr(row, name) for row in rows), _TYPES[name], count) for name in _RECORDED}
        return cls(**columns, birth=np.full(count, -1, _TYPES["birth"]), category=np.full(count, OTHER, _TYPES["category"]))


_RECORDED = [column.name for column in fields(MemoryEvent)]
_TYPES = {
    "time": np.float64,
    "device": np.int16,
    "stream": np.int64,
    "action": np.uint8,
    "address": np.uint64,
    "size": np.int64,
    "requested": np.int64,
    "stack": np.int32,
    "birth": np.int32,
    "category": np.uint8,
}
