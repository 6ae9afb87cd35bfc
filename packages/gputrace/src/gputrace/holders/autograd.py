"""References in C++ that Python's garbage collector does not see: gradients and autograd graphs.

No hook on saved tensors (such as checkpointing, or activations on the CPU) is called.
"""

import gc
import types
from collections.abc import Callable, Iterable, Iterator
from itertools import compress
from typing import Any

import torch

# A reference: who holds, what is held, and how. The last is "grad", "graph" (from a tensor to its
# node), "next" (from node to node), "saved", "variable" (from a node to a leaf) or "hook".
Link = tuple[Any, Any, str]

_is_leaf, _retains_grad, _grad, _grad_fn = (
    getattr(torch._C.TensorBase, name).__get__
    for name in ("is_leaf", "retains_grad", "grad", "grad_fn")
)


def ancestry(kind: type) -> tuple[type, ...]:
    """Return a class and its base classes, without asking its metaclass.

    A metaclass could return something else.
    """
    return type.__getattribute__(kind, "__mro__")


def isinstance_of(thing: Any, kind: type) -> bool:
    """Return whether an object is an instance of a class, without asking its `__class__`.

    An object's `__class__` may name another class than its real one.
    """
    return kind in ancestry(type(thing))


def attributes(kind: type) -> Any:
    """Return a class's own attributes by name, without running the code of its metaclass."""
    return type.__dict__["__dict__"].__get__(kind)


def is_node(kind: type) -> bool:
    """Return whether the objects of a class are nodes of autograd graphs."""
    for base in ancestry(kind):
        if isinstance(attributes(base).get("next_functions"), types.GetSetDescriptorType):
            return True
    return False


def of_classes(objects: list[Any], wanted: Callable[[type], bool]) -> list[Any]:
    """Return the objects whose class fulfils `wanted`.

    `wanted` is called once per class and not per object, because there are very many objects.
    """
    kinds = list(map(type, objects))
    found = set(filter(wanted, set(kinds)))
    return list(compress(objects, map(found.__contains__, kinds)))


def nodes(objects: list[Any]) -> list[Any]:
    """Return the nodes of autograd graphs among some objects."""
    return of_classes(objects, is_node)


def walk(
    tensors: Iterable[torch.Tensor], nodes: Iterable[Any]
) -> tuple[list[torch.Tensor], list[Link]]:
    """Follow gradients and autograd graphs from tensors and nodes.

    Returns:
        All tensors that are kept alive in this way, including those at the start, and the links.
    """
    links: list[Link] = []
    seen: dict[int, Any] = {}  # keeps the objects alive, so that no new object gets their ids
    waiting: list[Any] = []
    found: list[torch.Tensor] = []
    # For each class, the function that yields what its objects hold.
    kinds: dict[type, Callable[[Any], Iterator[tuple[Any, str]]]] = {}

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
            kinds[kind] = _what_holds(kind)
        if kinds[kind] is _held_by_tensor:
            found.append(thing)
        for held, how in kinds[kind](thing):
            links.append((thing, held, how))
            visit(held)
    return found, links


def _what_holds(kind: type) -> Callable[[Any], Iterator[tuple[Any, str]]]:
    """Return a function that yields the objects that an instance of this class keeps alive."""
    if torch.Tensor in ancestry(kind):
        return _held_by_tensor
    if is_node(kind):
        return _Nodes(kind)
    return lambda thing: iter(())


def _held_by_tensor(tensor: torch.Tensor) -> Iterator[tuple[Any, str]]:
    """Yield the gradient and the autograd node of a tensor, if it has them."""
    try:
        if _is_leaf(tensor) or _retains_grad(tensor):  # reading `grad` of other tensors warns
            gradient = _grad(tensor)
            if gradient is not None:
                yield gradient, "grad"
        node = _grad_fn(tensor)
        if node is not None:
            yield node, "graph"
    except RuntimeError:  # an invalid view has no graph
        return


class _Nodes:
    """Callable that yields the objects that an autograd node of one class holds."""

    def __init__(self, kind: type) -> None:
        self._saved = [name for name in dir(kind) if name.startswith("_raw_saved_")]
        # The nodes AccumulateGrad hold a leaf.
        self._leaf = isinstance(getattr(kind, "variable", None), types.GetSetDescriptorType)

    def __call__(self, node: Any) -> Iterator[tuple[Any, str]]:
        for held, how in self._held(node):
            if held is not None:
                yield held, how

    def _held(self, node: Any) -> Iterator[tuple[Any, str]]:
        """Yield what a node holds. Some of the objects may be None."""
        own = getattr(node, "__dict__", None)
        # If C++ holds the node too, this works only for nodes of a Function written in Python.
        for held in gc.get_referents(node):
            if isinstance(held, dict) and held is not own:
                yield held, "hook"
        try:
            for following, _ in node.next_functions:
                yield following, "next"
            if self._leaf:
                yield node.variable, "variable"
            for name in self._saved:
                saved = getattr(node, name)
                if not isinstance(saved, (tuple, list)):
                    saved = [saved]
                for one in saved:
                    if one is not None:
                        yield one.data, "saved"
                        yield one.unpack_hook, "hook"
        except RuntimeError:  # the graph was freed, or this is the context of an unused Function
            return
