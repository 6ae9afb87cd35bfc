"""Search for what keeps a tensor alive, by name."""

import types
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from gputrace import units
from gputrace.holders.autograd import is_node, isinstance_of
from gputrace.holders.names import name_of
from gputrace.holders.references import Ancestors, Path, References, Snapshot, without
from gputrace.holders.roots import Roots
from gputrace.holders.tensors import DeviceStorage, Living, nbytes
from virtualgpu.source_lines import is_users


@dataclass(frozen=True, order=True)
class Holder:
    """Something that keeps a tensor alive, such as a variable or a reference cycle.

    Attributes:
        kind: the kind of holder, such as "global" or "reference cycle".
        name: the expression that names the holder, or "" if there is none.
        text: both in words.
    """

    kind: str
    name: str
    text: str

    def __str__(self) -> str:
        return self.text


UNSEEN = Holder("C++", "", "C++ only")  # if neither a name nor a Python object leads to the memory


def search(snapshot: Snapshot, living: Living, storages: list[DeviceStorage]) -> list[list[Holder]]:
    """Return what keeps each of the storages alive, the shortest name first.

    Each list has at least one holder.
    """
    roots = Roots()
    targets = [target for storage in storages for target in _targets(storage)]
    ancestors = Ancestors(References(snapshot, living.links), targets, roots.ends)
    names = roots.names(ancestors.objects)
    clear = ancestors.paths(pair for pair in names if not pair[0].faint)
    faint = ancestors.paths(pair for pair in names if pair[0].faint)
    found = []
    for storage in storages:
        holders = _named(storage, clear) or _named(storage, faint)
        found.append(holders or [_unnamed(storage, ancestors)])
    return found


def _targets(storage: DeviceStorage) -> list[Any]:
    """Return the Python objects that hold a storage."""
    return [*storage.tensors, *storage.storages]


def _named(storage: DeviceStorage, paths: dict[int, list[Path]]) -> list[Holder]:
    """Return the named holders of a storage, each with its shortest names.

    `paths` are the paths to each Python object by its id. An autograd graph has the names of
    several tensors that lead to it.
    """
    targets = _targets(storage)
    own = set(map(id, targets))
    by_holder: dict[tuple[int, int], list[tuple[int, Path, Holder]]] = defaultdict(list)
    for target in targets:
        for path in paths[id(target)]:
            steps = path.steps()
            if any(id(thing) in own for thing, _ in steps[:-1]):
                continue  # this path leads through the storage itself
            name, parts = name_of(path.root, steps)
            text = name.text + _as_view(target, storage)
            holder = Holder(name.kind.removeprefix("the "), name.expression, text)
            before = path.before.thing if path.before else None
            by_holder[id(target), id(before)].append((parts, path, holder))
    ranks: dict[str, tuple[bool, int, int, Holder]] = {}
    for found in by_holder.values():
        fewest = min(parts for parts, _, _ in found)
        for parts, path, holder in found:
            is_graph = path.before is not None and is_node(type(path.before.thing))
            if parts == fewest or is_graph:
                rank = _in_library(path), parts, path.length, holder
                ranks[holder.text] = min(rank, ranks.get(holder.text, rank))
    ranked = sorted(ranks.values())
    # Names inside a library are used only if there are no others.
    return [holder for in_library, *_, holder in ranked if in_library == ranked[0][0]]


def _in_library(path: Path) -> bool:
    """Return whether a path leads through a variable of a library's function that has ended."""
    things = [thing for thing, _ in path.steps()]
    for thing, following in pairwise(things):
        # Frames refer to the frames that called them. Only the last one has the variable.
        is_last = not isinstance_of(following, types.FrameType)
        if isinstance_of(thing, types.FrameType) and is_last:
            filename = thing.f_code.co_filename
            if not is_users(filename):
                return True
    return False


def _as_view(target: Any, storage: DeviceStorage) -> str:
    """Return a remark if a tensor is a small part of the storage that it keeps, or ""."""
    if not isinstance_of(target, torch.Tensor) or target.layout is not torch.strided:
        return ""
    part = nbytes(target)
    if part > storage.nbytes // 2:
        return ""
    whole = units.byte_text(storage.nbytes)
    return f", a view of {units.byte_text(part)} that keeps all {whole}"


def _unnamed(storage: DeviceStorage, ancestors: Ancestors) -> Holder:
    """Return the holder of a storage to which no name leads, such as a reference cycle."""
    targets = _targets(storage)
    above = without(targets, ancestors.above(targets))
    if not ancestors.complete:
        return Holder("unknown", "", "more objects than the search follows")
    cycle = ancestors.cycles([*targets, *above])
    if not cycle and above:
        text = f"{_kinds(above)} that C++ holds, a hook of an autograd graph perhaps"
        return Holder("C++", "", text)
    if not cycle:
        return UNSEEN
    if ancestors.outside(cycle):
        return Holder("C++", "", f"{_kinds(cycle)} that C++ holds")
    seen = "not yet collected: gc.collect() frees it"
    if any(is_node(type(thing)) for thing in cycle):
        seen = "through an autograd graph, which gc.collect() may not see"
    return Holder("reference cycle", "", f"a reference cycle of {_kinds(cycle)}, {seen}")


def _kinds(things: Iterable[Any]) -> str:
    """Return the classes of some objects, without Python's own classes if there are others."""
    kinds = {type(thing) for thing in things}
    own = {kind for kind in kinds if kind.__module__ != "builtins"} or kinds
    return " and ".join(sorted(kind.__qualname__ for kind in own))
