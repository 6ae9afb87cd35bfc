"""Names of objects, from the names of the objects that refer to them.

From `model`, for example, follows `model.fc.weight.grad`. A function `_in_…` names an object that
another object of a certain type holds. Its arguments are the name of the holder, a chain of objects
in which each holds the next one (the holder first), and how the holder refers to the second object
(see `References`). It returns the name of a later object of the chain and the index of that object,
or None if the general rules of `_next` apply.
"""

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
Found = tuple[Name, int] | None  # a name, and the index in the chain of the object that it names

UNNAMED = "a value"  # in an expression that is being evaluated, or in a function of the kit

_VAGUE = 100  # parts that a vague part counts as
_KEY = "a key"

_HOOKS = {
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}
# The tables of a module, whose entries read as its attributes.
_PARTS = {"_parameters": "a parameter", "_buffers": "a buffer", "_modules": ""}
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
    """Name the last object of a path whose first object is called `root`.

    `steps` are the objects of the path, each with how the previous object refers to it. Return the
    name and the number of its parts, in which a vague part counts as many.
    """
    name, at, parts = root, 0, 0
    while at < len(steps) - 1:
        name, taken = _next(name, [thing for thing, _ in steps[at:]], steps[at + 1][1])
        at += taken
        is_vague = name.kind == _KEY or name.expression.endswith(("…]", "…}"))
        parts += _VAGUE if is_vague else 1
    return name, parts


def _next(name: Name, chain: list[Any], how: str) -> tuple[Name, int]:
    """Name the second object of a chain, or a later one, when the first is called `name`.

    Each object of `chain` holds the next one, and `how` says how the first refers to the second.
    Return the name of the object and its index in `chain`.
    """
    thing, held = chain[0], chain[1]
    if is_node(type(thing)):
        return _in_node(name, chain, how)
    for kind, naming in _NAMINGS:
        if isinstance_of(thing, kind):
            found = naming(name, chain, how)
            if found:
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
    for kind, fields in _FIELDS.items():
        if isinstance_of(thing, kind):
            for key in fields:
                if getattr(thing, key, None) is held:
                    return name.then(f".{key}"), 1
            break
    return name.then("[…]"), 1  # in an iterator, for example, whose contents cannot be read


def own_attributes(thing: Any) -> dict:
    """Return the `__dict__` of an object, read without running the object's code."""
    for base in ancestry(type(thing)):
        slot = attributes(base).get("__dict__")
        if isinstance(slot, (types.GetSetDescriptorType, types.MemberDescriptorType)):
            found = slot.__get__(thing)
            if isinstance(found, dict):
                return found
            return {}
    return {}


def slots(thing: Any) -> dict[str, Any]:
    """Return the values in the `__slots__` of an object, by name."""
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
    """Name the attribute of `thing` that is `chain[0]`, or an object that the attribute holds.

    `name` is the name of `thing`, and `own` are its attributes. Return the name of an object of
    `chain`, and how many objects of `chain` the name leads through.
    """
    value, further = chain[0], None
    if len(chain) > 1:
        further = chain[1]
    key = next((key for key, other in list(own.items()) if other is value), "…")
    inner = None  # the key of the third object, if the second one is a dictionary
    if isinstance_of(value, dict):
        inner = next((k for k, other in list(dict.items(value)) if other is further), None)
    if inner is not None and isinstance_of(thing, torch.nn.Module):
        if key in _PARTS:
            suffix = f"[{inner}]" if inner.isdigit() else f".{inner}"
            return name.then(suffix, _PARTS[key]), 2
        if key in _HOOKS:
            return Name(_HOOKS[key], _callable_name(further), name.text), 2
    if inner is not None and isinstance_of(thing, torch.optim.Optimizer) and key == "state":
        # The keys of an optimizer's state are parameters, which have numbers in its `state_dict`.
        parameters = [each for group in thing.param_groups for each in group["params"]]
        numbers = [str(index) for index, each in enumerate(parameters) if each is inner]
        number = numbers[0] if numbers else "…"
        return name.then(f".state[{number}]"), 2
    return name.then(f".{key}"), 1


