"""An allocator and event sources that the allocator's tests control."""

from virtualgpu.allocator import CachingAllocator, Settings

MiB = 1 << 20
GiB = 1 << 30


class Streams:
    """An event source for the allocator. A stream is busy or idle as the test says."""

    def __init__(self):
        self.busy = set()
        self.waited = []

    def record(self, stream):
        return stream

    def done(self, stream):
        return stream not in self.busy

    def wait(self, stream):
        self.waited.append(stream)
        self.busy.discard(stream)

    def synchronized_by(self, action, block, size):
        """Finish the streams' work for which a driver call waits.

        `action` is the allocator's action: cudaFree waits for the whole device, and unmapping for
        the block's stream.
        """
        if action == "segment_free":
            self.busy.clear()
        elif action == "segment_unmap":
            self.busy.discard(block.stream)


def allocator(total=16 * GiB, conf="", **options):
    return CachingAllocator(0, total, settings=Settings.parse(conf), **options)


def figure(memory, key):
    """Return the value of a statistic of the allocator, by its key in `torch.cuda.memory_stats`."""
    value = memory.stats()
    for part in key.split("."):
        value = value[part]
    return value


def states(memory):
    return [
        [(block["size"], block["state"]) for block in segment["blocks"]]
        for segment in memory.segments()
    ]


class Tickets:
    """An event source in which the test says which events have happened."""

    def __init__(self):
        self.count = 0
        self.done_tickets = set()

    def record(self, stream):
        self.count += 1
        return self.count

    def done(self, ticket):
        return ticket in self.done_tickets

    def wait(self, ticket):
        self.done_tickets.add(ticket)
