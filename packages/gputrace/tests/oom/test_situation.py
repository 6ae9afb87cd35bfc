"""The numbers of PyTorch's out-of-memory error, in the wordings of several versions."""

import pytest

from gputrace.oom.situation import Message
from virtualgpu.allocator.oom import TOO_LARGE, oom_text

MiB, GiB = 1 << 20, 1 << 30


@pytest.mark.parametrize("version", ["2.10.0", "2.11.0+cu130", "2.15.0"])
def test_every_number_is_read(version):
    text = oom_text(
        index=1,
        segment_size=20 * MiB,
        total=16 * GiB,
        free=512,
        allowed=8 * GiB,
        allocated=7 * GiB,
        reserved=15 * GiB // 2,
        processes=[(1, 8 * GiB), (4711, 3 * GiB)],
        own_pid=1,
        version=version,
    )
    assert Message.read(text) == Message(
        requested=20 * MiB,
        device=1,
        total=16 * GiB,
        free=512,
        own=8 * GiB,
        processes=((4711, 3 * GiB),),
        allowed=8 * GiB,
        allocated=7 * GiB,
        private=None,
        unallocated=GiB // 2,
        rejected=False,
    )


def test_a_message_of_a_container_with_graphs():
    """The error was published. In it, the driver's process id differs from the container's."""
    message = Message.read(
        "CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 47.53 "
        "GiB of which 896.00 KiB is free. "
        "Process 1686436 has 47.51 GiB memory in use. Of the allocated memory 47.00 GiB is "
        "allocated by PyTorch, with 46.22 GiB "
        "allocated in private pools (e.g., CUDA Graphs), and 149.10 MiB is reserved by PyTorch "
        "but unallocated."
    )
    assert (message.own, message.processes) == (None, ((1686436, round(47.51 * GiB)),))
    assert (message.private, message.unallocated) == (round(46.22 * GiB), round(149.1 * MiB))


def test_messages_with_few_numbers():
    assert Message.read(TOO_LARGE).requested is None
    rejected = Message.read(
        "CUDA out of memory. Allocation was preemptively rejected because it would exceed "
        "per_process_memory_fraction limit. "
        "Requested size: 2.00 GiB."
    )
    assert (rejected.rejected, rejected.requested, rejected.total) == (True, 2 * GiB, None)
