"""References between the objects that Python's garbage collector tracks, at one moment."""

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

MOST_ANCESTORS = 100_000  # objects after which the search gives up
MOST_ROOTS = 4  # names that are followed through one object


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The objects that the garbage collector tracks, and their reference counts.

    A snapshot is taken before the search makes objects and references of its own.
    """

    objects: list[Any]
    counts: list[int]

    @classmethod
    def take(cls) -> "Snapshot":
        """Return a snapshot of the objects that the garbage collector tracks at this moment."""
        hidden = copies()
        # `all_objects` returns before this list exists. The list would contain itself otherwise.
        objects = [thing for thing in all_objects() if id(thing) not in hidden]
        if gc.get_freeze_count():  # the collector does not list objects from before `gc.freeze`
            objects += without(objects, modules_globals())
        probe: list = []
        objects.append(probe)
        counts = list(map(sys.getrefcount, objects))
        # The probe has one reference: its variable. The others come from counting.
        return cls(objects, [count - counts[-1] + 1 for count in counts])


def without(known: Iterable[Any], things: Iterable[Any]) -> list[Any]:
    """Return the things that are not among `known`. Objects are compared by identity."""
    ids = set(map(id, known))
    return [thing for thing in things if id(thing) not in ids]


def referents(thing: Any) -> list[Any]:
    """Return the objects that a thing refers to, as `gc.get_referents` does.

    Of Python's module `_asyncio`, only its dict is returned. Before Python 3.12.6,
    `gc.get_referents` also returns freed iterators of this module. After that, the next garbage
    collection never ends (github.com/python/cpython/issues/122695).
    """
    if thing is sys.modules.get("_asyncio"):
        return [vars(thing)]
    return gc.get_referents(thing)


class References:
    """The references between the objects of a snapshot, and those in C++ (`links`)."""

    def __init__(self, snapshot: Snapshot, links: Iterable[Link]) -> None:
        self._snapshot = snapshot
        known = set(map(id, snapshot.objects))
        flat, ends = array("Q"), array("Q", [0])
        for thing in snapshot.objects:
            flat.extend(known.intersection(map(id, referents(thing))))
            ends.append(len(flat))
        held = np.array(flat, np.uint64)
        order = np.argsort(held, kind="stable")
        self._held = held[order]
        counts = np.diff(np.array(ends, np.int64)).astype(np.int64)
        self._holders = np.repeat(np.arange(len(ends) - 1), counts)[order]
        self._links: dict[int, list[Link]] = defaultdict(list)
        for link in links:
            self._links[id(link[1])].append(link)

    def holders(self, thing: Any) -> Iterator[tuple[Any, str]]:
        """Yield (object, how) for each object that refers to a thing.

        `how` is "" for a reference in Python, and otherwise the word of `autograd.Link`.
        """
        bounds = np.array([id(thing), id(thing) + 1], np.uint64)
        first, last = np.searchsorted(self._held, bounds)
        for index in self._holders[first:last].tolist():
            yield self._snapshot.objects[index], ""
        for holder, _, how in self._links.get(id(thing), ()):
            yield holder, how

    def outside(self, things: list[Any]) -> bool:
        """Return whether one of the things has references that the garbage collector does not see.

        Such references come from C++, or from an expression that is being evaluated. Tensors and
        nodes are left out, because their references in C++ are known as links.
        """
        others = []
        for thing in things:
            if not isinstance_of(thing, torch.Tensor) and not is_node(type(thing)):
                others.append(thing)
        wanted = set(map(id, others))
        counts = {}
        for thing, count in zip(self._snapshot.objects, self._snapshot.counts, strict=True):
            if id(thing) in wanted:
                counts[id(thing)] = count
        for thing in others:
            holders = {id(holder): holder for holder, how in self.holders(thing) if not how}
            seen = 0
            for holder in holders.values():
                seen += sum(held is thing for held in referents(holder))
            if counts.get(id(thing), seen) > seen:
                return True
        return False


@dataclass(frozen=True, eq=False)
class Path:
    """Chain of references from a root to an object.

    Of a chain of nodes in an autograd graph, only the first and the last node are kept.

    Attributes:
        thing: the last object.
        before: the chain without the last object.
        how: how the object before refers to the last one (see `References`).
        length: the number of references, including those of nodes that are not kept.
    """

    root: Any
    thing: Any
    before: "Path | None" = None
    how: str = ""
    length: int = 0

    def to(self, held: Any, how: str) -> "Path":
        """Return a longer path, which continues from this path's last object to `held`.

        `how` says how the last object refers to `held` (see `References`).
        """
        before: Path | None = self
        if how == self.how == "next":
            before = self.before
        return Path(self.root, held, before, how, self.length + 1)

    def steps(self) -> list[tuple[Any, str]]:
        """Return (object, how) for each object from the root on.

        `how` says how the previous object refers to this one.
        """
        path: Path | None = self
        found = []
        while path is not None:
            found.append((path.thing, path.how))
            path = path.before
        return found[::-1]


class Ancestors:
    """All objects that keep the targets alive, directly or through other objects.

    The search does not continue to the holders of an object for which `ends` is true.

    Attributes:
        objects: the targets and their holders, by id.
        complete: whether the search followed all of these objects. It stops at MOST_ANCESTORS.
    """

    def __init__(
        self, references: References, targets: list[Any], ends: Callable[[Any], bool]
    ) -> None:
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
        """Return the paths to each target, by its id, the shortest first.

        There is a path for each object that holds the target, and for each name of that object.

        Args:
            roots: pairs of a root's name and the object that it names.
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
        """Return the targets and all objects that keep them alive."""
        found: dict[int, Any] = {}
        waiting = list(targets)
        while waiting:
            thing = waiting.pop()
            if id(thing) not in found:
                found[id(thing)] = thing
                waiting += self._holders[id(thing)]
        return list(found.values())

    def outside(self, things: list[Any]) -> bool:
        """Return whether one of these objects has references that the collector does not see."""
        return self._references.outside(things)

    def cycles(self, among: list[Any]) -> list[Any]:
        """Return the objects of `among` that are on a reference cycle, or between two cycles."""
        left = {id(thing): thing for thing in among}
        self._remove_loose(left, lambda key: [id(thing) for thing in self._holders[key]])
        self._remove_loose(left, lambda key: [id(thing) for thing, _ in self._held[key]])
        return list(left.values())

    @staticmethod
    def _remove_loose(left: dict[int, Any], neighbours: Callable[[int], list[int]]) -> None:
        """Remove objects from `left` that have no neighbours in it, until every object has one.

        `neighbours` returns the ids of the objects that an object refers to, or is referred to by.
        """
        loose = list(left)
        while loose:
            loose = [key for key in left if left.keys().isdisjoint(neighbours(key))]
            for key in loose:
                del left[key]
