"""Copies and sums over several virtual GPUs, as torch.nn.parallel requests them from C++.

They replace the functions of torch/csrc/cuda/comm.cpp.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.parallel

from virtualgpu import hardware
from virtualgpu.errors import unsupported
from virtualgpu.moves import gpu_of, to_device
from virtualgpu.tensor import VirtualTensor, memory_of

BUFFER_BYTES = 10 << 20  # broadcast_coalesced sends tensors together until they reach this size


def replacements(machine: hardware.Machine) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield (object, new attributes by name) for each object of PyTorch to change.

    These are the changes of this module. They are undone when `machine` is removed.

    The functions that replace C++'s are in `ANSWERS`.
    """
    functions = torch.nn.parallel._functions
    yield functions, {"_streams": None}  # DataParallel keeps streams of an earlier machine here
    for function in (functions.Broadcast, functions.Scatter):
        forward, backward = placed(function.forward, function.backward)
        yield function, {"forward": staticmethod(forward), "backward": staticmethod(backward)}


def placed(
    forward: Callable[..., Any], backward: Callable[..., Any]
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return `forward` and `backward`, the passes of a function over several GPUs, changed.

    Where a gradient is missing, autograd's C++ makes zeros without knowing their GPU. The returned
    passes put these zeros on the right GPU.
    """

    def remember(ctx: Any, target_gpus: Sequence[Any], *args: Any) -> Any:
        outputs = forward(ctx, target_gpus, *args)
        ctx.places = [gpu_of(output) for output in outputs]
        return outputs

    def fill(ctx: Any, *gradients: Any) -> Any:
        return backward(ctx, *map(_at_home, gradients, ctx.places))

    return remember, fill


def _at_home(gradient: torch.Tensor | None, gpu: hardware.Gpu | None) -> torch.Tensor | None:
    """Return the gradient if it is on `gpu`, and zeros of the same shape on `gpu` otherwise."""
    if gradient is None or gpu is None or gpu_of(gradient) is gpu:
        return gradient
    return torch.zeros_like(gradient, device=gpu.device)


def broadcast(tensor: torch.Tensor, devices: Sequence[int]) -> list[torch.Tensor]:
    """Return the tensor on each device. On its own device it is the tensor itself.

    Autograd does not record the copies, because NCCL writes them.
    """
    _take_time(tensors=len(devices))
    source = gpu_of(tensor)
    with torch.no_grad(), nullcontext() if source is None else source.broadcast():
        return [
            to_device(tensor, hardware.machine().gpu(index), non_blocking=True) for index in devices
        ]


def broadcast_out(tensor: torch.Tensor, out: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy `tensor` to each tensor in `out`, and return these.

    Raises RuntimeError for a wrong device or shape.
    """
    for index, target in enumerate(out):
        _require_on_gpu("output", index, target)
        if target.shape != tensor.shape:
            raise RuntimeError(
                "Expected all output tensors to have same shape as the source tensor "
                f"{list(tensor.shape)}, "
                f"but output tensor at index {index} has shape {list(target.shape)}"
            )
    for target in out:
        target.copy_(tensor, non_blocking=True)
    return list(out)


def broadcast_coalesced(
    tensors: Sequence[torch.Tensor], devices: Sequence[int], buffer_size: int = BUFFER_BYTES
) -> list[list[torch.Tensor]]:
    """Return copies of all tensors on every device.

    Small tensors are sent in one flat buffer, and the receivers get views of it. Raises
    RuntimeError unless all tensors are on the first device.
    """
    first_device = hardware.machine().gpus[devices[0]].device
    if any(tensor.device != first_device for tensor in tensors):
        raise RuntimeError("All tensors must be on devices[0]: " + str(devices[0]))
    received: list[dict[int, torch.Tensor]] = [{} for _ in devices]
    _take_time(tensors=len(tensors) * len(devices))
    gpus = hardware.machine().gpus
    with torch.no_grad():
        for group in _groups(tensors, buffer_size):
            members = [tensors[position] for position in group]
            flat = members[0]
            if len(members) > 1:
                flat = torch._utils._flatten_dense_tensors(members)
            with gpus[devices[0]].broadcast():
                for row, index in zip(received, devices, strict=True):
                    if index == devices[0]:
                        row.update(zip(group, members, strict=True))
                        continue
                    there = to_device(flat.detach(), gpus[index], non_blocking=True)
                    parts: Sequence[torch.Tensor] = [there]
                    if len(members) > 1:
                        parts = torch._utils._unflatten_dense_tensors(there, members)
                    # `data` gives each part its own version counter.
                    row.update(zip(group, (part.data for part in parts), strict=True))
            del flat
    return [[row[position] for position in range(len(tensors))] for row in received]


def scatter(
    tensor: torch.Tensor,
    devices: Sequence[int],
    chunk_sizes: Sequence[int] | None = None,
    dim: int = 0,
    streams: Any = None,
) -> tuple[torch.Tensor, ...]:
    """Split the tensor along `dim`, and return one part on each device.

    A part that stays on its device is a view. Raises RuntimeError for wrong `chunk_sizes`.
    """
    if not devices:
        raise RuntimeError("Expected at least one device to scatter to")
    if chunk_sizes and len(chunk_sizes) != len(devices):
        raise RuntimeError(
            "Expected devices and chunk_sizes to be of same length, but got "
            f"len(devices) = {len(devices)} and len(chunk_sizes) = {len(chunk_sizes)}"
        )
    _take_time(tensors=len(devices))
    if chunk_sizes:
        chunks = tensor.split(list(chunk_sizes), dim)
    else:
        chunks = tensor.chunk(len(devices), dim)
    parts = []
    for position, (chunk, index) in enumerate(zip(chunks, devices, strict=False)):
        # A batch from the host is copied on a stream of its own, whose memory it then uses.
        with torch.cuda.stream(streams[position] if streams else None):
            parts.append(to_device(chunk, hardware.machine().gpu(index), non_blocking=True))
    return tuple(parts)


def scatter_out(
    tensor: torch.Tensor, out: Sequence[torch.Tensor], dim: int = 0, streams: Any = None
) -> list[torch.Tensor]:
    """Copy the parts of the tensor along `dim` to the tensors in `out`.

    Raises RuntimeError if their shapes do not fit.
    """
    if not out:
        raise RuntimeError("Expected at least one output tensor to scatter to")
    dim %= tensor.dim()
    for index, target in enumerate(out):
        _require_on_gpu("output", index, target)
        if not _same_but_for(dim, target.shape, tensor.shape):
            raise RuntimeError(
                f"Output tensor at index {index} has incorrect shape: {list(target.shape)}. "
                f"Expected same shape except for scatter dim {dim} as the source tensor: "
                f"{list(tensor.shape)}"
            )
    sizes = [target.shape[dim] for target in out]
    if sum(sizes) != tensor.shape[dim]:
        raise RuntimeError(
            f"Total size for output tensors along scatter dim {dim} does not match the source "
            f"tensor size at dim {dim}. Expected {tensor.shape[dim]}, but got total size "
            f"{sum(sizes)}"
        )
    for position, (chunk, target) in enumerate(zip(tensor.split(sizes, dim), out, strict=True)):
        with torch.cuda.stream(streams[position] if streams else None):
            target.copy_(chunk, non_blocking=True)
    return list(out)


def gather(
    tensors: Sequence[torch.Tensor], dim: int, destination: int | None = None
) -> torch.Tensor:
    """Concatenate the tensors along `dim` on one device.

    `destination` is a GPU's index, None for the current GPU or -1 for the CPU. Raises RuntimeError
    if the shapes do not fit.
    """
    shape = _gathered(tensors, dim)
    _take_time(tensors=len(tensors))
    device = torch.device("cpu")
    if destination != -1:
        gpu = hardware.machine().gpu(destination)
        if gpu is not None:
            device = gpu.device
    form = _format(tensors[0])
    if any(_format(tensor) is not form for tensor in tensors):
        form = torch.contiguous_format
    out = torch.empty(shape, dtype=tensors[0].dtype, device=device, memory_format=form)
    return _gather_into(tensors, out, dim)


def gather_out(tensors: Sequence[torch.Tensor], out: torch.Tensor, dim: int) -> torch.Tensor:
    """Concatenate the tensors along `dim` into `out`, and return it.

    Raises RuntimeError for a wrong shape.
    """
    shape = _gathered(tensors, dim)
    if shape != list(out.shape):
        raise RuntimeError(f"Expected out tensor to have shape {shape}, but got {list(out.shape)}")
    return _gather_into(tensors, out, dim)


def _gather_into(tensors: Sequence[torch.Tensor], out: torch.Tensor, dim: int) -> torch.Tensor:
    """Copy the tensors, one after the other along `dim`, into `out`, and return it."""
    sizes = [tensor.shape[dim] for tensor in tensors]
    for part, tensor in zip(out.split(sizes, dim), tensors, strict=True):
        part.copy_(tensor, non_blocking=out.is_cuda)
    return out


def reduce(
    inputs: Sequence[VirtualTensor], output: VirtualTensor, root: int = 0, op: int = 0, *rest: Any
) -> None:
    """Sum one tensor of each device into `output` on the root's device, as NCCL does.

    Raises NotImplementedError for operations other than the sum.
    """
    if op != 0:
        raise unsupported("a reduction other than the sum, in torch.cuda.nccl.reduce,")
    output.copy_(inputs[root])
    with torch.no_grad():
        for position, tensor in enumerate(inputs):
            if position != root:
                _add_from(output, tensor)


def _take_time(tensors: int) -> None:
    """Advance the clock by the host time of the Python code around a copy over several GPUs.

    The functions of this module call it. `tensors` is the number of their tensors.
    """
    machine = hardware.machine()
    profile = machine.profile
    machine.clock.advance_host(profile.function_seconds + tensors * profile.attribute_seconds)


def _gathered(tensors: Sequence[torch.Tensor], dim: int) -> list[int]:
    """Return the shape of the tensors' concatenation along `dim`.

    Raises RuntimeError if the shapes do not fit.
    """
    if not tensors:
        raise RuntimeError("Expected at least one tensor to gather from")
    first = tensors[0]
    dim %= first.dim()
    for index, tensor in enumerate(tensors):
        _require_on_gpu("input", index, tensor)
        if tensor.dim() != first.dim():
            raise RuntimeError(
                "Expected all input tensors to have the same number of dimensions, but tensor at "
                f"index {index}has {tensor.dim()} dimensions, (expected {first.dim()})"
            )
        expected = [*first.shape[:dim], tensor.shape[dim], *first.shape[dim + 1 :]]
        if expected != list(tensor.shape):
            raise RuntimeError(
                f"Input tensor at index {index} has invalid shape {list(tensor.shape)}, "
                f"but expected {expected}"
            )
    length = sum(tensor.shape[dim] for tensor in tensors)
    return [*first.shape[:dim], length, *first.shape[dim + 1 :]]


def _require_on_gpu(which: str, index: int, tensor: torch.Tensor) -> None:
    """Raise RuntimeError unless the tensor is on a GPU.

    `which` is "input" or "output", and `index` is the tensor's position, for the message.
    """
    if gpu_of(tensor) is None:
        whose = "" if which == "input" else f"{which} "
        raise RuntimeError(
            f"Expected all {which} tensors to be CUDA tensors, "
            f"but {whose}tensor at index {index} has device '{tensor.device}'"
        )


def _same_but_for(dim: int, one: torch.Size, other: torch.Size) -> bool:
    """Return whether two shapes are equal except in dimension `dim`."""
    if len(one) != len(other):
        return False
    return (*one[:dim], *one[dim + 1 :]) == (*other[:dim], *other[dim + 1 :])


def _format(tensor: torch.Tensor) -> torch.memory_format:
    """Return the memory format of a tensor: channels last, or contiguous."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    form = formats.get(tensor.dim(), torch.contiguous_format)
    if not tensor.is_contiguous() and tensor.is_contiguous(memory_format=form):
        return form
    return torch.contiguous_format


def _groups(tensors: Sequence[torch.Tensor], buffer_size: int) -> list[list[int]]:
    """Group the indices of the tensors that are sent in one message.

    A group has one dtype and grows until it reaches `buffer_size` bytes. Sparse tensors are sent
    alone.
    """
    groups: list[list[int]] = []
    open_groups: dict[torch.dtype, tuple[list[int], int]] = {}
    for position, tensor in enumerate(tensors):
        if tensor.layout is not torch.strided:
            groups.append([position])
            continue
        members, size = open_groups.pop(tensor.dtype, ([], 0))
        if not members:
            groups.append(members)
        members.append(position)
        size += tensor.numel() * tensor.itemsize
        if size < buffer_size:
            open_groups[tensor.dtype] = members, size
    return groups


def _add_from(output: VirtualTensor, tensor: VirtualTensor) -> None:
    """Add `tensor`, which is on another GPU, to `output` in place.

    NCCL reads it over the link and uses no memory of PyTorch.
    """
    there, here, clock = tensor._gpu, output._gpu, output._gpu.machine.clock
    clock.wait(there.stream, clock.record(here.stream))
    there.copy("p2p", tensor.numel() * tensor.itemsize, blocking=False)
    clock.wait(here.stream, clock.record(there.stream))
    if memory_of(output).kept is not None and memory_of(tensor).kept is not None:
        with torch._C._DisableTorchDispatch():
            output.add_(tensor)


ANSWERS: dict[str, Any] = {
    "_broadcast": broadcast,
    "_broadcast_out": broadcast_out,
    "_broadcast_coalesced": broadcast_coalesced,
    "_scatter": scatter,
    "_scatter_out": scatter_out,
    "_gather": gather,
    "_gather_out": gather_out,
    "_nccl_reduce": reduce,
    "_nccl_version": lambda: 2 << 32 | 28 << 16 | 9,  # 2.28.9, the version of the recordings
    "_nccl_version_suffix": lambda: b"",
}