def _callable_name(thing: Any) -> str:
    """Return the qualified name of a function, or the name of the class of another object."""
    named = getattr(thing, "__qualname__", None)
    if isinstance(named, str):
        return named
    return type(thing).__name__


# Containers


def _in_dict(name: Name, chain: list[Any], how: str) -> Found:
    """Name a value of a dictionary by its key, or a key itself.

    `chain` begins with the dictionary, which is called `name`. See the module for the result.
    """
    for key, value in list(dict.items(chain[0])):  # a copy, because other threads may change it
        if value is chain[1]:
            return name.then(f"[{_key(key)}]"), 1
    if any(key is chain[1] for key in list(dict.keys(chain[0]))):
        return Name(_KEY, "", name.text), 1
    return None


def _key(key: Any) -> str:
    """Return a dictionary's key as source code, if it is the same in every run."""
    if type(key) is tuple:
        return ", ".join(map(_key, key))
    if type(key) in (str, int, float, bool, type(None), bytes):
        return repr(key)
    return "…"


def _in_sequence(name: Name, chain: list[Any], how: str) -> Found:
    """Name an element of a list, a tuple or a deque by its index or field.

    `chain` begins with the sequence, which is called `name`. See the module for the result.
    """
    kind = next(base for base in (list, tuple, collections.deque) if isinstance_of(chain[0], base))
    values = list(kind.__iter__(chain[0]))
    indices = [index for index, value in enumerate(values) if value is chain[1]]
    if not indices:
        return None
    fields = getattr(type(chain[0]), "_fields", None)
    if kind is tuple and fields:  # a named tuple
        return name.then(f".{fields[indices[0]]}"), 1
    return name.then(f"[{indices[0]}]"), 1


def _in_set(name: Name, chain: list[Any], how: str) -> Found:
    """Name an element of a set, or leave an attribute of the set to the general rules.

    `chain` begins with the set, which is called `name`. See the module for the result.
    """
    if own_attributes(chain[0]) is chain[1]:
        return None
    return name.then("{…}"), 1


# Functions and classes


def _in_function(name: Name, chain: list[Any], how: str) -> Found:
    """Name a closure variable, a default argument, or the function that a wrapper wraps.

    `chain` begins with the function, which is called `name`. See the module for the result.
    """
    function, held = chain[0], chain[1]
    if len(chain) < 3:
        return None
    if own_attributes(function) is held:
        if held.get("__wrapped__") is chain[2]:
            return name, 2  # a wrapper has the name of the function that it wraps
        return None
    code, of = function.__code__, name.text
    if not name.expression:
        of = f"`{function.__qualname__}`, {name.text}"
    if held is function.__closure__:
        if len(chain) > 3 and chain[3] is getattr(function, "__wrapped__", None):
            return name, 3
        variable = code.co_freevars[_position(held, chain[2])]
        return Name("closure variable", variable, of), 3
    if held is function.__defaults__:
        # Defaults belong to the last positional arguments.
        first = code.co_argcount - len(held)
        argument = code.co_varnames[first + _position(held, chain[2])]
        return Name("default argument", argument, of), 2
    if held is function.__kwdefaults__:
        argument = next(key for key, value in held.items() if value is chain[2])
        return Name("default argument", argument, of), 2
    return None


def _position(things: tuple, wanted: Any) -> int:
    """Return the index of the object `wanted` in a tuple. Objects are compared by identity."""
    return next(index for index, thing in enumerate(things) if thing is wanted)


def _in_cache(name: Name, chain: list[Any], how: str) -> Found:
    """Name the results that `functools.lru_cache` keeps, and the arguments in its keys.

    `chain` begins with the cached function, called `name`. See the module for the result.
    """
    if own_attributes(chain[0]) is chain[1]:
        return None
    at = 1
    while at < len(chain) - 1 and type(chain[at]) in (dict, tuple):
        at += 1
    return Name("the lru_cache", "", name.text), at


def _in_class(name: Name, chain: list[Any], how: str) -> Found:
    """Name an attribute of a class.

    `chain` begins with the class, which is called `name`. See the module for the result.
    """
    if len(chain) < 3 or type(chain[1]) is not dict:
        return None
    key = next((key for key, value in chain[1].items() if value is chain[2]), "…")
    return Name("class attribute", f"{name.expression}.{key}", name.of), 2


