"""The name of an object from the name of the one that refers to it: from `model` to `model.fc.weight.grad`."""

import collections
import functools
import types
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from gputrace.holders.autograd import ancestry, attributes, is_node, isinstance_of
from gputrace.holders.roots import Name, location, tool_of, variables

Hop = tuple[Any, str]  # an object, and how the one before it refers to it (see `References`)
Found = tuple[Name, int] | None  # a name, and how many objects further along the path its object is

UNNAMED = "a value"  # of an expression under way, or in a function of the kit's own

_VAGUE = 100  # parts that a vague part counts as
_KEY = "a key"

_HOOKS = {
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}
_PARTS = {"_parameters": "a parameter", "_buffers": "a buffer", "_modules": ""}  # of a module: their entries read as attributes
_FIELDS: dict[type, tuple[str, ...]] = {
    functools.partial: ("func", "args", "keywords"),
    types.MethodType: ("__self__", "__func__"),
    types.BuiltinMethodType: ("__self__",),
    types.CellType: ("cell_contents",),
    weakref.ref: ("__callback__",),
    property: ("fget", "fset", "fdel"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
}


def name_of(root: Name, steps: list[Hop]) -> tuple[Name, int]:
    """The name of the last object of a path whose first is called `root`, and the number of its parts, a vague one counted as many."""
    name, at, parts = root, 0, 0
    while at < len(steps) - 1:
        name, taken = _next(name, [thing for thing, _ in steps[at:]], steps[at + 1][1])
        at += taken
        parts += _VAGUE if name.kind == _KEY or name.expression.endswith(("…]", "…}")) else 1
    return name, parts


def _next(name: Name, chain: list[Any], how: str) -> tuple[Name, int]:
    """The name of the second object of the chain, or of one further on, when the first is called `name`."""
    thing, held = chain[0], chain[1]
    if is_node(type(thing)):
        return _in_node(name, chain, how)
    for kind, naming in _NAMINGS:
        if isinstance_of(thing, kind) and (found := naming(name, chain, how)):
            return found
    own = own_attributes(thing)
    if own is held and len(chain) > 2:
        named, taken = _attribute(name, thing, own, chain[2:])
        return named, taken + 1
    if any(value is held for value in list(own.values())):
        return _attribute(name, thing, own, chain[1:])
    for key, value in slots(thing).items():
        if value is held:
            return name.then(f".{key}"), 1
    for key in next((fields for kind, fields in _FIELDS.items() if isinstance_of(thing, kind)), ()):
        if getattr(thing, key, None) is held:
            return name.then(f".{key}"), 1
    return name.then("[…]"), 1  # of an iterator, for instance, whose contents cannot be read


def own_attributes(thing: Any) -> dict:
    """The `__dict__` of an object, read without running its code."""
    for base in ancestry(type(thing)):
        slot = attributes(base).get("__dict__")
        if isinstance(slot, (types.GetSetDescriptorType, types.MemberDescriptorType)):
            found = slot.__get__(thing)
            return found if isinstance(found, dict) else {}
    return {}


def slots(thing: Any) -> dict[str, Any]:
    """The values in the slots of an object."""
    found = {}
    for base in ancestry(type(thing)):
        for key, slot in attributes(base).items():
            if isinstance(slot, types.MemberDescriptorType) and key != "__dict__":
                try:
                    found[key] = slot.__get__(thing)
                except AttributeError:  # an empty slot
                    continue
    return found


def _attribute(name: Name, thing: Any, own: dict, chain: list[Any]) -> tuple[Name, int]:
    """The name of the chain's first object, the value of an attribute, or of one inside it."""
    value, further = chain[0], chain[1] if len(chain) > 1 else None
    key = next((key for key, other in list(own.items()) if other is value), "…")
    inner = next((k for k, other in list(dict.items(value)) if other is further), None) if isinstance_of(value, dict) else None
    if inner is not None and isinstance_of(thing, torch.nn.Module):
        if key in _PARTS:
            return name.then(f"[{inner}]" if inner.isdigit() else f".{inner}", _PARTS[key]), 2
        if key in _HOOKS:
            return Name(_HOOKS[key], _callable_name(further), name.text), 2
    if inner is not None and isinstance_of(thing, torch.optim.Optimizer) and key == "state":
        numbered = [parameter for group in thing.param_groups for parameter in group["params"]]
        number = next((str(index) for index, parameter in enumerate(numbered) if parameter is inner), "…")
        return name.then(f".state[{number}]"), 2
    return name.then(f".{key}"), 1


def _callable_name(thing: Any) -> str:
    named = getattr(thing, "__qualname__", None)
    return named if isinstance(named, str) else type(thing).__name__


# Containers


def _in_dict(name: Name, chain: list[Any], how: str) -> Found:
    for key, value in list(dict.items(chain[0])):  # a copy, for other threads run on
        if value is chain[1]:
            return name.then(f"[{_key(key)}]"), 1
    if any(key is chain[1] for key in list(dict.keys(chain[0]))):
        return Name(_KEY, "", name.text), 1
    return None


def _key(key: Any) -> str:
    """A dictionary's key as source code, if that is the same in every run."""
    if type(key) is tuple:
        return ", ".join(map(_key, key))
    return repr(key) if type(key) in (str, int, float, bool, type(None), bytes) else "…"


def _in_sequence(name: Name, chain: list[Any], how: str) -> Found:
    kind = next(base for base in (list, tuple, collections.deque) if isinstance_of(chain[0], base))
    index = next((index for index, value in enumerate(list(kind.__iter__(chain[0]))) if value is chain[1]), None)
    if index is None:
        return None
    fields = getattr(type(chain[0]), "_fields", None)  # of a named tuple
    return name.then(f".{fields[index]}" if kind is tuple and fields else f"[{index}]"), 1


def _in_set(name: Name, chain: list[Any], how: str) -> Found:
    return None if own_attributes(chain[0]) is chain[1] else (name.then("{…}"), 1)


# Functions and classes


def _in_function(name: Name, chain: list[Any], how: str) -> Found:
    function, held = chain[0], chain[1]
    if len(chain) < 3:
        return None
    if own_attributes(function) is held:
        if held.get("__wrapped__") is chain[2]:
            return name, 2  # a wrapper stands for the function that it wraps
        return None
    code, of = function.__code__, name.text if name.expression else f"`{function.__qualname__}`, {name.text}"
    if held is function.__closure__:
        if len(chain) > 3 and chain[3] is getattr(function, "__wrapped__", None):
            return name, 3
        return Name("closure variable", code.co_freevars[_position(held, chain[2])], of), 3
    if held is function.__defaults__:
        return Name("default argument", code.co_varnames[code.co_argcount - len(held) + _position(held, chain[2])], of), 2
    if held is function.__kwdefaults__:
        return Name("default argument", next(key for key, value in held.items() if value is chain[2]), of), 2
    return None


def _position(things: tuple, wanted: Any) -> int:
    return next(index for index, thing in enumerate(things) if thing is wanted)


def _in_cache(name: Name, chain: list[Any], how: str) -> Found:
    """The results that functools.lru_cache keeps, and the arguments in its keys."""
    if own_attributes(chain[0]) is chain[1]:
        return None
    at = 1
    while at < len(chain) - 1 and type(chain[at]) in (dict, tuple):
        at += 1
    return Name("the lru_cache", "", name.text), at


def _in_class(name: Name, chain: list[Any], how: str) -> Found:
    if len(chain) < 3 or type(chain[1]) is not dict:
        return None
    key = next((key for key, value in chain[1].items() if value is chain[2]), "…")
    return Name("class attribute", f"{name.expression}.{key}", name.of), 2


# Frames


def _variable(frame: types.FrameType, chain: list[Any]) -> Found:
    """The variable of the frame that holds the second object, or the third if the second is a closure's cell."""
    taken = 2 if type(chain[1]) is types.CellType and len(chain) > 2 else 1
    found = next((variable for variable, value in variables(frame) if value is chain[taken]), None)
    return None if found is None else (Name("local", found), taken)


def _in_suspended(name: Name, chain: list[Any], how: str) -> Found:
    word, frame = next((word, getattr(chain[0], frame)) for kind, (word, frame) in _SUSPENDED.items() if isinstance_of(chain[0], kind))
    if frame is None:
        return None
    variable, taken = _variable(frame, chain) or (Name(UNNAMED, ""), 1)
    return replace(variable, of=f"the suspended {word} {location(frame)}, held by {name.text}"), taken


_SUSPENDED = {
    types.GeneratorType: ("generator", "gi_frame"),
    types.CoroutineType: ("coroutine", "cr_frame"),
    types.AsyncGeneratorType: ("generator", "ag_frame"),
}


def _in_frame(name: Name, chain: list[Any], how: str) -> tuple[Name, int]:
    """A function that has ended, kept by a traceback or by name."""
    frame = chain[0]
    if isinstance_of(chain[1], types.FrameType):
        return name, 1
    if type(chain[1]) is dict and chain[1] is not frame.f_globals and len(chain) > 2:  # the copy that `f_locals` made
        return _in_frame(name, [frame, *chain[2:]], how)[0], 2
    if tool_of(frame):
        return Name(UNNAMED, "", name.text), len(chain) - 1
    variable, taken = _variable(frame, chain) or (Name(UNNAMED, ""), 1)
    return replace(variable, of=f"{location(frame)}, kept by {name.text}"), taken


def _in_traceback(name: Name, chain: list[Any], how: str) -> Found:
    return name if name.kind == "the traceback" else Name("the traceback", "", name.text), 1


def _in_exception(name: Name, chain: list[Any], how: str) -> Found:
    error, held = chain[0], chain[1]
    if isinstance_of(held, types.TracebackType):
        return Name("the traceback", "", name.text), 1
    if isinstance_of(held, BaseException):  # the one during which it was raised
        return name, 1
    return (name.then(".args"), 1) if held is attributes(BaseException)["args"].__get__(error) else None


# Tensors and autograd


def _in_tensor(name: Name, chain: list[Any], how: str) -> Found:
    if how == "grad":
        return name.then(".grad", "a gradient"), 1
    if is_node(type(chain[1])):
        return name, 1
    if isinstance_of(chain[1], dict) and own_attributes(chain[0]) is not chain[1] and len(chain) > 2:
        return Name("tensor hook", _callable_name(chain[2]), name.text), 2
    return None


def _in_node(name: Name, chain: list[Any], how: str) -> tuple[Name, int]:
    node, held = chain[0], chain[1]
    if name.kind != "the autograd graph":
        name = Name("the autograd graph", "", name.text)
    if how == "hook" and isinstance_of(held, dict) and len(chain) > 2:
        return Name("hook", _callable_name(chain[2]), name.text), 2
    if how == "hook":
        return Name("hook", _callable_name(held), name.text), 1
    if how == "saved":
        return replace(name, remark=f"saved by {node.name()}"), 1
    if own_attributes(node) is held and len(chain) > 2:
        named, taken = _attribute(Name("attribute", "ctx", f"{node.name()} in {name.text}"), node, held, chain[2:])
        return named, taken + 1
    return name, 1


_NAMINGS: list[tuple[type, Callable[[Name, list[Any], str], Found]]] = [
    (dict, _in_dict),
    (list, _in_sequence),
    (tuple, _in_sequence),
    (collections.deque, _in_sequence),
    (set, _in_set),
    (frozenset, _in_set),
    (types.FunctionType, _in_function),
    (functools._lru_cache_wrapper, _in_cache),
    (type, _in_class),
    *((kind, _in_suspended) for kind in _SUSPENDED),
    (types.FrameType, _in_frame),
    (types.TracebackType, _in_traceback),
    (BaseException, _in_exception),
    (torch.Tensor, _in_tensor),
]
