"""A slow and obvious second caching allocator, written from the rules alone.

It keeps each segment as a plain list of pieces. It searches all of them, merges over whole
segments, and computes every statistic from the pieces. It shares only the choice of addresses with
the fast allocator, because addresses decide ties.
"""

from dataclasses import dataclass, field

from virtualgpu.allocator.address_space import AddressSpace

MiB = 1 << 20
TOTAL = 256 * MiB
END = 1 << 40
UNLIMITED = float("inf")


@dataclass(eq=False)
class Piece:
    size: int
    state: str  # allocated, pending, free, unmapped
    requested: int = 0
    users: set = field(default_factory=set)
    waits: list = field(default_factory=list)


@dataclass(eq=False)
class Range:
    """A segment of the slow allocator, or an address range to which memory can be mapped."""

    address: int
    small: bool
    stream: int
    page: int
    pieces: list

    @property
    def mapped(self):
        return sum(piece.size for piece in self.pieces if piece.state != "unmapped")

    def address_of(self, piece):
        return self.address + sum(before.size for before in self.pieces[: self.pieces.index(piece)])

    def following(self, piece):
        later = self.pieces[self.pieces.index(piece) + 1 :]
        return later[0] if later else None

    def split(self, piece, size):
        self.pieces.insert(self.pieces.index(piece) + 1, Piece(piece.size - size, piece.state))
        piece.size = size

    def merge(self):
        merged = []
        for piece in self.pieces:
            if merged and piece.state == merged[-1].state and piece.state in ("free", "unmapped"):
                merged[-1].size += piece.size
            else:
                merged.append(piece)
        self.pieces = merged


