"""Keep PyTorch's settings as they are while other code runs, which may change them."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.backends import cudnn, mkldnn
from torch.backends.cuda import matmul

_OPERATIONS = ("all", "matmul", "conv", "rnn")
_PRECISIONS = [
    ("generic", "all"),
    *[("cuda", operation) for operation in _OPERATIONS],
    *[("mkldnn", operation) for operation in _OPERATIONS],
]
_ATTRIBUTES = (
    *[(cudnn, name) for name in ("enabled", "benchmark", "benchmark_limit", "deterministic")],
    (mkldnn, "enabled"),
    (matmul, "allow_fp16_reduced_precision_reduction"),
    (matmul, "allow_bf16_reduced_precision_reduction"),
    (matmul, "allow_fp16_accumulation"),
)


class _Setting(NamedTuple):
    """A setting of PyTorch: how to read it and how to set it."""

    read: Callable[[], Any]
    set: Callable[[Any], Any]

    def value(self) -> Any:
        """Return the value of the setting, or None if PyTorch refuses to report it.

        PyTorch raises RuntimeError if a program has used its old and its new names for TF32.
        """
        with contextlib.suppress(RuntimeError):
            return self.read()
        return None

    def restore(self, value: Any) -> None:
        """Give the setting this value, unless it has it already or the value is None."""
        if value is not None and self.value() != value:
            self.set(value)


@contextlib.contextmanager
def settings_kept() -> Iterator[None]:
    """Restore PyTorch's settings after the block.

    They are the current GPU and streams, the default dtype and device, the gradient mode, TF32 and
    other precisions, the flags of cuDNN, deterministic algorithms, anomaly detection, warnings
    about synchronization, the number of threads, and the share of the memory of each GPU.
    """
    kept = [(setting, setting.value()) for setting in _settings()]
    try:
        with torch.set_grad_enabled(torch.is_grad_enabled()):
            yield
    finally:
        for setting, value in kept:
            setting.restore(value)


def _settings() -> list[_Setting]:
    """Return all settings that are restored, in the order in which to restore them.

    Restoring a setting may change a setting that comes later in the list.
    """
    gpus = range(torch.cuda.device_count())
    return [
        _Setting(torch.get_default_dtype, torch.set_default_dtype),
        _Setting(torch.get_default_device, _set_default_device),
        _Setting(torch.get_num_threads, torch.set_num_threads),
        _Setting(torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
        _Setting(torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
        _Setting(torch.cuda.get_sync_debug_mode, torch.cuda.set_sync_debug_mode),
        *[_memory_share(gpu) for gpu in gpus],
        _Setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        _Setting(torch._C._get_cudnn_allow_tf32, torch._C._set_cudnn_allow_tf32),
        *[_precision(backend, operation) for backend, operation in _PRECISIONS],
        *[_attribute(module, name) for module, name in _ATTRIBUTES],
        *[_current_stream(gpu) for gpu in gpus],
        # After the streams, because `set_stream` also changes the current GPU.
        _Setting(torch.cuda.current_device, torch.cuda.set_device),
    ]


def _current_stream(gpu: int) -> _Setting:
    return _Setting(partial(torch.cuda.current_stream, gpu), torch.cuda.set_stream)


def _memory_share(gpu: int) -> _Setting:
    return _Setting(
        partial(torch.cuda.get_per_process_memory_fraction, gpu),
        partial(torch.cuda.set_per_process_memory_fraction, device=gpu),
    )


def _precision(backend: str, operation: str) -> _Setting:
    return _Setting(
        partial(torch._C._get_fp32_precision_getter, backend, operation),
        partial(torch._C._set_fp32_precision_setter, backend, operation),
    )


def _attribute(module: Any, name: str) -> _Setting:
    return _Setting(partial(getattr, module, name), partial(setattr, module, name))


def _set_default_device(device: torch.device) -> None:
    """Set PyTorch's default device for new tensors."""
    # With the CPU instead of None, each call of PyTorch would be slower.
    torch.set_default_device(None if device.type == "cpu" else device)
