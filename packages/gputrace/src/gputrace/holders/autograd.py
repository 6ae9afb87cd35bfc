"""What C++ keeps alive for a tensor, unseen by Python's garbage collector: its gradient and its autograd graph.

No hook on saved tensors (activations on the CPU, checkpoints) is called.
"""

import gc
import types
from collections.abc import Callable, Iterable, Iterator
from itertools import compress
from typing import Any

import torch

# Who holds, what is held, and how: "grad", "graph" (a tensor's node), "next" (a node's), "saved", "variable" (a leaf) or "hook".
Link = tuple[Any, Any, str]

_is_leaf, _retains_grad, _grad, _grad_fn = (
    getattr(torch._C.TensorBase, name).__get__ for name in ("is_leaf", "retains_grad", "grad", "grad_fn")
)


def ancestry(kind: type) -> tuple[type, ...]:
    """A class and those it descends from, whatever its metaclass says."""
    return type.__getattribute__(kind, "__mro__")


def isinstance_of(thing: Any, kind: type) -> bool:
    """As isinstance, by the class alone: an object's `__class__` may be anything."""
    return kind in ancestry(type(thing))


def attributes(kind: type) -> Any:
    """A class's own attributes, by name."""
    return type.__dict__["__dict__"].__get__(kind)


def is_node(kind: type) -> bool:
    """Are the objects of this class nodes of autograd graphs?"""
    return any(isinstance(attributes(base).get("next_functions"), types.GetSetDescriptorType) for base in ancestry(kind))


def of_classes(objects: list[Any], wanted: Callable[[type], bool]) -> list[Any]:
    """The objects whose class is wanted; `wanted` is called once a class, for there are very many objects."""
    kinds = list(map(type, objects))
    found = set(filter(wanted, set(kinds)))
    return list(compress(objects, map(found.__contains__, kinds)))


def nodes(objects: list[Any]) -> list[Any]:
    """The nodes of autograd graphs among these objects."""
    return of_classes(objects, is_node)


def walk(tensors: Iterable[torch.Tensor], nodes: Iterable[Any]) -> tuple[list[torch.Tensor], list[Link]]:
    """All tensors that these tensors and nodes keep alive by gradients and graphs, themselves included, and the links between them."""
    links: list[Link] = []
    seen: dict[int, Any] = {}  # it keeps each alive, so that no other gets its id
    waiting: list[Any] = []
    found: list[torch.Tensor] = []
    kinds: dict[type, Any] = {}  # what the objects of a class hold

    def visit(thing: Any) -> None:
        if id(thing) not in seen:
            seen[id(thing)] = thing
            waiting.append(thing)

    for start in (*tensors, *nodes):
        visit(start)
    while waiting:
        thing = waiting.pop()
        kind = type(thing)
        if kind not in kinds:
            is_tensor = torch.Tensor in ancestry(kind)
            kinds[kind] = _held_by_tensor if is_tensor else _Nodes(kind) if is_node(kind) else None
        if kinds[kind] is _held_by_tensor:
            found.append(thing)
        for held, how in kinds[kind](thing) if kinds[kind] else ():
            links.append((thing, held, how))
            visit(held)
    return found, links


def _held_by_tensor(tensor: torch.Tensor) -> Iterator[tuple[Any, str]]:
    try:
        if (_is_leaf(tensor) or _retains_grad(tensor)) and (gradient := _grad(tensor)) is not None:  # others warn when it is read
            yield gradient, "grad"
        if (node := _grad_fn(tensor)) is not None:
            yield node, "graph"
    except RuntimeError:  # a view that was changed where that is not allowed has no graph to show
        return


class _Nodes:
    """What the nodes of one class hold."""

    def __init__(self, kind: type) -> None:
        self._saved = [name for name in dir(kind) if name.startswith("_raw_saved_")]
        self._leaf = isinstance(getattr(kind, "variable", None), types.GetSetDescriptorType)  # AccumulateGrad

    def __call__(self, node: Any) -> Iterator[tuple[Any, str]]:
        for held, how in self._held(node):
            if held is not None:
                yield held, how

    def _held(self, node: Any) -> Iterator[tuple[Any, str]]:
        own = getattr(node, "__dict__", None)
        for held in gc.get_referents(node):  # works for nodes that C++ holds too only if they are of a Function written in Python
            if isinstance(held, dict) and held is not own:
                yield held, "hook"
        try:
            for following, _ in node.next_functions:
                yield following, "next"
            if self._leaf:
                yield node.variable, "variable"
            for name in self._saved:
                saved = getattr(node, name)
                for one in saved if isinstance(saved, (tuple, list)) else () if saved is None else (saved,):
                    yield one.data, "saved"
                    yield one.unpack_hook, "hook"
        except RuntimeError:  # the graph was freed, or the context of a Function was never part of one
            return
