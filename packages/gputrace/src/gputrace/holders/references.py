"""The references between the objects that the garbage collector tracks, at one moment."""

import gc
import sys
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gputrace.holders.autograd import Link, is_node, isinstance_of
from gputrace.holders.roots import copies, modules_globals
from gputrace.holders.tensors import all_objects

MOST_ANCESTORS = 100_000  # objects that are followed before the search gives up
MOST_ROOTS = 4  # names that are followed through one object


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The objects that the garbage collector tracks, and their reference counts, before the search adds to either."""

    objects: list[Any]
    counts: list[int]

    @classmethod
    def take(cls) -> "Snapshot":
        hidden = copies()
        # A list made before the snapshot, which would hold itself and never be freed.
        objects = [thing for thing in all_objects() if id(thing) not in hidden]
        if gc.get_freeze_count():  # then the collector does not list what was there when `gc.freeze` was called
            objects += without(objects, modules_globals())
        probe: list = []
        objects.append(probe)
        counts = list(map(sys.getrefcount, objects))
        return cls(objects, [count - counts[-1] + 1 for count in counts])  # one reference to the probe is its variable


def without(known: Iterable[Any], things: Iterable[Any]) -> list[Any]:
    """Those of the things that are not known; objects are compared by identity."""
    ids = set(map(id, known))
    return [thing for thing in things if id(thing) not in ids]


class References:
    """The references between the objects of a snapshot, which has none of the search's own objects."""

    def __init__(self, snapshot: Snapshot, links: Iterable[Link]) -> None:
        self._snapshot = snapshot
        known = set(map(id, snapshot.objects))
        flat, ends = array("Q"), array("Q", [0])
        for thing in snapshot.objects:
            flat.extend(known.intersection(map(id, gc.get_referents(thing))))
            ends.append(len(flat))
        held = np.array(flat, np.uint64)
        order = np.argsort(held, kind="stable")
        self._held = held[order]
        self._holders = np.repeat(np.arange(len(ends) - 1), np.diff(np.array(ends, np.int64)).astype(np.int64))[order]
        self._links: dict[int, list[Link]] = defaultdict(list)
        for link in links:
            self._links[id(link[1])].append(link)

    def holders(self, thing: Any) -> Iterator[tuple[Any, str]]:
        """Who refers to it, and how: "" for a reference of Python's, else as in `autograd.Link`."""
        first, last = np.searchsorted(self._held, np.array([id(thing), id(thing) + 1], np.uint64))
        for index in self._holders[first:last].tolist():
            yield self._snapshot.objects[index], ""
        for holder, _, how in self._links.get(id(thing), ()):
            yield holder, how

    def outside(self, things: list[Any]) -> bool:
        """Has one of them references that the collector does not see: from C++, or from an expression under way?

        Tensors and nodes do not count, whose references from C++ are the links.
        """
        things = [thing for thing in things if not (isinstance_of(thing, torch.Tensor) or is_node(type(thing)))]
        wanted = set(map(id, things))
        counts = {id(t): n for t, n in zip(self._snapshot.objects, self._snapshot.counts, strict=True) if id(t) in wanted}
        for thing in things:
            holders = {id(holder): holder for holder, how in self.holders(thing) if not how}
            seen = sum(held is thing for holder in holders.values() for held in gc.get_referents(holder))
            if counts.get(id(thing), seen) > seen:
                return True
        return False


@dataclass(frozen=True, eq=False)
class Path:
    """A chain of references from a root to `thing`, its last object, which `before` refers to as `how` says (see `References`).

    `length` counts its references. Of a chain of nodes in an autograd graph it keeps the first and the last.
    """

    root: Any
    thing: Any
    before: "Path | None" = None
    how: str = ""
    length: int = 0

    def to(self, held: Any, how: str) -> "Path":
        """The chain with one more object."""
        before = self.before if how == self.how == "next" else self
        return Path(self.root, held, before, how, self.length + 1)

    def steps(self) -> list[tuple[Any, str]]:
        """The objects from the root on, each with the way in which the one before it refers to it."""
        path: Path | None = self
        found = []
        while path is not None:
            found.append((path.thing, path.how))
            path = path.before
        return found[::-1]


class Ancestors:
    """All objects that keep some targets alive, up to those at which the search ends."""

    def __init__(self, references: References, targets: list[Any], ends: Callable[[Any], bool]) -> None:
        self._references = references
        self.objects = {id(target): target for target in targets}
        self._targets = set(self.objects)
        self._held: dict[int, list[tuple[Any, str]]] = defaultdict(list)  # by the holder's id
        self._holders: dict[int, list[Any]] = defaultdict(list)  # by the id of what is held
        waiting = deque(targets)
        while waiting and len(self.objects) < MOST_ANCESTORS:
            thing = waiting.popleft()
            for holder, how in references.holders(thing):
                self._held[id(holder)].append((thing, how))
                self._holders[id(thing)].append(holder)
                if id(holder) not in self.objects:
                    self.objects[id(holder)] = holder
                    if not ends(holder):
                        waiting.append(holder)
        self.complete = not waiting

    def paths(self, roots: Iterable[tuple[Any, Any]]) -> dict[int, list[Path]]:
        """For each target's id the paths to it, the shortest first: one for each object that holds it and each of that one's names.

        `roots` are pairs of a root's name and the object that it names.
        """
        found: dict[int, list[Path]] = defaultdict(list)
        waiting = deque(Path(root, thing) for root, thing in roots if id(thing) in self.objects)
        while waiting:
            path = waiting.popleft()
            known = found[id(path.thing)]
            names = {other.root for other in known}
            goes_on = path.root not in names and len(names) < MOST_ROOTS
            if goes_on or id(path.thing) in self._targets:
                known.append(path)
            if goes_on:
                waiting.extend(path.to(held, how) for held, how in self._held[id(path.thing)])
        return {target: found[target] for target in self._targets}

    def above(self, targets: Iterable[Any]) -> list[Any]:
        """The targets and all objects that keep them alive."""
        found: dict[int, Any] = {}
        waiting = list(targets)
        while waiting:
            thing = waiting.pop()
            if id(thing) not in found:
                found[id(thing)] = thing
                waiting += self._holders[id(thing)]
        return list(found.values())

    def outside(self, things: list[Any]) -> bool:
        """As `References.outside`."""
        return self._references.outside(things)

    def cycles(self, among: list[Any]) -> list[Any]:
        """Those of the objects that lie on a cycle of references, or between two cycles."""
        left = {id(thing): thing for thing in among}
        for neighbours in (
            lambda key: [id(thing) for thing in self._holders[key]],
            lambda key: [id(thing) for thing, _ in self._held[key]],
        ):
            loose = list(left)
            while loose:
                loose = [key for key in left if left.keys().isdisjoint(neighbours(key))]
                for key in loose:
                    del left[key]
        return list(left.values())
