"""Find what an answer changed and should have left unchanged.

In every exercise, an answer should leave PyTorch's settings, its arguments and models unchanged.
"""

import copy
import functools
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten


class Followed:
    """An answer whose calls are compared with the state before them.

    If the answer returns a function or a module, the calls of that are compared, too.

    Attributes:
        left: sentences about what a call changed and should have left unchanged.
    """

    def __init__(self, answer: Any, alters: tuple[str, ...] = ()) -> None:
        """Follow an answer. `alters` names what it may change, as in `Check.alters`."""
        functools.update_wrapper(self, answer)
        self._answer = answer
        self._alters = alters
        self.left: list[str] = []

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self._called(self._answer, given, named)

    def __reduce__(self) -> Any:  # other processes get the answer itself
        return copy.copy, (self._answer,)

    def _called(self, function: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Call the function, note what the call changed, and return the result.

        `given` and `named` are the arguments. Calls of a returned function are followed, too.
        """
        before = _Before((given, named))
        result = function(*given, **named)
        self._compare(before)
        return self._returned(result)

    def _returned(self, result: Any) -> Any:
        """Return the result of an answer.

        Wrap a function or module, so that its calls are compared.
        """
        if type(result) is types.FunctionType:

            @functools.wraps(result)
            def followed(*given: Any, **named: Any) -> Any:
                return self._called(result, given, named)

            return followed
        if isinstance(result, nn.Module):
            begun: dict[int, _Before] = {}  # by thread: DataParallel has one for each GPU

            def begin(module: nn.Module, given: Any) -> None:
                begun[threading.get_ident()] = _Before((module, given))

            result.register_forward_pre_hook(begin)
            result.register_forward_hook(lambda *_: self._compare(begun.pop(threading.get_ident())))
        return result

    def _compare(self, before: "_Before") -> None:
        """Note a sentence about the first setting or argument that has changed since `before`."""
        sentence = before.change(self._alters)
        if sentence:
            self.left.append(sentence)


_GIVEN = "your function changed {} that it was given. Leave it as it was."


class _Before:
    """PyTorch's settings and the arguments of a call, as they were before the call.

    It keeps no tensor of a list or dict alive.
    """

    def __init__(self, given: Any) -> None:
        self._given = given
        self._settings = _settings()
        leaves, self._structure = tree_flatten(given)
        self._leaves = [_reference(leaf) for leaf in leaves]
        self._tensors = [
            (weakref.ref(leaf), _state(leaf)) for leaf in leaves if isinstance(leaf, torch.Tensor)
        ]
        self._models = [(leaf, _ModelState(leaf)) for leaf in leaves if isinstance(leaf, nn.Module)]

    def change(self, alters: tuple[str, ...]) -> str:
        """Return a sentence about the first change, or "" if nothing has changed.

        `alters` names what the answer may change.
        """
        now = _settings()
        for name, before in self._settings.items():
            if now[name] != before:
                return (
                    f"after your function, {name} is {now[name]} for all that follows; "
                    f"it was {before}."
                )
        if "values" not in alters and not self._has_same_elements():
            return _GIVEN.format("a list or dict")
        first = 1 if "values" in alters else 0  # the first part changes with the values
        for reference, state in self._tensors:
            tensor = reference()
            if tensor is not None and _state(tensor)[first:] != state[first:]:
                return _GIVEN.format("a tensor")
        for model, state_of_model in self._models:
            sentence = _change_of_model(model, state_of_model, _ModelState(model), alters)
            if sentence:
                return sentence
        return ""

    def _has_same_elements(self) -> bool:
        """Return whether the lists, tuples and dicts of the arguments have the same elements."""
        leaves, structure = tree_flatten(self._given)
        if structure != self._structure:
            return False
        pairs = zip(self._leaves, leaves, strict=True)
        return all(reference() is leaf for reference, leaf in pairs)


def _settings() -> dict[str, Any]:
    """Return the settings of PyTorch and Python that affect later code, by description."""
    devices = range(torch.cuda.device_count())
    streams = {
        f"the current stream of cuda:{index}": torch.cuda.current_stream(index).stream_id
        for index in devices
    }
    # Only filters that turn all warnings into errors count. A function may silence warnings,
    # because that changes no result, and the check restores the filters.
    general = [
        str(action)
        for action, text, category, module, _ in warnings.filters
        if action == "error" and category is Warning and not text and not module
    ]
    return {
        "the current device": f"cuda:{torch.cuda.current_device()}",
        **streams,
        "the default device": str(torch.get_default_device()),
        "the default dtype": str(torch.get_default_dtype()),
        "torch.is_grad_enabled()": torch.is_grad_enabled(),
        "torch.is_inference_mode_enabled()": torch.is_inference_mode_enabled(),
        "torch.is_autocast_enabled()": [
            torch.is_autocast_enabled("cuda"),
            torch.is_autocast_enabled("cpu"),
        ],
        "what warnings do": general,
        "sys.getprofile()": sys.getprofile(),
        "sys.gettrace()": sys.gettrace(),
        "the number of active modes of PyTorch": (
            torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack()
        ),
        "the number of hooks that PyTorch calls for every module": hooks_of(
            torch.nn.modules.module
        ),
    }


def hooks_of(holder: Any) -> int:
    """Return the number of hooks of a module, or of the global hooks for all modules."""
    return sum(len(hooks) for name, hooks in vars(holder).items() if name.endswith("_hooks"))


def _state(tensor: Any) -> tuple[Any, ...]:
    """Return the state of a tensor that an answer should not change.

    The first part changes when the values do: it has the number of in-place changes and the address
    on a GPU. The other parts are the dtype, the shape, and whether a leaf requires gradients.
    """
    address = tensor.data_ptr() if tensor.is_cuda else None
    requires_gradients = tensor.is_leaf and tensor.requires_grad
    return (_version(tensor), address), tensor.dtype, tensor.shape, requires_gradients


def _version(tensor: torch.Tensor) -> int | None:
    """Return the number of in-place changes of a tensor. Inference tensors do not count them."""
    if tensor.is_inference():
        return None
    return tensor._version


def _reference(value: Any) -> Callable[[], Any]:
    """Return a function that returns the value. It has only a weak reference to a tensor."""
    if isinstance(value, torch.Tensor):
        return weakref.ref(value)
    return lambda: value


class _ModelState:
    """The state of a model that an answer should not change."""

    def __init__(self, model: nn.Module) -> None:
        self.modes: dict[str, bool] = {}
        self.hooks = 0
        self.names: set[str] = set()
        self.trained: dict[str, bool] = {}
        self.versions: dict[str, int | None] = {}
        self.devices: dict[str, torch.device] = {}
        self.addresses: dict[str, int] = {}
        for path, module in model.named_modules():
            self.modes[path] = module.training
            self.hooks += hooks_of(module)
            self.names.update(f"{path}.{name}".strip(".") for name in vars(module))
        for path, parameter in model.named_parameters():
            self.trained[path] = parameter.requires_grad
            self.versions[path] = _version(parameter)
            if parameter.is_cuda:
                self.devices[path] = parameter.device
                self.addresses[path] = parameter.data_ptr()


def _change_of_model(
    model: nn.Module, before: _ModelState, now: _ModelState, alters: tuple[str, ...]
) -> str:
    """Return a sentence about the first difference between two states of a model, or "".

    `alters` names what the answer may change.
    """
    for path, training in before.modes.items():
        if now.modes.get(path, training) != training:
            mode = "evaluation" if training else "training"
            kind = type(model.get_submodule(path)).__name__
            return (
                "your function left the model, or a layer, in another mode: "
                f"its {kind} is now in {mode} mode. What else did eval() change?"
            )
    left = now.hooks - before.hooks
    if "hooks" not in alters and left > 0:
        return f"your function left {left} hook(s) behind. What does register_forward_hook return?"
    names = ", ".join(sorted(now.names - before.names))
    if names:
        return f"your function left something on the model: {names}. Leave it as it was."
    if now.trained != before.trained:
        return (
            "your function changed which of the model's parameters require gradients. "
            "Leave that as it was."
        )
    if any(now.devices.get(path) != device for path, device in before.devices.items()):
        return (
            "your function moved the model's parameters, or some, from their GPU. "
            "Leave them where they were."
        )
    if "values" in alters:
        return ""
    replaced = any(now.addresses.get(path) != each for path, each in before.addresses.items())
    if replaced or now.versions != before.versions:
        return "your function changed the model's weights. Leave them as they were."
    return ""
