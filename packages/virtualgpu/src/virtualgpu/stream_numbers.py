"""The numbers of a GPU's streams: which streams there are to have, what a number says, and what the stream is called."""

PRIORITIES = 4  # of streams, from 0 down; this one and the next are PyTorch's own limits
POOL_STREAMS = 32  # streams of one priority that a device has; more Stream objects share them (c10/cuda/CUDAStream.h)
_KIND_BITS = 5  # of a stream's id


class StreamPool:
    """The streams of one device that `torch.cuda.Stream()` takes, round robin."""

    def __init__(self) -> None:
        self._next = [0] * PRIORITIES

    def take(self, priority: int) -> int:
        """The id of the next one of this priority."""
        kind = min(max(0, -priority), PRIORITIES - 1)
        number = self._next[kind]
        self._next[kind] = (number + 1) % POOL_STREAMS
        return number << _KIND_BITS | (kind + 1) << 1 | 1  # as c10/cuda/CUDAStream.cpp packs number, kind and origin


def priority_of(stream_id: int) -> int:
    """From 0 down; 0 for the default stream and for streams that CUDA made."""
    return -max(0, (stream_id >> 1 & 15) - 1) if stream_id & 1 else 0


def stream_name(stream_id: int) -> str:
    """What to call a stream of a virtual GPU: "stream 1" is the first that `torch.cuda.Stream()` gave. Empty for another id."""
    number, kind = stream_id >> _KIND_BITS, stream_id % (1 << _KIND_BITS)
    if number >= POOL_STREAMS or kind not in range(3, 3 + 2 * PRIORITIES, 2):
        return ""
    return f"stream {number + 1}{f' of priority {priority_of(stream_id)}' if kind > 3 else ''}"


def raw_stream(device: int, stream_id: int) -> int:
    """The `cudaStream_t` by which CUDA and a snapshot of memory know a stream: 0 for the default stream, else an address."""
    return 0x5600_0000_0000 + (device << 24 | stream_id << 6) if stream_id & 1 else stream_id  # those that cudaStreamCreate made go by it
