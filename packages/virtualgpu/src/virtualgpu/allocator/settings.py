"""What PYTORCH_CUDA_ALLOC_CONF sets, and the sizes that follow from it.

The syntax is PyTorch's: `key:value,key:value`, a list in `[]`, booleans `True` and `False`
(https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

MiB = 1 << 20
MIN_BLOCK = 512  # every block is a multiple of it
SMALL_SIZE = 1 * MiB  # the largest rounded size that the small pool serves
SMALL_SEGMENT = 2 * MiB
LARGE_SEGMENT = 20 * MiB
MIN_LARGE_ALLOC = 10 * MiB  # from here on a request gets a segment of its own size ...
ROUND_LARGE = 2 * MiB  # ... rounded up to a multiple of this
UNLIMITED = 1 << 62
INTERVALS = 16  # of roundup_power2_divisions: from 1 MiB, each up to twice its start

UNCACHED = "PYTORCH_NO_CUDA_MEMORY_CACHING"
_ALWAYS_CACHED = "A virtual GPU always caches memory, so unset the variable."
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # the first one that is set counts

_SERVED = (
    "max_split_size_mb", "roundup_power2_divisions", "expandable_segments", "max_non_split_rounding_mb", "per_process_memory_fraction",
    "large_segment_size_mb", "garbage_collection_threshold", "backend",
)  # fmt: skip
_NOT_SERVED = ("graph_capture_record_stream_reuse", "throw_on_cudamalloc_oom")
# Of the host, its locks and its page-locked memory: heeded without effect, for no GPU's memory depends on them.
_SWITCHES_OF_THE_HOST = (
    "release_lock_on_cudamalloc", "release_lock_on_hipmalloc", "pinned_use_cuda_host_register", "pinned_use_hip_host_register",
    "pinned_use_background_threads", "pinned_free_catch_all",
)  # fmt: skip
_NUMBERS_OF_THE_HOST = (
    "pinned_num_register_threads", "pinned_reserve_segment_size_mb", "pinned_max_round_threshold_mb", "pinned_max_cached_size_mb",
)  # fmt: skip
_MOST_THREADS = 128  # that lock memory


@dataclass(frozen=True, slots=True)
class Settings:
    """The allocator's settings; sizes in bytes. `divisions` holds one number for each interval from 1 MiB up, 0 for off."""

    max_split_size: int = UNLIMITED
    max_non_split_rounding: int = LARGE_SEGMENT
    large_segment_size: int = LARGE_SEGMENT
    divisions: tuple[int, ...] = (0,) * INTERVALS
    expandable_segments: bool = False
    per_process_memory_fraction: float = 1.0
    garbage_collection_threshold: float = 0.0  # of the memory that the process may take

    @classmethod
    def parse(cls, text: str) -> "Settings":
        """Settings from the text of PYTORCH_CUDA_ALLOC_CONF.

        Raises ValueError for an unknown key or a bad value and NotImplementedError for a key of PyTorch's that the virtual GPU
        does not serve.
        """
        values: dict[str, Any] = dict(_read(key, value) for key, value in _pairs(text))
        values = {key: value for key, value in values.items() if key not in ("backend", "host")}
        large = values.get("large_segment_size", LARGE_SEGMENT)
        values.setdefault("max_non_split_rounding", large)
        for name in ("max_split_size", "max_non_split_rounding"):
            if values.get(name, large) < large:
                raise ValueError(f"{name}_mb must be at least {large // MiB}, the size of a large segment; got {values[name] // MiB}")
        return replace(cls(), **values)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> "Settings":
        """Settings from the first of PyTorch's variables that is set; the defaults where none is.

        Raises NotImplementedError if the cache is switched off, which PyTorch does for any value.
        """
        if UNCACHED in environ:
            raise NotImplementedError(f"{UNCACHED} is set. {_ALWAYS_CACHED}")
        return cls.parse(next((environ[name] for name in VARIABLES if name in environ), ""))

    def round_size(self, nbytes: int) -> int:
        """The size of the block that a request is rounded up to."""
        divisions = self.divisions[min(max(nbytes.bit_length() - 21, 0), INTERVALS - 1)]
        if divisions > 1 and nbytes > MIN_BLOCK * divisions:
            step = (1 << nbytes.bit_length() - 1) // divisions
            return -(-nbytes // step) * step
        return max(-(-nbytes // MIN_BLOCK) * MIN_BLOCK, MIN_BLOCK)

    def segment_size(self, rounded: int) -> int:
        """Bytes asked from the driver when no free block serves a request of this rounded size."""
        if rounded <= SMALL_SIZE:
            return SMALL_SEGMENT
        if rounded < MIN_LARGE_ALLOC:
            return self.large_segment_size
        return -(-rounded // ROUND_LARGE) * ROUND_LARGE


def _pairs(text: str) -> list[tuple[str, str]]:
    """Splits at the commas outside brackets, and each part at its first colon."""
    parts = [part for part in re.split(r",(?![^\[]*\])", re.sub(r"\s", "", text)) if part]
    for part in parts:
        if ":" not in part:
            raise ValueError(f"expected key:value in the allocator's settings, got {part!r}")
    return [tuple(part.split(":", 1)) for part in parts]


def _read(key: str, value: str) -> tuple[str, object]:
    """The field of Settings that a key sets, and its value."""
    if key in _SWITCHES_OF_THE_HOST:
        return "host", _switch(key, value)
    if key in _NUMBERS_OF_THE_HOST:
        if _whole(key, value) > _MOST_THREADS and key == "pinned_num_register_threads":
            raise ValueError(f"{key} must be at most {_MOST_THREADS}, got {value}")
        return "host", value
    if key in _NOT_SERVED:
        raise NotImplementedError(f"the setting {key} of PyTorch's allocator is not served by the virtual GPU")
    match key:
        case "max_split_size_mb" | "max_non_split_rounding_mb":
            return key.removesuffix("_mb"), _whole(key, value) * MiB
        case "large_segment_size_mb":
            if _whole(key, value) * MiB <= MIN_LARGE_ALLOC:
                raise ValueError(f"large_segment_size_mb must be more than {MIN_LARGE_ALLOC // MiB}, got {value}")
            return "large_segment_size", _whole(key, value) * MiB
        case "roundup_power2_divisions":
            return "divisions", _divisions(value)
        case "expandable_segments":
            return "expandable_segments", _switch(key, value)
        case "garbage_collection_threshold":
            if not 0 < _fraction(value) < 1:
                raise ValueError(f"garbage_collection_threshold must lie between 0 and 1, got {value}")
            return key, _fraction(value)
        case "per_process_memory_fraction":
            return "per_process_memory_fraction", _fraction(value)
        case "backend":
            if value == "cudaMallocAsync":
                raise NotImplementedError("backend:cudaMallocAsync is not served by the virtual GPU; backend:native is")
            if value != "native":
                raise ValueError(f"backend must be native or cudaMallocAsync, got {value!r}")
            return "backend", value
    raise ValueError(f"Unrecognized key {key!r} in the allocator's settings; the virtual GPU serves {', '.join(_SERVED)}")


def _switch(key: str, value: str) -> bool:
    if value not in ("True", "False"):
        raise ValueError(f"{key} must be True or False, got {value!r}")
    return value == "True"


def _whole(key: str, value: str) -> int:
    if not value.isdecimal():
        raise ValueError(f"{key} must be a whole number, got {value!r}")
    return int(value)


def _fraction(value: str) -> float:
    try:
        fraction = float(value)
    except ValueError:
        fraction = -1.0
    if not 0 <= fraction <= 1:
        raise ValueError(f"per_process_memory_fraction must lie between 0 and 1, got {value!r}")
    return fraction


def _power_of_two(value: str, what: str) -> int:
    number = _whole(what, value)
    if number & (number - 1):
        raise ValueError(f"{what} must be a power of two, got {number}")
    return number


def _divisions(value: str) -> tuple[int, ...]:
    """One number for all intervals (`4`), or a list of `start in MB:number` in which `>` stands for all later intervals.

    The first entry also serves everything below it. An interval that the list leaves out is not rounded.
    """
    what = "roundup_power2_divisions"
    if not value.startswith("["):
        return (_power_of_two(value, what),) * INTERVALS
    if not value.endswith("]"):
        raise ValueError(f"{what} lacks its closing bracket: {value!r}")
    divisions = [0] * INTERVALS
    index = None
    for entry in filter(None, value[1:-1].split(",")):
        start, colon, number = entry.partition(":")
        if not colon:
            raise ValueError(f"{what} expects start:number in its list, got {entry!r}")
        divided = _power_of_two(number, what)
        if start == ">":
            after = 0 if index is None else index + 1
            divisions[after:] = [divided] * (INTERVALS - after)
            continue
        interval = min(max(_power_of_two(start, f"the start of an interval of {what}").bit_length() - 1, 0), INTERVALS - 1)
        if index is None:
            divisions[:interval] = [divided] * interval
        divisions[interval] = divided
        index = interval
    return tuple(divisions)
