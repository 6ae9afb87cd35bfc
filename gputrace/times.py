"""What a trace says of time: how long its devices worked, copied while they computed, and did nothing."""

from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from gputrace.spans import ASKED, COPIES, HOST, KERNEL, WAIT, Spans, chosen, seconds_of, seconds_of_both

if TYPE_CHECKING:
    import torch

Device: TypeAlias = "int | str | torch.device"  # 1, "cuda:1" or torch.device("cuda", 1)


class Times:
    """The part of a `Trace` that answers in seconds."""

    spans: Spans
    seconds: float
    no_timeline: str

    def device_index(self, device: "Device | None" = None) -> int:
        raise NotImplementedError

    @property
    def end(self) -> float:
        """When the last of all was done: the recording itself, or what it had launched."""
        return max(self.seconds, float(self.spans.end.max(initial=0.0)))

    def busy(self, device: "Device | None" = None, kind: str | None = None) -> float:
        """Seconds in which a device worked: on anything, or on a `kind`: "kernel", "copy", "h2d", "d2h" or "p2p".

        Without a device it is the one with the highest peak of memory. A copy between two devices is work of the one that it comes from.
        Raises ValueError for another kind or device, RuntimeError where no timeline was recorded.
        """
        if kind is not None and kind not in ASKED:
            raise ValueError(f"kind={kind!r}: choose {', '.join(map(repr, ASKED))}, or None for all of them")
        return seconds_of(self.spans, self._ran(device, (KERNEL, *COPIES) if kind is None else ASKED[kind]))

    def idle(self, device: "Device | None" = None) -> float:
        """Seconds in which a device did nothing, from the start of the recording to the end of all work. Raises as `busy` does."""
        idle = self.end - self.busy(device)
        return idle if idle > 1e-12 else 0.0  # less than a picosecond is the rounding of a sum

    def overlap(self, device: "Device | None" = None) -> float:
        """Seconds in which a device copied and ran a kernel at once; `busy(device, "copy")` says how long it copied.

        Raises as `busy` does.
        """
        return seconds_of_both(self.spans, self._ran(device, (KERNEL,)), self._ran(device, COPIES))

    @property
    def host_waited(self) -> float:
        """Seconds in which a thread of the host waited for a device. Raises RuntimeError where no timeline was recorded."""
        self.require_timeline()
        return seconds_of(self.spans, chosen(self.spans, HOST, (WAIT,)))

    def require_timeline(self) -> None:
        """Raises RuntimeError, which says why, where no timeline was recorded."""
        if self.no_timeline:
            raise RuntimeError(f"this recording has no timeline: {self.no_timeline}")

    def _ran(self, device: "Device | None", kinds: tuple[int, ...]) -> np.ndarray:
        self.require_timeline()
        return chosen(self.spans, self.device_index(device), kinds)
