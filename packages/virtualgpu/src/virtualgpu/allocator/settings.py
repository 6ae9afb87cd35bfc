"""The settings in PYTORCH_CUDA_ALLOC_CONF, and the sizes that follow from them.

The syntax is PyTorch's: `key:value,key:value`. A list is in `[]`, and booleans are `True` and
`False`. PyTorch documents the keys at https://docs.pytorch.org/docs/stable/notes/cuda.html,
section "Optimizing memory usage with PYTORCH_CUDA_ALLOC_CONF".
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

MiB = 1 << 20
MIN_BLOCK = 512  # every block is a multiple of this size
SMALL_SIZE = 1 * MiB  # the largest rounded size that the small pool serves
SMALL_SEGMENT = 2 * MiB
LARGE_SEGMENT = 20 * MiB
MIN_LARGE_ALLOC = 10 * MiB  # requests from this size on get a segment of their own size ...
ROUND_LARGE = 2 * MiB  # ... rounded up to a multiple of this size
UNLIMITED = 1 << 62
INTERVALS = 16  # of roundup_power2_divisions: from 1 MiB on, each ends at twice its start

UNCACHED = "PYTORCH_NO_CUDA_MEMORY_CACHING"
_ALWAYS_CACHED = "A virtual GPU always caches memory, so unset the variable."
VARIABLES = (  # the first one that is set is used
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
)

_SERVED = (
    "max_split_size_mb",
    "roundup_power2_divisions",
    "expandable_segments",
    "max_non_split_rounding_mb",
    "per_process_memory_fraction",
    "large_segment_size_mb",
    "garbage_collection_threshold",
    "backend",
)
_NOT_SERVED = ("graph_capture_record_stream_reuse", "throw_on_cudamalloc_oom")
# Settings of the host's locks and page-locked memory are checked but have no effect, because the
# memory of a GPU does not depend on them.
_SWITCHES_OF_THE_HOST = (
    "release_lock_on_cudamalloc",
    "release_lock_on_hipmalloc",
    "pinned_use_cuda_host_register",
    "pinned_use_hip_host_register",
    "pinned_use_background_threads",
    "pinned_free_catch_all",
)
_NUMBERS_OF_THE_HOST = (
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_max_round_threshold_mb",
    "pinned_max_cached_size_mb",
)
_MAX_REGISTER_THREADS = 128


@dataclass(frozen=True, slots=True)
class Settings:
    """The allocator's settings, with all sizes in bytes.

    `divisions` holds one number per interval of sizes from 1 MiB on. 0 switches rounding off.
    """

    max_split_size: int = UNLIMITED
    max_non_split_rounding: int = LARGE_SEGMENT
    large_segment_size: int = LARGE_SEGMENT
    divisions: tuple[int, ...] = (0,) * INTERVALS
    expandable_segments: bool = False
    per_process_memory_fraction: float = 1.0
    garbage_collection_threshold: float = 0.0  # share of the memory that the process may reserve

    @classmethod
    def parse(cls, text: str) -> "Settings":
        """Return the settings for the text of PYTORCH_CUDA_ALLOC_CONF.

        Raises:
            ValueError: for an unknown key or an invalid value
            NotImplementedError: for a key of PyTorch that the virtual GPU does not support
        """
        values: dict[str, Any] = dict(_read(key, value) for key, value in _pairs(text))
        values = {key: value for key, value in values.items() if key not in ("backend", "host")}
        large = values.get("large_segment_size", LARGE_SEGMENT)
        values.setdefault("max_non_split_rounding", large)
        for name in ("max_split_size", "max_non_split_rounding"):
            if values.get(name, large) < large:
                raise ValueError(
                    f"{name}_mb must be at least {large // MiB}, the size of a large segment, "
                    f"got {values[name] // MiB}"
                )
        return replace(cls(), **values)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> "Settings":
        """Return the settings in the first of PyTorch's variables that is set, or the defaults.

        Raises NotImplementedError if PYTORCH_NO_CUDA_MEMORY_CACHING is set. PyTorch switches its
        cache off for any value of this variable.
        """
        if UNCACHED in environ:
            raise NotImplementedError(f"{UNCACHED} is set. {_ALWAYS_CACHED}")
        for name in VARIABLES:
            if name in environ:
                return cls.parse(environ[name])
        return cls()

    def round_size(self, nbytes: int) -> int:
        """Return the bytes of the block that a request of `nbytes` bytes is rounded up to."""
        divisions = self.divisions[min(max(nbytes.bit_length() - 21, 0), INTERVALS - 1)]
        if divisions > 1 and nbytes > MIN_BLOCK * divisions:
            step = (1 << nbytes.bit_length() - 1) // divisions
            return -(-nbytes // step) * step
        return max(-(-nbytes // MIN_BLOCK) * MIN_BLOCK, MIN_BLOCK)

    def segment_size(self, rounded: int) -> int:
        """Return the bytes to ask the driver for if no free block fits this rounded size."""
        if rounded <= SMALL_SIZE:
            return SMALL_SEGMENT
        if rounded < MIN_LARGE_ALLOC:
            return self.large_segment_size
        return -(-rounded // ROUND_LARGE) * ROUND_LARGE


def _pairs(text: str) -> list[tuple[str, str]]:
    """Split the settings' text into pairs of key and value.

    The pairs are separated by commas outside brackets, and a pair is split at its first colon.
    Raises ValueError for a pair without a colon.
    """
    parts = [part for part in re.split(r",(?![^\[]*\])", re.sub(r"\s", "", text)) if part]
    for part in parts:
        if ":" not in part:
            raise ValueError(f"expected key:value in the allocator's settings, got {part!r}")
    return [tuple(part.split(":", 1)) for part in parts]


def _read(key: str, value: str) -> tuple[str, object]:
    """Return (name of a field of `Settings`, its value) for a key and its text.

    Keys that have no effect on a virtual GPU return the field "host" or "backend".
    """
    if key in _SWITCHES_OF_THE_HOST:
        return "host", _switch(key, value)
    if key in _NUMBERS_OF_THE_HOST:
        if _whole(key, value) > _MAX_REGISTER_THREADS and key == "pinned_num_register_threads":
            raise ValueError(f"{key} must be at most {_MAX_REGISTER_THREADS}, got {value}")
        return "host", value
    if key in _NOT_SERVED:
        raise NotImplementedError(f"the virtual GPU does not support the allocator setting {key}")
    match key:
        case "max_split_size_mb" | "max_non_split_rounding_mb":
            return key.removesuffix("_mb"), _whole(key, value) * MiB
        case "large_segment_size_mb":
            if _whole(key, value) * MiB <= MIN_LARGE_ALLOC:
                raise ValueError(f"{key} must be more than {MIN_LARGE_ALLOC // MiB}, got {value}")
            return "large_segment_size", _whole(key, value) * MiB
        case "roundup_power2_divisions":
            return "divisions", _divisions(value)
        case "expandable_segments":
            return "expandable_segments", _switch(key, value)
        case "garbage_collection_threshold":
            if not 0 < _fraction(value) < 1:
                raise ValueError(f"{key} must be between 0 and 1, got {value}")
            return key, _fraction(value)
        case "per_process_memory_fraction":
            return "per_process_memory_fraction", _fraction(value)
        case "backend":
            if value == "cudaMallocAsync":
                raise NotImplementedError(
                    f"the virtual GPU does not support backend:{value}. Use backend:native."
                )
            if value != "native":
                raise ValueError(f"backend must be native or cudaMallocAsync, got {value!r}")
            return "backend", value
    served = ", ".join(_SERVED)
    raise ValueError(
        f"Unrecognized key {key!r} in the allocator's settings. The virtual GPU accepts {served}."
    )


def _switch(key: str, value: str) -> bool:
    """Convert "True" or "False", the text of the setting `key`, to a boolean."""
    if value not in ("True", "False"):
        raise ValueError(f"{key} must be True or False, got {value!r}")
    return value == "True"


def _whole(key: str, value: str) -> int:
    """Convert the text of the setting `key` to a non-negative integer."""
    if not value.isdecimal():
        raise ValueError(f"{key} must be a whole number, got {value!r}")
    return int(value)


def _fraction(value: str) -> float:
    """Convert the text of a setting to a number from 0 to 1."""
    try:
        fraction = float(value)
    except ValueError:
        fraction = -1.0
    if not 0 <= fraction <= 1:
        raise ValueError(f"per_process_memory_fraction must be between 0 and 1, got {value!r}")
    return fraction


def _power_of_two(value: str, what: str) -> int:
    """Convert the text of a setting to a power of two. `what` names the setting in the error."""
    number = _whole(what, value)
    if number & (number - 1):
        raise ValueError(f"{what} must be a power of two, got {number}")
    return number


def _divisions(value: str) -> tuple[int, ...]:
    """Return, for each interval of sizes, the number of divisions to which sizes are rounded.

    `value` is the text of `roundup_power2_divisions`. It is one number for all intervals (`4`) or a
    list of `start in MB:number`, in which `>` means all later intervals. The first entry also
    applies to all smaller sizes. An interval that is not in the list is not rounded.
    """
    what = "roundup_power2_divisions"
    if not value.startswith("["):
        return (_power_of_two(value, what),) * INTERVALS
    if not value.endswith("]"):
        raise ValueError(f"{what} lacks its closing bracket: {value!r}")
    divisions = [0] * INTERVALS
    last = -1  # the last interval that an entry has set
    for entry in filter(None, value[1:-1].split(",")):
        start, colon, number = entry.partition(":")
        if not colon:
            raise ValueError(f"{what} expects start:number in its list, got {entry!r}")
        divided = _power_of_two(number, what)
        if start == ">":
            divisions[last + 1 :] = [divided] * (INTERVALS - last - 1)
            continue
        megabytes = _power_of_two(start, f"the start of an interval of {what}")
        interval = min(max(megabytes.bit_length() - 1, 0), INTERVALS - 1)
        if last == -1:
            divisions[:interval] = [divided] * interval
        divisions[interval] = divided
        last = interval
    return tuple(divisions)
