"""What an answer leaves behind, in any exercise: PyTorch's settings, what it was given, and models should be as they were before."""

import copy
import functools
import threading
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Followed:
    """An answer, of which each call is looked at, and those of a function or a module that it returns.

    Attributes:
        left: what was found to be otherwise after a call, in sentences.
    """

    def __init__(self, answer: Any, alters: tuple[str, ...] = ()) -> None:
        functools.update_wrapper(self, answer)
        self._answer, self._alters = answer, alters
        self.left: list[str] = []

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self._called(self._answer, given, named)

    def __reduce__(self) -> Any:  # other processes get the answer itself
        return copy.copy, (self._answer,)

    def _called(self, function: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        settings, look = _settings(), self._look((given, named))
        result = function(*given, **named)
        self._compare(settings, look)
        return self._returned(result)

    def _returned(self, result: Any) -> Any:
        if type(result) is types.FunctionType:

            @functools.wraps(result)
            def followed(*given: Any, **named: Any) -> Any:
                return self._called(result, given, named)

            return followed
        if isinstance(result, nn.Module):
            begun: dict[int, Any] = {}  # by thread: DataParallel has one for each GPU

            def begin(module: nn.Module, given: Any) -> None:
                begun[threading.get_ident()] = _settings(), self._look((module, given))

            result.register_forward_pre_hook(begin)
            result.register_forward_hook(lambda *_: self._compare(*begun.pop(threading.get_ident())))
        return result

    def _look(self, value: Any) -> Callable[[], str]:
        """Look at something that an answer is given. Returns what looks again, and says what is otherwise. Keeps no tensor alive."""
        if isinstance(value, nn.Module):
            return _look_at_module(value, self._alters)
        if isinstance(value, torch.Tensor):
            before, reference = _state(value), weakref.ref(value)
            kept = slice(1, None) if "values" in self._alters else slice(None)
            return lambda: "" if reference() is None or _state(reference())[kept] == before[kept] else _GIVEN.format("a tensor")
        if isinstance(value, list | tuple | dict):
            keys, elements = _parts(value)
            looks, names = [self._look(element) for element in elements], [_name(element) for element in elements]
            del elements

            def again() -> str:
                keys_now, now = _parts(value)
                same = keys_now == keys and len(now) == len(names) and all(name() is x for name, x in zip(names, now, strict=True))
                if "values" not in self._alters and not same:
                    return _GIVEN.format(f"a {type(value).__name__}")
                return next(filter(None, (look() for look in looks)), "")

            return again
        return str

    def _compare(self, settings: dict[str, Any], look: Callable[[], str]) -> None:
        now = _settings()
        changed = next((name for name in settings if settings[name] != now[name]), None)
        if changed:
            self.left.append(f"after your function, {changed} is {now[changed]} for all that follows; it was {settings[changed]}.")
        elif told := look():
            self.left.append(told)


_GIVEN = "your function changed {} that it was given. Leave it as it was."


def _settings() -> dict[str, Any]:
    """Of PyTorch and Python, for all that comes after."""
    devices = range(torch.cuda.device_count())
    # The check undoes the other filters: a function that silences warnings changes no result.
    general = [
        str(action)
        for action, text, category, module, _ in warnings.filters
        if action == "error" and category is Warning and not text and not module
    ]
    return {
        "the current device": f"cuda:{torch.cuda.current_device()}",
        **{f"the current stream of cuda:{index}": torch.cuda.current_stream(index).stream_id for index in devices},
        "the default device": str(torch.get_default_device()),
        "the default dtype": str(torch.get_default_dtype()),
        "torch.is_grad_enabled()": torch.is_grad_enabled(),
        "torch.is_inference_mode_enabled()": torch.is_inference_mode_enabled(),
        "torch.is_autocast_enabled()": [torch.is_autocast_enabled(kind) for kind in ("cuda", "cpu")],
        "what warnings do": general,
        "the number of hooks that PyTorch calls for every module": hooks_of(torch.nn.modules.module),
    }


def hooks_of(holder: Any) -> int:
    """Count the hooks of a module, or those that PyTorch calls for every module."""
    return sum(len(hooks) for name, hooks in vars(holder).items() if name.endswith("_hooks"))


def _state(tensor: Any) -> tuple[Any, ...]:
    """How often it was written to and where on a GPU it lies; then its dtype, its shape, and whether it was made to require gradients."""
    return (_version(tensor), tensor.is_cuda and tensor.data_ptr()), tensor.dtype, tensor.shape, tensor.is_leaf and tensor.requires_grad


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _parts(value: Any) -> tuple[list[Any], list[Any]]:
    """The keys of a dict, and what a list, tuple or dict holds."""
    return (list(value), list(value.values())) if isinstance(value, dict) else ([], list(value))


def _name(value: Any) -> Callable[[], Any]:
    """What gives a value back. Of a tensor only while somebody else keeps it."""
    return weakref.ref(value) if isinstance(value, torch.Tensor) else lambda: value


def _look_at_module(model: nn.Module, alters: tuple[str, ...]) -> Callable[[], str]:
    """Modes, hooks, attributes, and of the parameters which are trained, where they lie and how often they were written to."""

    def state() -> dict[str, Any]:
        modules = dict(model.named_modules())
        parameters = dict(model.named_parameters())
        return {
            "modes": {path: module.training for path, module in modules.items()},
            "hooks": sum(map(hooks_of, modules.values())),
            "names": {f"{path}.{name}".strip(".") for path, module in modules.items() for name in vars(module)},
            "trained": {path: parameter.requires_grad for path, parameter in parameters.items()},
            "on GPUs": {path: parameter.device for path, parameter in parameters.items() if parameter.is_cuda},
            "versions": {path: _version(parameter) for path, parameter in parameters.items()},
            "addresses": {path: parameter.data_ptr() for path, parameter in parameters.items() if parameter.is_cuda},
        }

    before = state()

    def again() -> str:
        now = state()
        if other := [path for path, training in before["modes"].items() if now["modes"].get(path, training) != training]:
            mode = "evaluation" if before["modes"][other[0]] else "training"
            kind = type(model.get_submodule(other[0])).__name__
            return (
                f"your function left the model, or a layer, in another mode: its {kind} is now in {mode} mode. What else did eval() change?"
            )
        if "hooks" not in alters and (left := now["hooks"] - before["hooks"]) > 0:
            return f"your function left {left} hook(s) behind. What does register_forward_hook return?"
        if names := sorted(now["names"] - before["names"]):
            return f"your function left something on the model: {', '.join(names)}. Leave it as it was."
        if now["trained"] != before["trained"]:
            return "your function changed which of the model's parameters require gradients. Leave that as it was."
        if any(now["on GPUs"].get(path) != device for path, device in before["on GPUs"].items()):
            return "your function moved the model's parameters, or some, from their GPU. Leave them where they were."
        replaced = any(now["addresses"].get(path) != address for path, address in before["addresses"].items())
        if "values" not in alters and (replaced or now["versions"] != before["versions"]):
            return "your function changed the model's weights. Leave them as they were."
        return ""

    return again
