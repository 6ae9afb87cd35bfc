"""Memory that grows from step to step: by how much, from which line, and when a GPU is full."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from gputrace.leaks import Birth, Leak, find_leaks
from gputrace.peak import alive_at
from gputrace.trace import Trace
from virtualgpu.source_lines import SourceLine, caller

LATER = 3  # steps after the first that are needed to tell growth from variation
RISES = 2  # the fewest steps that need more than the step before, if memory grows
FASTER = 1.05  # ratio of successive rises from which memory grows faster and faster
VARIES = 1.01  # ratio of the highest peak to the lowest from which peaks vary
FOREVER = 1_000_000  # steps. Nobody waits for more.


class StepMemory:
    """Memory of one GPU by step: the peak of each step, and the blocks that it leaves behind."""

    def __init__(self, allocator: Any, device: int = 0) -> None:
        self._device = device
        self.peaks: list[int] = []
        self._allocator = allocator
        self._peak = 0
        # The step, the bytes and the line of each live block, by its address.
        self._born: dict[int, tuple[int, int, SourceLine | None]] = {}
        allocator.listen(self._listen)

    def _listen(self, action: str, block: Any, size: int) -> None:
        """Note an event of the allocator: the action, the block, and the block's bytes."""
        if action == "alloc":
            step = len(self.peaks)
            line = caller() if step else None  # blocks of the first step are never reported
            self._born[block.address] = step, block.size, line
            self._peak = max(self._peak, self._allocator.allocated)
        elif action == "free_requested":
            self._born.pop(block.address, None)

    def end_step(self) -> None:
        """Note the peak of the step that ends here."""
        self.peaks.append(self._peak)
        self._peak = self._allocator.allocated

    def is_settled(self) -> bool:
        """Return whether the last step needs no more memory than any step after the first."""
        later = self.peaks[1:]
        return not later or later[-1] <= min(later)

    def left_behind(self) -> list[int]:
        """Return the bytes that each step allocated and that are still allocated."""
        left = [0] * len(self.peaks)
        for step, size, _ in self._born.values():
            if step < len(left):
                left[step] += size
        return left

    def leaks(self) -> list[Leak]:
        """Return the tensors that steps left behind, except the first and the last step."""
        last = len(self.peaks) - 1
        births = []
        for address, (step, size, line) in self._born.items():
            if 0 < step < last:
                births.append(Birth(self._device, address, size, line, "memory"))
        return list(find_leaks(births))


class Growth(NamedTuple):
    """Growth of the peak: bytes per step, and the ratio of a step's rise to the rise before."""

    bytes: int
    ratio: float

    def steps_until(self, room: int) -> int:
        """Return the number of further steps that fit into `room` bytes, at most FOREVER."""
        if self.ratio == 1:
            return min(FOREVER, max(0, room // self.bytes))
        steps, rise, taken = 0, float(self.bytes), 0.0
        while steps < FOREVER:
            rise *= self.ratio
            taken += rise
            if taken > room:
                break
            steps += 1
        return steps


def growth_of(peaks: Sequence[int], left: Sequence[int]) -> Growth | None:
    """Return how the peaks of steps grow, or None if they do not.

    The first step does not count, because the optimizer makes its state in it. If the peaks rise
    and fall, memory grows only if each step leaves tensors behind.

    Args:
        peaks: the bytes at the peak of each step.
        left: the bytes that each step left behind.
    """
    later = peaks[1:]
    if len(later) < LATER:
        return None
    rises = [after - before for before, after in pairwise(later)]
    if varies(peaks):
        kept = left[1:-2]  # a step may still hold the tensors of the step before
        if len(kept) > 1 and min(kept) > 0:
            return Growth(int(np.mean(kept)), 1)
        return None
    middle = len(later) // 2
    if sum(rise > 0 for rise in rises) < RISES or later[-1] <= later[middle]:
        return None
    if all(before > 0 and after > FASTER * before for before, after in pairwise(rises)):
        return Growth(rises[-1], rises[-1] / rises[-2])
    return Growth((later[-1] - later[middle]) // (len(later) - 1 - middle), 1)


def varies(peaks: Sequence[int]) -> bool:
    """Return whether the peaks of the steps after the first both rise and fall."""
    later = peaks[1:]
    rises = [after - before for before, after in pairwise(later)]
    if not rises or max(rises) <= 0 or min(rises) >= 0:
        return False
    return max(later) > VARIES * min(later)


def where_it_grows(leaks: list[Leak], trace: Trace, times: Sequence[float], device: int = 0) -> str:
    """Describe what grows on a GPU.

    If steps left tensors behind, name the line that made most of them, and their holder. Otherwise
    name the line whose tensors grew most from the peak of one step to that of the next.

    Args:
        times: when the steps ended.
    """
    by_line: dict[SourceLine | None, list[Leak]] = {}
    for leak in leaks:
        by_line.setdefault(leak.line, []).append(leak)
    of_line = max(by_line.values(), key=lambda group: sum(leak.bytes for leak in group), default=[])
    if len(of_line) > 1:
        holder = min(of_line[0].holders).text
        line = _text(of_line[0].line)
        return f"Tensors of earlier steps stay alive. Most come from {line}, held by {holder}"
    before, after = (_lines_at_peak(trace, device, *interval) for interval in pairwise(times[-3:]))
    rises = {line: nbytes - before[line] for line, nbytes in after.items()}
    most = max(rises, key=lambda line: rises[line], default=None)
    return f"Most of the growth at the peak is in tensors that {_text(most)} made"


def _lines_at_peak(
    trace: Trace, device: int, begin: float, end: float
) -> Counter[SourceLine | None]:
    """Return the bytes that each line held at the highest peak between two times in seconds."""
    events, timeline = trace.events, trace.timeline(device)
    first, last = np.searchsorted(timeline.times, [begin, end], side="right")
    found: Counter[SourceLine | None] = Counter()
    if first < last:
        at = first + int(timeline.allocated[first:last].argmax())
        event = np.flatnonzero(events.device == device)[at - 1]
        for index in alive_at(events, device, event).tolist():
            found[trace.line(int(events.stack[index]))] += int(events.size[index])
    return found


def _text(line: SourceLine | None) -> str:
    """Return the location and the source of a line."""
    if line is None:
        return "an unknown line"
    line = SourceLine.read(line.filename, line.line, line.function)
    return f"{line.location} {line.text}".strip()
