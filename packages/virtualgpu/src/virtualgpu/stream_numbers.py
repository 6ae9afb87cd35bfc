"""The ids of a GPU's streams: how PyTorch assigns them, and the names of the streams."""

PRIORITIES = 4  # stream priorities, from 0 down to -3; this is PyTorch's own limit
# A device has this many streams per priority. More Stream objects share them
# (c10/cuda/CUDAStream.h).
POOL_STREAMS = 32
_KIND_BITS = 5  # the low bits of a stream's id, which encode the priority and the origin


class StreamPool:
    """The streams that `torch.cuda.Stream()` assigns on one device, in turn."""

    def __init__(self) -> None:
        self._next = [0] * PRIORITIES

    def take(self, priority: int) -> int:
        """Return the id of the next stream of this priority."""
        kind = min(max(0, -priority), PRIORITIES - 1)
        number = self._next[kind]
        self._next[kind] = (number + 1) % POOL_STREAMS
        # c10/cuda/CUDAStream.cpp packs number, kind and origin in this way.
        return number << _KIND_BITS | (kind + 1) << 1 | 1


def priority_of(stream_id: int) -> int:
    """Return the priority of the stream with this id.

    It is 0 for the default stream and for streams made by CUDA.
    """
    if stream_id & 1:
        return -max(0, (stream_id >> 1 & 15) - 1)
    return 0


def stream_name(stream_id: int) -> str:
    """Return the name of the stream with this id, such as "stream 1".

    "stream 1" is the first one that `torch.cuda.Stream()` assigns. Returns "" for an id that
    `torch.cuda.Stream()` does not assign.
    """
    number, kind = stream_id >> _KIND_BITS, stream_id % (1 << _KIND_BITS)
    if number >= POOL_STREAMS or kind not in range(3, 3 + 2 * PRIORITIES, 2):
        return ""
    if kind == 3:
        return f"stream {number + 1}"
    return f"stream {number + 1} of priority {priority_of(stream_id)}"


def raw_stream(device: int, stream_id: int) -> int:
    """Return the `cudaStream_t` of a stream, which CUDA and snapshots of memory use.

    It is 0 for the default stream. For a stream made by cudaStreamCreate it is the id.
    """
    if stream_id & 1:
        return 0x5600_0000_0000 + (device << 24 | stream_id << 6)
    return stream_id