class SlowAllocator:
    def __init__(self, conf, allowed, events):
        self.conf = conf
        self.large = conf.get("large_segment_size_mb", 20) * MiB
        self.max_split = (
            conf["max_split_size_mb"] * MiB if "max_split_size_mb" in conf else UNLIMITED
        )
        self.expandable = conf.get("expandable_segments", False)
        self.allowed = UNLIMITED if allowed is None else allowed
        self.events = events
        self.addresses = AddressSpace(END)
        self.ranges = []
        self.queues = {}
        self.retries = self.ooms = self.syncs = 0

    def reserved(self):
        return sum(r.mapped for r in self.ranges)

    def all_pieces(self):
        return [(r, piece) for r in self.ranges for piece in r.pieces]

    def free_pieces(self, small, stream):
        """Return the free pieces of a pool and stream, sorted by size and then by address."""
        found = [
            (r, piece)
            for r, piece in self.all_pieces()
            if (r.small, r.stream, piece.state) == (small, stream, "free")
        ]
        return sorted(found, key=lambda entry: (entry[1].size, entry[0].address_of(entry[1])))

    def round(self, nbytes):
        divisions = self.conf.get("roundup_power2_divisions", 0)
        if divisions > 1 and nbytes > 512 * divisions:
            power = 1
            while power * 2 <= nbytes:
                power *= 2
            candidate = power
            while candidate < nbytes:
                candidate += power // divisions
            return candidate
        return max(512, -(-nbytes // 512) * 512)

    def malloc(self, nbytes, stream):
        self.process_events(wait=False)
        size = self.round(nbytes)
        small = size <= MiB
        if small:
            wanted = 2 * MiB
        elif size < 10 * MiB:
            wanted = self.large
        else:
            wanted = -(-size // (2 * MiB)) * 2 * MiB
        found = self.search(small, size, stream) or self.grow(small, size, wanted, stream)
        if not found and self.release_oversize(small, size, stream):
            found = self.grow(small, size, wanted, stream)
        if not found:
            self.release_cached()
            self.retries += 1
            found = self.grow(small, size, wanted, stream)
        if not found:
            self.ooms += 1
            return None
        r, piece = found
        left = piece.size - size
        if left >= 512 if small or self.expandable else size < self.max_split and left > MiB:
            r.split(piece, size)
        piece.state, piece.requested = "allocated", nbytes
        return piece

    def search(self, small, size, stream):
        fits = [(r, piece) for r, piece in self.free_pieces(small, stream) if piece.size >= size]
        if not fits:
            return None
        while self.expandable and len(fits) > 1 and self.reach(*fits[1]) < self.reach(*fits[0]):
            fits.pop(0)
        r, piece = fits[0]
        if size < self.max_split <= piece.size:
            return None
        rounding = self.conf.get("max_non_split_rounding_mb", self.large // MiB) * MiB
        return None if size >= self.max_split and piece.size >= size + rounding else (r, piece)

    def reach(self, r, piece):
        following = r.following(piece)
        return piece.size + (following.size if following and following.state == "unmapped" else 0)

    def grow(self, small, size, wanted, stream):
        if self.reserved() + wanted > self.allowed:
            return None
        if self.expandable:
            return self.expand(small, size, stream)
        if self.reserved() + wanted > TOTAL:
            return None
        piece = Piece(wanted, "free")
        self.ranges.append(Range(self.addresses.take(wanted), small, stream, 0, [piece]))
        return self.ranges[-1], piece

    def expand(self, small, size, stream):
        page = 2 * MiB if small else self.large
        ranges = [r for r in self.ranges if (r.small, r.stream) == (small, stream)]
        if not ranges:
            ranges = [
                Range(
                    0, small, stream, page, [Piece(-(-TOTAL * 9 // 8 // page) * page, "unmapped")]
                )
            ]
            self.ranges += ranges
        (r,) = ranges
        for i, piece in enumerate(r.pieces):
            if piece.state != "unmapped":
                continue
            start = i - 1 if i and r.pieces[i - 1].state == "free" else i
            run = []
            for candidate in r.pieces[start:]:
                if candidate.state not in ("free", "unmapped"):
                    break
                run.append(candidate)
            if sum(candidate.size for candidate in run) >= size:
                return self.map(r, run, size)
        raise AssertionError("1 1/8 of the memory has room for all that fits into the memory")

    def map(self, r, run, size):
        """Map pages from the front of the unused pieces `run` of the range `r`.

        It stops when `size` bytes are mapped, and returns the range and its mapped piece. It
        returns None if the device is full.
        """
        mapped = 0
        for piece in run:
            if mapped >= size:
                break
            if piece.state == "unmapped":
                pages = -(-min(size - mapped, piece.size) // r.page) * r.page
                if self.reserved() + pages > TOTAL:
                    r.merge()
                    return None
                if pages < piece.size:
                    r.split(piece, pages)
                piece.state = "free"
            mapped += piece.size
        start = sum(piece.size for piece in r.pieces[: r.pieces.index(run[0])])
        r.merge()
        return next(
            (r, piece)
            for piece in r.pieces
            if r.address_of(piece) <= r.address + start < r.address_of(piece) + piece.size
        )

    def free(self, piece):
        if not piece.users:
            return self.complete(piece)
        piece.state = "pending"
        for stream in sorted(piece.users):
            event = self.events.record(stream)
            piece.waits.append(event)
            self.queues.setdefault(stream, []).append((event, piece))
        piece.users = set()

    def complete(self, piece):
        piece.state, piece.requested = "free", 0
        next(r for r in self.ranges if piece in r.pieces).merge()

    def process_events(self, wait):
        for queue in self.queues.values():
            while queue and (wait or self.events.done(queue[0][0])):
                event, piece = queue.pop(0)
                self.events.wait(event)
                piece.waits.remove(event)
                if not piece.waits:
                    self.complete(piece)

    def release_cached(self):
        self.syncs += 1
        self.process_events(wait=True)
        for r in [
            r for r in self.ranges if not r.page and [piece.state for piece in r.pieces] == ["free"]
        ]:
            self.give_back(r)
        for r, piece in [
            (r, piece) for r, piece in self.all_pieces() if r.page and piece.state == "free"
        ]:
            offset = r.address_of(piece) - r.address
            first, last = -(-offset // r.page) * r.page, (offset + piece.size) // r.page * r.page
            if first < last:
                ends = (first - offset, last - first, offset + piece.size - last)
                parts = [
                    Piece(size, state)
                    for size, state in zip(ends, ("free", "unmapped", "free"), strict=True)
                    if size
                ]
                place = r.pieces.index(piece)
                r.pieces[place : place + 1] = parts
        for r in self.ranges:
            r.merge()
        self.ranges = [r for r in self.ranges if r.mapped]

    def release_oversize(self, small, size, stream):
        if self.max_split == UNLIMITED:
            return False
        wanted = max(size, self.max_split)
        oversize = [
            r
            for r, piece in self.free_pieces(small, stream)
            if piece.size >= self.max_split and not r.page
        ]
        enough = [r for r in oversize if r.mapped >= wanted]
        if enough:
            self.give_back(enough[0])
            return True
        released = 0
        for r in reversed(oversize):
            if released < wanted:
                released += r.mapped
                self.give_back(r)
        return released >= wanted

    def give_back(self, r):
        self.ranges.remove(r)
        self.addresses.give_back(r.address, r.mapped)

    def figures(self):
        """Return the current value of every statistic of the allocator, by pool."""
        found = {}
        for name, pools in {
            "all": (True, False),
            "small_pool": (True,),
            "large_pool": (False,),
        }.items():
            here = [r for r in self.ranges if r.small in pools]
            pieces = [piece for r in here for piece in r.pieces]
            active = [piece for piece in pieces if piece.state in ("allocated", "pending")]
            allocated = [piece for piece in active if piece.state == "allocated"]
            inactive = [
                piece
                for r in here
                if not r.page and len(r.pieces) > 1
                for piece in r.pieces
                if piece.state == "free"
            ]
            found[name] = {
                "allocation": len(allocated),
                "segment": sum(not r.page for r in here),
                "active": len(active),
                "inactive_split": len(inactive),
                "allocated_bytes": sum(piece.size for piece in allocated),
                "reserved_bytes": sum(r.mapped for r in here),
                "active_bytes": sum(piece.size for piece in active),
                "inactive_split_bytes": sum(piece.size for piece in inactive),
                "requested_bytes": sum(piece.requested for piece in active),
            }
        return found

    def layout(self):
        """Return (whether small, stream, first address, pieces) of every segment.

        Each mapped stretch of an expandable segment is a segment, and its addresses count from the
        start of the address range.
        """
        names = {
            "allocated": "active_allocated",
            "pending": "active_pending_free",
            "free": "inactive",
        }
        found = []
        for r in self.ranges:
            where, stretch = r.address, []
            for piece in [*r.pieces, Piece(0, "unmapped")]:
                if piece.state == "unmapped" and stretch:
                    found.append((r.small, r.stream, stretch[0][0], tuple(stretch)))
                    stretch = []
                elif piece.state != "unmapped":
                    stretch.append((where, piece.size, piece.requested, names[piece.state]))
                where += piece.size
        return sorted(found)
