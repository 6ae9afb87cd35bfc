"""Temporary storage of CUB's device-wide algorithms, as PyTorch 2.11 for CUDA 13 calls them.

CUB rounds each part up to 256 bytes and adds 255 bytes to align the first one
(`cub/util_allocator`, `alias_temporaries`). The tile sizes are those of CUB's tuning for sm_90. If
the headers leave a choice to the compiler, the sizes were derived from an H200's requests for 1 to
10,000,000 elements. For other GPUs they are estimates. All functions return bytes.
"""

from functools import lru_cache
from math import ceil

# Elements per tile of a one-sweep radix sort, by bytes of a key and of a value. A value of 0 bytes
# means that only keys are sorted.
SORT_TILES = {
    (1, 8): 3456, (2, 8): 5632, (4, 8): 5376, (8, 8): 4608, (8, 4): 5760, (4, 4): 6528,
    (1, 0): 9728, (2, 0): 9728, (4, 0): 7296, (8, 0): 5760,
}  # fmt: skip
FLOAT_KEYS_TILE = 6912  # for float32 keys without values
SELECT_TILES = {1: 5632, 2: 5632, 4: 6528, 8: 4224}  # by bytes of an element


def parts(*sizes: int) -> int:
    """Return the bytes of a temporary storage that consists of parts of these sizes in bytes."""
    return sum(-(-size // 256) * 256 for size in sizes) + 255


@lru_cache(maxsize=4096)
def radix_sort(
    n: int, key: int, value: int = 8, bits: int | None = None, floating: bool = False
) -> int:
    """Return the storage for sorting n pairs of a key and a value.

    `key` and `value` are their bytes, and `bits` is the number of bits by which the keys are
    sorted. Without values (0 bytes) only keys are sorted. One block sorts a few elements and needs
    no storage, which CUB reports as 1 byte. `floating` says whether the keys are floating-point
    numbers.
    """
    if n <= 256 * (19 * 4 // max(4, key, value)):
        return 1
    if bits is None:
        bits = 8 * key
    passes = ceil(max(bits, 1) / 8)
    tile = SORT_TILES[key, value]
    if floating and (key, value) == (4, 0):
        tile = FLOAT_KEYS_TILE
    copies = (n * key, n * value) if passes > 1 else ()
    return parts(passes * 256 * 8, passes * 8, ceil(n / tile) * 1024, *copies)


@lru_cache(maxsize=4096)
def segmented_sort(n: int, key: int, value: int = 8) -> int:
    """Return the storage for sorting n pairs in segments. `key` and `value` are their bytes."""
    return parts(n * key, n * value)


@lru_cache(maxsize=4096)
def scan(n: int, itemsize: int) -> int:
    """Return the storage for a scan of n elements of `itemsize` bytes in a cumulative function.

    PyTorch's cumulative functions use CUB's untuned policy of 128 threads with 15 items of 4 bytes
    each.
    """
    items = max(1, min(15 * 4 // itemsize, 30))
    words = ceil(n / (128 * items)) + 32  # what each tile passes to the next: a state and two sums
    if itemsize == 2:  # these are not packed into one word
        return parts(4 * words, 2 * words, 2 * words, 1)
    word_bytes = 16 if itemsize == 8 else 8
    return parts(words * word_bytes, 1)


@lru_cache(maxsize=4096)
def int_scan(n: int) -> int:
    """Return the storage for sums of the first 1, 2, …, n of n 32-bit integers.

    CUB's tuned policy for this scan has 128 threads with 24 items each.
    """
    return parts((ceil(n / 3072) + 32) * 8, 1)


@lru_cache(maxsize=4096)
def select(n: int, itemsize: int) -> int:
    """Return the storage for `DeviceSelect::Flagged` or `Unique` of n elements.

    Each element has `itemsize` bytes.
    """
    return parts((ceil(n / SELECT_TILES[itemsize]) + 32) * 8, 1)


@lru_cache(maxsize=4096)
def unique_by_key(n: int, itemsize: int) -> int:
    """Return the storage for `DeviceSelect::UniqueByKey` of n keys of `itemsize` bytes."""
    tile = 2304 if itemsize == 8 else 3584
    return parts((ceil(n / tile) + 32) * 8, 1, 1)


@lru_cache(maxsize=4096)
def run_lengths(n: int) -> int:
    """Return the storage for finding the runs of equal elements in n elements.

    The lengths of the runs are found, too.
    """
    return parts(16 * ceil(n / 768), 1, 1)


def count(n: int, multiprocessors: int = 132) -> int:
    """Return the storage for counting n flags in a 32-bit number.

    Up to 4096 elements use one block, more elements as many blocks as fit on the GPU.
    """
    if n <= 4096:
        return 1
    return parts(multiprocessors * 8 * 5 * 4)
