"""Copies and sums over several virtual GPUs: what torch.nn.parallel asks of C++ (torch/csrc/cuda/comm.cpp)."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.parallel

from virtualgpu import hardware
from virtualgpu.errors import unsupported
from virtualgpu.moves import gpu_of, to_device
from virtualgpu.tensor import VirtualTensor, memory_of

BUFFER_BYTES = 10 << 20  # broadcast_coalesced: tensors are sent together until a group reaches this


def replacements(machine: hardware.Machine) -> Iterator[tuple[Any, dict[str, Any]]]:
    """By owner, the names that change; the driver's names are in `ANSWERS`."""
    functions = torch.nn.parallel._functions
    yield functions, {"_streams": None}  # DataParallel remembers a stream of each GPU
    for function in (functions.Broadcast, functions.Scatter):
        forward, backward = placed(function.forward, function.backward)
        yield function, {"forward": staticmethod(forward), "backward": staticmethod(backward)}


def placed(forward: Callable[..., Any], backward: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """A function to several GPUs, whose backward gets zeros where no gradient comes back: C++ cannot know on which GPU they belong."""

    def remember(ctx: Any, target_gpus: Sequence[Any], *args: Any) -> Any:
        outputs = forward(ctx, target_gpus, *args)
        ctx.places = [gpu_of(output) for output in outputs]
        return outputs

    def fill(ctx: Any, *gradients: Any) -> Any:
        return backward(ctx, *map(_at_home, gradients, ctx.places))

    return remember, fill


def _at_home(gradient: torch.Tensor | None, gpu: hardware.Gpu | None) -> torch.Tensor | None:
    if gradient is None or gpu is None or gpu_of(gradient) is gpu:
        return gradient
    return torch.zeros_like(gradient, device=gpu.device)


def broadcast(tensor: torch.Tensor, devices: Sequence[int]) -> list[torch.Tensor]:
    """The tensor on each device; on its own device the tensor itself. Autograd does not follow: NCCL writes the copies."""
    _take_time(tensors=len(devices))
    source = gpu_of(tensor)
    with torch.no_grad(), nullcontext() if source is None else source.broadcast():
        return [to_device(tensor, hardware.machine().gpu(index), non_blocking=True) for index in devices]


def broadcast_out(tensor: torch.Tensor, out: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    for index, target in enumerate(out):
        _require_on_gpu("output", index, target)
        if target.shape != tensor.shape:
            raise RuntimeError(
                f"Expected all output tensors to have same shape as the source tensor {list(tensor.shape)}, "
                f"but output tensor at index {index} has shape {list(target.shape)}"
            )
    for target in out:
        target.copy_(tensor, non_blocking=True)
    return list(out)


def broadcast_coalesced(
    tensors: Sequence[torch.Tensor], devices: Sequence[int], buffer_size: int = BUFFER_BYTES
) -> list[list[torch.Tensor]]:
    """Every tensor on every device. Small ones are sent in one flat buffer, of which the receivers keep views."""
    if any(tensor.device != hardware.machine().gpus[devices[0]].device for tensor in tensors):
        raise RuntimeError("All tensors must be on devices[0]: " + str(devices[0]))
    received: list[dict[int, torch.Tensor]] = [{} for _ in devices]
    _take_time(tensors=len(tensors) * len(devices))
    gpus = hardware.machine().gpus
    with torch.no_grad():
        for group in _groups(tensors, buffer_size):
            members = [tensors[position] for position in group]
            flat = torch._utils._flatten_dense_tensors(members) if len(members) > 1 else members[0]
            with gpus[devices[0]].broadcast():
                for row, index in zip(received, devices, strict=True):
                    if index == devices[0]:
                        row.update(zip(group, members, strict=True))
                        continue
                    there = to_device(flat.detach(), gpus[index], non_blocking=True)
                    parts = torch._utils._unflatten_dense_tensors(there, members) if len(members) > 1 else [there]
                    row.update(zip(group, (part.data for part in parts), strict=True))  # each with a version of its own
            del flat
    return [[row[position] for position in range(len(tensors))] for row in received]


def scatter(
    tensor: torch.Tensor, devices: Sequence[int], chunk_sizes: Sequence[int] | None = None, dim: int = 0, streams: Any = None
) -> tuple[torch.Tensor, ...]:
    """Parts of the tensor along `dim`, one a device; a part that stays on its device is a view."""
    if not devices:
        raise RuntimeError("Expected at least one device to scatter to")
    if chunk_sizes and len(chunk_sizes) != len(devices):
        raise RuntimeError(
            "Expected devices and chunk_sizes to be of same length, but got "
            f"len(devices) = {len(devices)} and len(chunk_sizes) = {len(chunk_sizes)}"
        )
    _take_time(tensors=len(devices))
    chunks = tensor.split(list(chunk_sizes), dim) if chunk_sizes else tensor.chunk(len(devices), dim)
    parts = []
    for position, (chunk, index) in enumerate(zip(chunks, devices, strict=False)):
        # A batch from the host is copied on a stream of its own, and so lies in that stream's memory.
        with torch.cuda.stream(streams[position] if streams else None):
            parts.append(to_device(chunk, hardware.machine().gpu(index), non_blocking=True))
    return tuple(parts)


def scatter_out(tensor: torch.Tensor, out: Sequence[torch.Tensor], dim: int = 0, streams: Any = None) -> list[torch.Tensor]:
    """Parts of the tensor along `dim`, in tensors that are given."""
    if not out:
        raise RuntimeError("Expected at least one output tensor to scatter to")
    dim %= tensor.dim()
    for index, target in enumerate(out):
        _require_on_gpu("output", index, target)
        if not _same_but_for(dim, target.shape, tensor.shape):
            raise RuntimeError(
                f"Output tensor at index {index} has incorrect shape: {list(target.shape)}. Expected same shape except for scatter dim "
                f"{dim} as the source tensor: {list(tensor.shape)}"
            )
    sizes = [target.shape[dim] for target in out]
    if sum(sizes) != tensor.shape[dim]:
        raise RuntimeError(
            f"Total size for output tensors along scatter dim {dim} does not match the source tensor size at dim {dim}. "
            f"Expected {tensor.shape[dim]}, but got total size {sum(sizes)}"
        )
    for position, (chunk, target) in enumerate(zip(tensor.split(sizes, dim), out, strict=True)):
        with torch.cuda.stream(streams[position] if streams else None):
            target.copy_(chunk, non_blocking=True)
    return list(out)


def gather(tensors: Sequence[torch.Tensor], dim: int, destination: int | None = None) -> torch.Tensor:
    """All tensors, one after the other along `dim`, on one device (None: the current one, -1: the CPU)."""
    shape = _gathered(tensors, dim)
    _take_time(tensors=len(tensors))
    gpu = None if destination == -1 else hardware.machine().gpu(destination)
    device = torch.device("cpu") if gpu is None else gpu.device
    form = _format(tensors[0])
    form = form if all(_format(tensor) is form for tensor in tensors) else torch.contiguous_format
    return _gather_into(tensors, torch.empty(shape, dtype=tensors[0].dtype, device=device, memory_format=form), dim)


def gather_out(tensors: Sequence[torch.Tensor], out: torch.Tensor, dim: int) -> torch.Tensor:
    if (shape := _gathered(tensors, dim)) != list(out.shape):
        raise RuntimeError(f"Expected out tensor to have shape {shape}, but got {list(out.shape)}")
    return _gather_into(tensors, out, dim)


def _gather_into(tensors: Sequence[torch.Tensor], out: torch.Tensor, dim: int) -> torch.Tensor:
    for part, tensor in zip(out.split([tensor.shape[dim] for tensor in tensors], dim), tensors, strict=True):
        part.copy_(tensor, non_blocking=out.is_cuda)
    return out


def reduce(inputs: Sequence[VirtualTensor], output: VirtualTensor, root: int = 0, op: int = 0, *rest: Any) -> None:
    """NCCL's sum of one tensor a device into `output`, which lies on the root's device."""
    if op != 0:
        raise unsupported("a reduction other than the sum, in torch.cuda.nccl.reduce,")
    output.copy_(inputs[root])
    with torch.no_grad():
        for position, tensor in enumerate(inputs):
            if position != root:
                _add_from(output, tensor)


def _take_time(tensors: int) -> None:
    """The host time of Python's own work around one of these calls."""
    machine = hardware.machine()
    machine.clock.advance_host(machine.profile.function_seconds + tensors * machine.profile.attribute_seconds)


def _gathered(tensors: Sequence[torch.Tensor], dim: int) -> list[int]:
    """The shape of all together. Raises RuntimeError for tensors that do not fit together."""
    if not tensors:
        raise RuntimeError("Expected at least one tensor to gather from")
    first = tensors[0]
    dim %= first.dim()
    for index, tensor in enumerate(tensors):
        _require_on_gpu("input", index, tensor)
        if tensor.dim() != first.dim():
            raise RuntimeError(
                f"Expected all input tensors to have the same number of dimensions, but tensor at index {index}has {tensor.dim()} "
                f"dimensions, (expected {first.dim()})"
            )
        expected = [*first.shape[:dim], tensor.shape[dim], *first.shape[dim + 1 :]]
        if expected != list(tensor.shape):
            raise RuntimeError(f"Input tensor at index {index} has invalid shape {list(tensor.shape)}, but expected {expected}")
    return [*first.shape[:dim], sum(tensor.shape[dim] for tensor in tensors), *first.shape[dim + 1 :]]


def _require_on_gpu(which: str, index: int, tensor: torch.Tensor) -> None:
    if gpu_of(tensor) is None:
        whose = "" if which == "input" else f"{which} "
        raise RuntimeError(
            f"Expected all {which} tensors to be CUDA tensors, but {whose}tensor at index {index} has device '{tensor.device}'"
        )


def _same_but_for(dim: int, one: torch.Size, other: torch.Size) -> bool:
    return len(one) == len(other) and all(a == b for at, (a, b) in enumerate(zip(one, other, strict=True)) if at != dim)


def _format(tensor: torch.Tensor) -> torch.memory_format:
    """The order of a tensor's channels in memory."""
    form = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim(), torch.contiguous_format)
    return form if not tensor.is_contiguous() and tensor.is_contiguous(memory_format=form) else torch.contiguous_format


def _groups(tensors: Sequence[torch.Tensor], buffer_size: int) -> list[list[int]]:
    """Positions of the tensors that are sent together: of one dtype, until a group reaches `buffer_size` bytes. Sparse ones go alone."""
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
    """Add a tensor of another device in place: NCCL reads it over the link, into no memory of PyTorch's."""
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
    "_nccl_version": lambda: 2 << 32 | 28 << 16 | 9,  # of the recordings: 2.28.9
    "_nccl_version_suffix": lambda: b"",
}
