"""The GPU models that virtual GPUs can have.

Each model has a TOML file with a source for every figure.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

_FILES = {
    "T4": "t4",
    "L4": "l4",
    "A100": "a100",
    "H100": "h100",
    "H200": "h200",
    "RTX 4090": "rtx4090",
    "A100-80": "a100_80",
}
_ALSO = {"A100-40": "A100", "H100-80": "H100"}  # names that cloud providers use
BUSY = 0.9  # the share of a step during which the GPU works, from which on the host matters little
FORMATS = ("float32", "tf32", "float16", "bfloat16", "float64", "int8")


@dataclass(frozen=True, eq=False)
class Profile:
    """One GPU model and the computer around it.

    Sizes are in bytes, times in seconds and rates per second. CUDA and NVML report the fields up to
    `driver_version`. `virtualgpu.clock.costs` computes with the fields after it. The TOML files say
    for every figure whether it was measured, published or assumed.
    """

    name: str  # as torch.cuda.get_device_name returns it
    major: int
    minor: int
    multiprocessors: int
    total_memory: int
    context_bytes: int  # device memory of a new CUDA context
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
    memory_efficiency: float  # reachable share of memory_bytes_per_second
    peak_flops: Mapping[str, float]  # operations per second, by format
    matmul_efficiency: Mapping[str, float]  # share of peak_flops that full waves of tiles reach
    small_tile_efficiency: float  # share of that for small tiles
    fill_terms: float  # terms of a sum that a tile without tensor cores costs in addition
    pinned_h2d_bytes_per_second: float
    pinned_d2h_bytes_per_second: float
    pageable_h2d_bytes_per_second: float
    pageable_d2h_bytes_per_second: float
    peer_access: bool  # whether a GPU can read another's memory (torch.cuda.can_device_access_peer)
    nvlinks: int  # links between two GPUs, or 0 if they are connected through the host
    p2p_bytes_per_second: float
    p2p_latency_seconds: float
    rising_addresses: bool  # whether segments get rising addresses after NCCL has connected GPUs

    # Host seconds:
    launch_seconds: float  # an operator that launches a kernel or a copy
    record_seconds: float  # making a node of autograd in a forward pass
    node_seconds: float  # a node in a backward pass, without the operators that it calls
    leaf_seconds: float  # additional time of a leaf's node, which keeps the gradient
    backward_seconds: float  # a backward pass without its nodes: the call and the engine's thread
    optimizer_seconds: float  # an optimizer's step, without parameters and operators
    parameter_seconds: float  # each parameter with a gradient in a step, without operators
    zero_grad_seconds: float  # zero_grad, without gradients
    gradient_seconds: float  # each gradient that zero_grad frees
    further_launches: Mapping[str, int]  # by operator: additional work of its C++, in launches
    product_seconds: float  # additional time of a matrix product, for which cuBLAS chooses a kernel
    cudnn_seconds: float  # a call of cuDNN with all its launches
    allocate_seconds: float  # new memory for an output, if the block comes from the cache
    view_seconds: float  # an operator that launches nothing
    module_seconds: float  # a module's call, without what it calls
    wrapper_seconds: float  # an operator on tensors of a subclass such as DTensor, by itself
    wrapped_seconds: float  # each such tensor
    fsdp_seconds: float  # FSDP2's hooks around one of its own operators, such as a gather
    fsdp_tensor_seconds: float  # each tensor of such an operator
    replicate_seconds: float  # a module's replica by nn.DataParallel, without its contents
    attribute_seconds: float  # each tensor or child that Python gives to a replica
    function_seconds: float  # Python's part of a scatter, gather or broadcast of nn.parallel
    thread_seconds: float  # starting a thread and waiting for its end
    handoff_seconds: float  # until a thread continues that got the interpreter's lock from another
    event_seconds: float  # recording or querying an event
    synchronize_seconds: float  # from the end of the work until synchronize returns
    kernel_minimum_seconds: float  # device time of a kernel that does almost nothing
    malloc_seconds: float  # a cudaMalloc
    free_seconds: float  # a cudaFree
    empty_cache_seconds: float  # torch.cuda.empty_cache() without free memory
    pin_latency_seconds: float
    pin_bytes_per_second: float
    pinned_latency_seconds: float
    pageable_latency_seconds: float
    staging_bytes_per_second: float
    cpu_launch_seconds: float  # a CPU operator that does almost nothing
    cpu_item_seconds: float  # reading the number of a CPU tensor
    cpu_listed_seconds: float  # each further tensor of a list that a CPU operator changes
    cpu_flops: float
    cpu_bytes_per_second: float

    # The error that nine of ten training steps stay below, compared with a real GPU: of steps that
    # keep the GPU busy, of steps that wait for the host, and of the latter if the host's speed is
    # given. If few or none were compared on this GPU, it is at least the larger error of the H200
    # and the H100. None if no network was compared.
    busy_time_error: float | None = None
    waiting_time_error: float | None = None
    given_host_time_error: float | None = None

    def time_error(self, idle: float, host_is_given: bool) -> float | None:
        """Return the expected relative error of a training step's time, or None if it is unknown.

        `idle` is the share of the step in which the GPU idles. `host_is_given` says whether the
        speed of the host was measured.
        """
        if idle <= 1 - BUSY:
            return self.busy_time_error
        if host_is_given:
            return self.given_host_time_error
        return self.waiting_time_error


def names() -> list[str]:
    """Return the short names of the GPU models."""
    return list(_FILES)


def load(name: str, host: float = 1.0) -> Profile:
    """Return the profile of a GPU model.

    The name is a short one ("T4", "rtx4090") or the one that torch prints ("NVIDIA H200"), in upper
    or lower case. `host` is the time of the host's work relative to the recorded H200s' host.

    Raises ValueError for a model without a profile. The message lists the models.
    """
    for short in (*_FILES, *_ALSO):
        profile = _read(_ALSO.get(short, short), host)
        if isinstance(name, str) and _plain(name) in (_plain(short), _plain(profile.name)):
            return profile
    raise ValueError(f"no profile of a GPU named {name!r}. Choose one of {', '.join(_FILES)}")


def _plain(name: str) -> str:
    """Return the name of a GPU model in a form for comparisons.

    It is equal for "NVIDIA GeForce RTX 4090" and "rtx-4090".
    """
    letters = "".join(c for c in name.lower() if c.isalnum())
    for maker in ("nvidia", "geforce", "tesla"):
        letters = letters.removeprefix(maker)
    return letters


@cache
def _read(short: str, host: float) -> Profile:
    """Read the profile of the GPU model with the short name `short` from its file.

    The work of its host takes `host` times as long as that of the recorded one.
    """
    figures = {name: _slower(name, value, host) for name, value in _figures("host.toml").items()}
    figures |= _figures(f"{_FILES[short]}.toml")
    tables = {
        key: MappingProxyType(value) for key, value in figures.items() if isinstance(value, dict)
    }
    return Profile(**figures | tables)


def _figures(file: str) -> dict[str, Any]:
    """Return the contents of the TOML file `file`, which is in the folder of this module."""
    return tomllib.loads(files(__name__).joinpath(file).read_text(encoding="utf-8"))


def _slower(name: str, value: Any, times: float) -> Any:
    """Return the figure `name` of a host whose work takes `times` times as long.

    `value` is the figure of the recorded host. The time of a GPU's smallest kernel does not depend
    on the host.
    """
    if name.startswith("kernel_"):
        return value
    if name.endswith("_seconds"):
        return value * times
    if name.endswith(("_per_second", "_flops")):
        return value / times
    return value
