"""Who keeps a tensor alive, by name."""

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
    """What keeps a tensor alive: its `kind`, the expression that names it (empty where there is none), and both in words."""

    kind: str
    name: str
    text: str

    def __str__(self) -> str:
        return self.text


UNSEEN = Holder("C++", "", "C++ only")  # for what neither a name nor a Python object leads to


def search(snapshot: Snapshot, living: Living, storages: list[DeviceStorage]) -> list[list[Holder]]:
    """Who keeps each of these storages alive, the shortest name first; no list is empty."""
    roots = Roots()
    targets = [target for storage in storages for target in _targets(storage)]
    ancestors = Ancestors(References(snapshot, living.links), targets, roots.ends)
    names = roots.names(ancestors.objects)
    clear, faint = (ancestors.paths(pair for pair in names if pair[0].faint is wanted) for wanted in (False, True))
    return [_named(storage, clear) or _named(storage, faint) or [_unnamed(storage, ancestors)] for storage in storages]


def _targets(storage: DeviceStorage) -> list[Any]:
    return [*storage.tensors, *storage.storages]


def _named(storage: DeviceStorage, paths: dict[int, list[Path]]) -> list[Holder]:
    """The storage's holders, each by its shortest names; an autograd graph by the names of several tensors that lead to it."""
    targets = _targets(storage)
    own = set(map(id, targets))
    by_holder: dict[tuple[int, int], list[tuple[int, Path, Holder]]] = defaultdict(list)
    for target in targets:
        for path in paths[id(target)]:
            steps = path.steps()
            if not any(id(thing) in own for thing, _ in steps[:-1]):  # by way of itself
                name, parts = name_of(path.root, steps)
                holder = Holder(name.kind.removeprefix("the "), name.expression, name.text + _as_view(target, storage))
                by_holder[id(target), id(path.before and path.before.thing)].append((parts, path, holder))
    ranks: dict[str, tuple[bool, int, int, Holder]] = {}
    for found in by_holder.values():
        fewest = min(parts for parts, _, _ in found)
        for parts, path, holder in found:
            if parts == fewest or (path.before is not None and is_node(type(path.before.thing))):
                rank = _in_library(path), parts, path.length, holder
                ranks[holder.text] = min(rank, ranks.get(holder.text, rank))
    ranked = sorted(ranks.values())
    return [holder for in_library, *_, holder in ranked if in_library == ranked[0][0]]  # those only if there is no better name


def _in_library(path: Path) -> bool:
    """Does the path lead through a variable of a library's function that has ended?"""
    things = [thing for thing, _ in path.steps()]
    last = [
        thing
        for thing, following in pairwise(things)
        if isinstance_of(thing, types.FrameType) and not isinstance_of(following, types.FrameType)
    ]
    return any(not is_users(frame.f_code.co_filename) for frame in last)


def _as_view(target: Any, storage: DeviceStorage) -> str:
    """A remark if a tensor is a small part of the storage that it keeps."""
    if not isinstance_of(target, torch.Tensor) or target.layout is not torch.strided or nbytes(target) > storage.nbytes // 2:
        return ""
    return f", a view of {units.byte_text(nbytes(target))} that keeps all {units.byte_text(storage.nbytes)}"


def _unnamed(storage: DeviceStorage, ancestors: Ancestors) -> Holder:
    """The holder when no name leads to the storage."""
    targets = _targets(storage)
    above = without(targets, ancestors.above(targets))
    if not ancestors.complete:
        return Holder("unknown", "", "more objects than the search follows")
    cycle = ancestors.cycles([*targets, *above])
    if not cycle:
        return Holder("C++", "", f"{_kinds(above)} that C++ holds, a hook of an autograd graph perhaps") if above else UNSEEN
    if ancestors.outside(cycle):
        return Holder("C++", "", f"{_kinds(cycle)} that C++ holds")
    in_graph = any(is_node(type(thing)) for thing in cycle)
    seen = "through an autograd graph, which gc.collect() may not see" if in_graph else "not yet collected: gc.collect() frees it"
    return Holder("reference cycle", "", f"a reference cycle of {_kinds(cycle)}, {seen}")


def _kinds(things: Iterable[Any]) -> str:
    """The classes of these objects: the program's own, or else Python's."""
    kinds = {type(thing) for thing in things}
    own = {kind for kind in kinds if kind.__module__ != "builtins"} or kinds
    return " and ".join(sorted(kind.__qualname__ for kind in own))