# Frames


def _variable(frame: types.FrameType, chain: list[Any]) -> Found:
    """Return the name of the frame's variable that holds the second object of a chain.

    If the second object is the cell of a closure, name the variable that holds the third object.
    """
    taken = 1
    if type(chain[1]) is types.CellType and len(chain) > 2:
        taken = 2
    for variable, value in variables(frame):
        if value is chain[taken]:
            return Name("local", variable), taken
    return None


def _in_suspended(name: Name, chain: list[Any], how: str) -> Found:
    """Name a variable of a generator or a coroutine that has not ended.

    `chain` begins with the generator, which is called `name`. See the module for the result.
    """
    word, attribute = next(
        naming for kind, naming in _SUSPENDED.items() if isinstance_of(chain[0], kind)
    )
    frame = getattr(chain[0], attribute)
    if frame is None:
        return None
    variable, taken = _variable(frame, chain) or (Name(UNNAMED, ""), 1)
    return replace(
        variable, of=f"the suspended {word} {location(frame)}, held by {name.text}"
    ), taken


_SUSPENDED = {
    types.GeneratorType: ("generator", "gi_frame"),
    types.CoroutineType: ("coroutine", "cr_frame"),
    types.AsyncGeneratorType: ("generator", "ag_frame"),
}


def _in_frame(name: Name, chain: list[Any], how: str) -> tuple[Name, int]:
    """Name a variable of a function that has ended, and whose frame is kept alive.

    `chain` begins with the frame, which is called `name`. See the module for the result.
    """
    frame = chain[0]
    if isinstance_of(chain[1], types.FrameType):
        return name, 1
    is_copy = type(chain[1]) is dict and chain[1] is not frame.f_globals
    if is_copy and len(chain) > 2:  # the copy of the variables that `f_locals` made
        return _in_frame(name, [frame, *chain[2:]], how)[0], 2
    if tool_of(frame):
        return Name(UNNAMED, "", name.text), len(chain) - 1
    variable, taken = _variable(frame, chain) or (Name(UNNAMED, ""), 1)
    return replace(variable, of=f"{location(frame)}, kept by {name.text}"), taken


def _in_traceback(name: Name, chain: list[Any], how: str) -> Found:
    """Name an object that a traceback holds "the traceback" of what the traceback belongs to.

    `chain` begins with the traceback, which is called `name`. See the module for the result.
    """
    if name.kind == "the traceback":
        return name, 1
    return Name("the traceback", "", name.text), 1


def _in_exception(name: Name, chain: list[Any], how: str) -> Found:
    """Name the traceback, the context or the arguments of an exception.

    `chain` begins with the exception, which is called `name`. See the module for the result.
    """
    error, held = chain[0], chain[1]
    if isinstance_of(held, types.TracebackType):
        return Name("the traceback", "", name.text), 1
    if isinstance_of(held, BaseException):  # the exception that was being handled
        return name, 1
    if held is attributes(BaseException)["args"].__get__(error):
        return name.then(".args"), 1
    return None


# Tensors and autograd


def _in_tensor(name: Name, chain: list[Any], how: str) -> Found:
    """Name the gradient, the graph or a hook of a tensor.

    `chain` begins with the tensor, which is called `name`. `how` says how the tensor refers to the
    next object. See the module for the result.
    """
    if how == "grad":
        return name.then(".grad", "a gradient"), 1
    if is_node(type(chain[1])):
        return name, 1
    is_hooks = isinstance_of(chain[1], dict) and own_attributes(chain[0]) is not chain[1]
    if is_hooks and len(chain) > 2:
        return Name("tensor hook", _callable_name(chain[2]), name.text), 2
    return None


def _in_node(name: Name, chain: list[Any], how: str) -> tuple[Name, int]:
    """Name an object that a node of an autograd graph holds.

    `chain` begins with the node, which is called `name`. `how` says how the node refers to the next
    object. See the module for the result.
    """
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
        context = Name("attribute", "ctx", f"{node.name()} in {name.text}")
        named, taken = _attribute(context, node, held, chain[2:])
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
