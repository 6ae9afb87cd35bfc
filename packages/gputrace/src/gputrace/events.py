"""Memory events of a recording, in columns: what happened when, and on which line of Python."""

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from functools import cache
from itertools import count
from types import CodeType, FrameType

import numpy as np

from virtualgpu import front_end
from virtualgpu.source_lines import SourceLine

# PyTorch's names, as in `device_traces` of torch.cuda.memory._snapshot. A program requests a free.
# The free is completed when no stream uses the block any more.
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
ALLOC, FREE_REQUESTED, FREE_COMPLETED = range(3)
SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP = range(3, 7)
SNAPSHOT, OOM = 7, 8
ACTION_OF = {name: index for index, name in enumerate(ACTIONS)}

CATEGORIES = (
    "parameters",
    "gradients",
    "activations",
    "optimizer state",
    "workspace",
    "other",
    "in flight",
)
PARAMETERS, GRADIENTS, ACTIVATIONS, OPTIMIZER_STATE, WORKSPACE, OTHER, IN_FLIGHT = range(
    len(CATEGORIES)
)

Stack = tuple[SourceLine, ...]  # the innermost line comes first


class StackTable:
    """Table that gives each stack of Python calls a number. Equal stacks have the same number.

    The empty stack has number 0.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple, int] = {(): 0}
        self._codes: dict[int, CodeType] = {}  # by id, which is unique while the code is kept here
        self._next = count(1)
        # The lock is reentrant, because the garbage collector may free a tensor at any time, and
        # then the stack of this free is looked up, too.
        self._lock = threading.RLock()

    def of_frame(self, frame: FrameType | None) -> int:
        """Return the number of the stack whose innermost call is `frame`.

        This is fast, because the source lines are looked up only at the end of the recording. Code
        objects are distinguished by identity. Python would compare them without their file, so that
        two cells of the same text would be equal, and would hash all the functions in a module.
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
        """Return the number of a stack that is given as source lines."""
        return self._number(lines)

    def _number(self, key: tuple) -> int:
        """Return the number of a stack, and assign the next number if the stack is new.

        `key` identifies the stack.
        """
        number = self._numbers.get(key)
        if number is None:
            with self._lock:  # otherwise two threads could give it two numbers
                number = self._numbers.get(key)
                if number is None:
                    number = self._numbers[key] = next(self._next)
        return number

    def stacks(self) -> list[Stack]:
        """Return all stacks in the order of their numbers, without the kit's own calls.

        A number that no stack got, because an exception interrupted it, has the empty stack.
        """
        keys = {number: key for key, number in list(self._numbers.items())}
        line = cache(self._line)
        return [_resolved(keys.get(number, ()), line) for number in range(max(keys) + 1)]

    def _line(self, identity: int, last: int) -> SourceLine:
        """Return the source line of an instruction.

        `identity` is the id of the code object, and `last` the offset of the instruction in it.
        """
        code = self._codes[identity]
        line = code.co_firstlineno
        for start, end, number in code.co_lines():
            if start <= last < end and number is not None:
                line = number
                break
        return SourceLine.read(code.co_filename, line, code.co_name)


def _resolved(key: tuple, line: Callable[[int, int], SourceLine]) -> Stack:
    """Return the source lines of a stack.

    `key` identifies the stack, and `line` looks up the source line of one of its calls.
    """
    if not key or isinstance(key[0], SourceLine):
        return key
    lines = (line(identity, last) for identity, last in zip(key[::2], key[1::2], strict=True))
    return tuple(one for one in lines if not front_end.is_ours(one.filename))


@dataclass(frozen=True, slots=True)
class MemoryEvent:
    """Memory event as its source reports it.

    Attributes:
        time: seconds from the start of the recording.
        action: an index of `ACTIONS`.
        address: the address of the block, or for an "oom" the device's free bytes.
        size: the bytes of the block, or 0 if the source knows only `requested`.
        stack: the number of a stack in a `StackTable`.
    """

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
    """Memory events as columns of equal length, in order of time, with sizes in bytes.

    Attributes:
        time: seconds from the start of the recording.
        action: indices of `ACTIONS`.
        stack: indices of the trace's stacks.
        birth: for events about a block, the index of the event that allocated it. -1 if that was
            before the recording.
        category: indices of `CATEGORIES`.
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
        """Return the event at this index."""
        return MemoryEvent(*(getattr(self, name)[index].item() for name in _RECORDED))

    @property
    def rises(self) -> np.ndarray:
        """The change of the device's allocated bytes at each event."""
        rises = np.where(self.action == ALLOC, self.size, 0)
        return rises - np.where(self.action == FREE_REQUESTED, self.size, 0)

    @property
    def deaths(self) -> np.ndarray:
        """For each allocation, the index of the event that requested its free.

        It is -1 for other events, and for blocks that are not freed.
        """
        freed = np.flatnonzero((self.action == FREE_REQUESTED) & (self.birth >= 0))
        deaths = np.full(len(self), -1)
        deaths[self.birth[freed]] = freed
        return deaths

    @classmethod
    def of(cls, events: Iterable[MemoryEvent]) -> "Events":
        """Make columns from events. Their `birth` and `category` are not known yet."""
        rows = sorted(events, key=lambda event: event.time)
        count = len(rows)
        columns = {}
        for name in _RECORDED:
            values = (getattr(row, name) for row in rows)
            columns[name] = np.fromiter(values, _TYPES[name], count)
        birth = np.full(count, -1, _TYPES["birth"])
        category = np.full(count, OTHER, _TYPES["category"])
        return cls(**columns, birth=birth, category=category)


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
