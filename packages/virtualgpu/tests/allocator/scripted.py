"""An allocator and event sources that the allocator's tests control."""

from virtualgpu.allocator import CachingAllocator, Settings

MiB = 1 << 20
GiB = 1 << 30


class Streams:
    """An event source whose streams are busy until the test says otherwise."""

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
        """Synchronize what a driver call waits for.

        cudaFree waits for the whole device, and unmapping for the block's stream.
        """
        if action == "segment_free":
            self.busy.clear()
        elif action == "segment_unmap":
            self.busy.discard(block.stream)


def allocator(total=16 * GiB, conf="", **options):
    return CachingAllocator(0, total, settings=Settings.parse(conf), **options)


def figure(memory, key):
    """Return a statistic by its name in `torch.cuda.memory_stats`."""
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
