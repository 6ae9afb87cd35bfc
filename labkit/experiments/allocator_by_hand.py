"""The caching allocator by hand: allocate, free and empty the cache step by step, and see its segments and blocks after each."""

from dataclasses import dataclass
from string import ascii_uppercase

import torch

from labkit.experiments.result import badge

MIB = 1 << 20
STREAMS = 3
MOST_BLOCKS = len(ascii_uppercase)  # that are alive at once
LARGEST = 1024 * MIB  # of one request
_POOL = 32  # streams of one priority that a device has; torch.cuda.Stream() hands them out in turn


@dataclass(frozen=True)
class HandBlock:
    """A block of a segment; sizes in bytes. `name` is the letter of the request that holds it, empty where it is free."""

    offset: int
    size: int
    name: str


@dataclass(frozen=True)
class HandSegment:
    """Memory got from the device at once for the requests of one stream; sizes in bytes."""

    stream: int
    size: int
    blocks: tuple[HandBlock, ...]


@dataclass(frozen=True)
class Step:
    """What one step did. `reserved` and `allocated` are the bytes of the hand's own segments and requests before and after it."""

    did: str
    reserved: tuple[int, int]
    allocated: tuple[int, int]

    @property
    def grown(self) -> int:
        """Bytes that the allocator took from the device in this step; negative where it gave some back."""
        return self.reserved[1] - self.reserved[0]


class AllocatorByHand:
    """Real requests to PyTorch's allocator on the current GPU, named A, B, C …

    They run on three streams of their own, numbered 0 to 2: segments serve one stream only, so nothing else in the process fills or
    uses those seen here. Bytes that are allocated and reserved are those of these streams. `badge` says what GPU it is.

    Raises RuntimeError when no GPU is in use.
    """

    def __init__(self) -> None:
        self.badge = badge()
        self.device = torch.cuda.current_device()
        self._streams = [unused_stream() for _ in range(STREAMS)]
        self._requests: dict[str, tuple[int, torch.Tensor]] = {}  # by name: bytes asked for, and the tensor
        self.steps: list[Step] = []

    # Steps

    def allocate(self, nbytes: int, stream: int = 0) -> str:
        """Ask for so many bytes on a stream; returns the request's name.

        Raises ValueError for a size outside 1 byte to 1 GiB, another stream, or a 27th request; torch.OutOfMemoryError as PyTorch does.
        """
        if type(nbytes) is not int or not 1 <= nbytes <= LARGEST:
            raise ValueError(f"{nbytes!r} bytes cannot be asked for here: choose 1 byte to {LARGEST // MIB} MiB")
        if stream not in range(STREAMS):
            raise ValueError(f"there is no stream {stream!r} here: choose 0 to {STREAMS - 1}")
        free_names = [letter for letter in ascii_uppercase if letter not in self._requests]
        if not free_names:
            raise ValueError(f"{MOST_BLOCKS} requests are alive, as many as there are letters: free one first")
        name = free_names[0]
        before = self.reserved, self.allocated
        with torch.cuda.device(self.device), torch.cuda.stream(self._streams[stream]):
            self._requests[name] = nbytes, torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        self._note(f"allocate {name}", before)
        return name

    def free(self, name: str) -> None:
        """Let go of a request. Raises ValueError, naming those that are alive, for another name."""
        if name not in self._requests:
            raise ValueError(f"there is no block {name!r} to free; there are {', '.join(self._requests) or 'none'}")
        before = self.reserved, self.allocated
        del self._requests[name]
        self._note(f"free {name}", before)

    def empty_cache(self) -> None:
        """`torch.cuda.empty_cache()`."""
        before = self.reserved, self.allocated
        torch.cuda.empty_cache()
        self._note("empty the cache", before)

    def reset(self) -> None:
        """Let go of all requests, give their memory back, and forget the steps."""
        self._requests.clear()
        torch.cuda.empty_cache()
        self.steps.clear()

    def _note(self, did: str, before: tuple[int, int]) -> None:
        self.steps.append(Step(did, (before[0], self.reserved), (before[1], self.allocated)))

    # What is there

    @property
    def requests(self) -> dict[str, int]:
        """The bytes that each request that is alive asked for, by name."""
        return {name: nbytes for name, (nbytes, _) in self._requests.items()}

    @property
    def reserved(self) -> int:
        """Bytes in the segments."""
        return sum(segment.size for segment in self.segments())

    @property
    def allocated(self) -> int:
        """Bytes in the blocks of requests that are alive."""
        return sum(block.size for segment in self.segments() for block in segment.blocks if block.name)

    def segments(self) -> list[HandSegment]:
        """The segments of the three streams, stream by stream, each stream's by address."""
        numbers = {stream.cuda_stream: number for number, stream in enumerate(self._streams)}
        names = {tensor.data_ptr(): name for name, (_, tensor) in self._requests.items()}
        found = []
        for segment in torch.cuda.memory_snapshot():
            if segment["device"] == self.device and segment["stream"] in numbers:
                start = segment["address"]
                blocks, at = [], start
                for block in segment["blocks"]:
                    blocks.append(HandBlock(at - start, block["size"], names.get(at, "")))
                    at += block["size"]
                found.append(
                    (numbers[segment["stream"]], start, HandSegment(numbers[segment["stream"]], segment["total_size"], tuple(blocks)))
                )
        return [segment for _, _, segment in sorted(found, key=lambda entry: entry[:2])]


def unused_stream() -> torch.cuda.Stream:
    """A stream of the current GPU without segments of its own, after emptying the cache: what lies free on others cannot serve it.

    Raises RuntimeError where all have some.
    """
    torch.cuda.empty_cache()
    device = torch.cuda.current_device()
    used = {segment["stream"] for segment in torch.cuda.memory_snapshot() if segment["device"] == device}
    for _ in range(_POOL):
        stream = torch.cuda.Stream()
        if stream.cuda_stream not in used:
            return stream
    raise RuntimeError(f"tensors are alive on all {_POOL} streams of this GPU: free those of one stream, and try again")
