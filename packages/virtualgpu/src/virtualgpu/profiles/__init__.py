"""What is known about each GPU model that a virtual GPU can be modelled on: one TOML file a model, a source for every figure."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

_FILES = {
    "T4": "t4", "L4": "l4", "A100": "a100", "H100": "h100", "H200": "h200", "RTX 4090": "rtx4090", "A100-80": "a100_80",
}  # fmt: skip
_ALSO = {"A100-40": "A100", "H100-80": "H100"}  # as cloud providers name them
FORMATS = ("float32", "tf32", "float16", "bfloat16", "float64", "int8")


@dataclass(frozen=True, eq=False)
class Profile:
    """One GPU model and the computer around it. Sizes in bytes, times in seconds, rates per second.

    The fields up to `driver_version` are what CUDA and NVML report; those after it are what `costs` computes with. The files beside
    this one say for every figure whether it was measured, published or assumed.
    """

    name: str  # as torch.cuda.get_device_name prints it
    major: int
    minor: int
    multiprocessors: int
    total_memory: int
    context_bytes: int  # device memory that a fresh CUDA context holds
    l2_bytes: int
    max_threads_per_multiprocessor: int
    registers_per_multiprocessor: int
    shared_memory_per_block_bytes: int
    shared_memory_per_block_optin_bytes: int
    shared_memory_per_multiprocessor_bytes: int
    warp_size: int
    sm_clock_khz: int
    memory_clock_khz: int
    memory_bus_bits: int
    power_limit_watts: int
    driver_version: str

    memory_bytes_per_second: float
    memory_efficiency: float  # reachable fraction of memory_bytes_per_second
    peak_flops: Mapping[str, float]  # FLOP/s by FORMATS
    matmul_efficiency: Mapping[str, float]  # fraction of peak_flops that full waves of large tiles reach
    small_tile_efficiency: float  # fraction of that which small tiles reach
    fill_terms: float  # of a sum: a tile without tensor cores takes time for so many more, to begin and to write its results
    pinned_h2d_bytes_per_second: float
    pinned_d2h_bytes_per_second: float
    pageable_h2d_bytes_per_second: float
    pageable_d2h_bytes_per_second: float
    peer_access: bool  # may one GPU read another's memory, as torch.cuda.can_device_access_peer answers
    nvlinks: int  # links between two GPUs; 0: through the host
    p2p_bytes_per_second: float
    p2p_latency_seconds: float
    rising_addresses: bool  # once NCCL has connected GPUs, does the driver give segments rising addresses?

    launch_seconds: float  # host time of one operator call that launches a kernel or a copy
    record_seconds: float  # host time of making a node of autograd in a forward pass
    node_seconds: float  # host time of a node in a backward pass, without the operators that it calls
    leaf_seconds: float  # host time that the node of a leaf costs more: it keeps the gradient
    backward_seconds: float  # host time of a backward pass, whatever its nodes: the call, the engine's own thread
    optimizer_seconds: float  # host time of an optimizer's step, without its parameters and the operators that it calls
    parameter_seconds: float  # host time of a parameter with a gradient in an optimizer's step, without operators
    zero_grad_seconds: float  # host time of zero_grad, whatever it clears
    gradient_seconds: float  # host time of a gradient that zero_grad clears: its memory goes back to the cache
    further_launches: Mapping[str, int]  # by operator: host time, in launches, of what its C++ does beside one
    product_seconds: float  # host time that a matrix product costs more: cuBLAS chooses a kernel
    cudnn_seconds: float  # host time of a call of cuDNN, with all that it launches
    allocate_seconds: float  # host time of new memory for an output whose block comes from the cache
    view_seconds: float  # host time of an operator that launches nothing
    module_seconds: float  # host time of a module's call, without what it calls
    wrapper_seconds: float  # host time of an operator on tensors of a subclass, such as DTensors, without what it calls
    wrapped_seconds: float  # host time of each such tensor
    fsdp_seconds: float  # host time of FSDP2's hooks around one of its own operators: a gather, what was gathered set out, a reduce-scatter
    fsdp_tensor_seconds: float  # host time of each tensor there
    replicate_seconds: float  # host time of one module of one replica that nn.DataParallel makes, without what it holds
    attribute_seconds: float  # host time of each tensor or child that Python hands to a replica
    function_seconds: float  # host time of Python's part of a scatter, gather or broadcast of nn.parallel
    thread_seconds: float  # host time of starting a thread and waiting for its end
    handoff_seconds: float  # host time until a thread goes on that another one has handed the interpreter's lock to
    event_seconds: float  # host time of recording or asking an event
    synchronize_seconds: float  # host time from the end of the work until synchronize returns
    kernel_minimum_seconds: float  # device time of a kernel that does next to nothing
    malloc_seconds: float  # host time of one cudaMalloc
    free_seconds: float  # host time of one cudaFree
    empty_cache_seconds: float  # host time of torch.cuda.empty_cache() that finds nothing to free
    pin_latency_seconds: float
    pin_bytes_per_second: float
    pinned_latency_seconds: float
    pageable_latency_seconds: float
    staging_bytes_per_second: float
    cpu_launch_seconds: float  # host time of a CPU operator that does next to nothing
    cpu_item_seconds: float  # host time of reading the number of a CPU tensor
    cpu_listed_seconds: float  # host time of each further tensor of a list that a CPU operator changes
    cpu_flops: float
    cpu_bytes_per_second: float

    # Nine of ten training steps of networks were off by less beside such a GPU's. Where few were compared, the H100's; None: none was.
    time_error: float | None = None


def names() -> list[str]:
    """The GPU models there are, by their short names."""
    return list(_FILES)


def load(name: str, host: float = 1.0) -> Profile:
    """The profile of a GPU model, named in short ("T4", "rtx4090") or as torch prints it ("NVIDIA H200"), in any case.

    The computer around it takes `host` times as long for all that it does itself as that of the recorded H200s.
    Raises ValueError, naming the choices, for a model that has no profile.
    """
    for short in (*_FILES, *_ALSO):
        profile = _read(_ALSO.get(short, short), host)
        if isinstance(name, str) and _plain(name) in (_plain(short), _plain(profile.name)):
            return profile
    raise ValueError(f"no profile of a GPU named {name!r}; choose one of {', '.join(_FILES)}")


def _plain(name: str) -> str:
    """ "NVIDIA GeForce RTX 4090", "rtx-4090" and "RTX4090" are one name."""
    letters = "".join(c for c in name.lower() if c.isalnum())
    for maker in ("nvidia", "geforce", "tesla"):
        letters = letters.removeprefix(maker)
    return letters


@cache
def _read(short: str, host: float) -> Profile:
    figures = {name: _slower(name, value, host) for name, value in _figures("host.toml").items()} | _figures(f"{_FILES[short]}.toml")
    tables = {key: MappingProxyType(value) for key, value in figures.items() if isinstance(value, dict)}
    return Profile(**figures | tables)


def _figures(file: str) -> dict[str, Any]:
    return tomllib.loads(files(__name__).joinpath(file).read_text(encoding="utf-8"))


def _slower(name: str, value: Any, times: float) -> Any:
    """A figure of the host, where all takes so many times as long; how long a GPU's smallest kernel takes is not the host's affair."""
    if name.startswith("kernel_"):
        return value
    return value * times if name.endswith("_seconds") else value / times if name.endswith(("_per_second", "_flops")) else value
