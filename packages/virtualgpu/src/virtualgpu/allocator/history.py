"""The snapshot of an allocator's segments and the history of its events.

Both have the schema of `torch.cuda.memory._snapshot`, so PyTorch's viewer
(`torch.cuda._memory_viz`) can open them.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable

from .pool import ALLOCATED, NO_POOL, PENDING, UNMAPPED, Block, Segment

Frames = Callable[[], list[dict]]  # the caller's stack, innermost first: filename, line, name
_LEVELS = {None: 0, "state": 1, "alloc": 2, "all": 3}  # from which context level on stacks are kept
_STATES = {ALLOCATED: "active_allocated", PENDING: "active_pending_free"}


class History:
    """The last `max_entries` events of an allocator, or only the last one if `enabled` is "state".

    PyTorch keeps the same number of events.
    """

    def __init__(
        self,
        enabled: str,
        max_entries: int,
        frames: Frames | None,
        context: str | None,
        clock: Callable[[], int],
        entries: Iterable[dict] = (),
        metadata: Callable[[], str] = str,
        skipped: Collection[str] = (),
    ) -> None:
        if enabled not in ("state", "all"):
            raise ValueError(f"enabled must be 'state', 'all' or None, got {enabled!r}")
        if context not in _LEVELS:
            raise ValueError(f"context must be 'state', 'alloc', 'all' or None, got {context!r}")
        if enabled != "all":
            max_entries = 1
        self.entries: deque[dict] = deque(entries, maxlen=max_entries)
        self._frames = frames
        self._level = 0
        if frames is not None:
            self._level = _LEVELS[context]
        self._clock = clock
        self._metadata = metadata
        self._skipped = skipped

    def stack(self, action: str) -> list[dict]:
        """Return the caller's stack for an event of the kind `action`.

        Returns [] if the history's context level does not keep stacks for this kind.
        """
        needed = _LEVELS["all"]
        if action in ("alloc", "segment_alloc", "segment_map", "oom"):
            needed = _LEVELS["state"]
        if self._frames is None or self._level < needed:
            return []
        return self._frames()

    def add(
        self,
        action: str,
        address: int,
        size: int,
        stream: int,
        frames: list[dict] | None = None,
        pool_id: tuple[int, int] = NO_POOL,
    ) -> None:
        """Add an event of the kind `action` to the history, unless this kind is skipped.

        `size` is in bytes. Without `frames`, the current stack of the caller is stored. `pool_id`
        is the private pool of the block. For an `oom` event, `address` is the number of free bytes
        of the device.
        """
        if action in self._skipped:
            return
        entry = {
            "action": action,
            "device_free" if action == "oom" else "addr": address,
            "size": size,
            "stream": stream,
            "pool_id": pool_id,
            "time_us": self._clock(),
            "compile_context": "N/A",
            "user_metadata": self._metadata(),
        }
        if self._level >= _LEVELS["alloc"] and frames:
            entry["frames"] = frames
        self.entries.append(entry)


def snapshot(device: int, segments: Iterable[Segment]) -> list[dict]:
    """Return the memory snapshot of a device: one dictionary per segment, in address order.

    Each mapped part of an expandable segment counts as a segment.
    """
    listed = []
    for segment in segments:
        blocks: list[Block] = []
        block: Block | None = segment.first
        while block is not None:
            if block.state != UNMAPPED:
                blocks.append(block)
            if blocks and (block.state == UNMAPPED or block.next is None):
                listed.append(_segment(device, segment, blocks))
                blocks = []
            block = block.next
    return sorted(listed, key=lambda entry: entry["address"])


def _segment(device: int, segment: Segment, blocks: list[Block]) -> dict:
    """Return PyTorch's dictionary for a segment, or the mapped part of one, made of `blocks`."""
    active = [block for block in blocks if block.state in _STATES]
    return {
        "device": device,
        "address": blocks[0].address,
        "total_size": sum(block.size for block in blocks),
        "allocated_size": sum(block.size for block in active if block.state == ALLOCATED),
        "active_size": sum(block.size for block in active),
        "requested_size": sum(block.requested for block in active),
        "stream": segment.stream,
        "segment_type": "small" if segment.pool.small else "large",
        "segment_pool_id": segment.free_blocks.pool_id,
        "is_expandable": segment.page > 0,
        "frames": segment.frames or [],
        "blocks": [
            {
                "address": block.address,
                "size": block.size,
                "requested_size": block.requested,
                "state": _STATES.get(block.state, "inactive"),
                "frames": block.frames or [],
            }
            for block in blocks
        ],
    }
