"""Temporary storage of CUB's device-wide algorithms, as PyTorch 2.11 for CUDA 13 calls them.

CUB rounds each part up to 256 bytes and adds 255 for the alignment of the first (`cub/util_allocator`, `alias_temporaries`). The tile
sizes are those of CUB's tuning for sm_90; where the headers leave a choice to the compiler, they were read off an H200's requests for
1 to 10,000,000 elements. On other GPUs they are estimates.
"""

from functools import lru_cache
from math import ceil

# Elements a tile of a one-sweep radix sort, by bytes of a key and of a value; 0 is a sort of keys alone.
SORT_TILES = {
    (1, 8): 3456, (2, 8): 5632, (4, 8): 5376, (8, 8): 4608, (8, 4): 5760, (4, 4): 6528,
    (1, 0): 9728, (2, 0): 9728, (4, 0): 7296, (8, 0): 5760,
}  # fmt: skip
FLOAT_KEYS_TILE = 6912  # keys alone, float32
SELECT_TILES = {1: 5632, 2: 5632, 4: 6528, 8: 4224}  # by bytes of an element


def parts(*sizes: int) -> int:
    """Bytes of a temporary storage made of these parts."""
    return sum(-(-size // 256) * 256 for size in sizes) + 255


@lru_cache(maxsize=4096)
def radix_sort(n: int, key: int, value: int = 8, bits: int | None = None, floating: bool = False) -> int:
    """A sort of n pairs (or keys, with value 0), by sizes in bytes. Few elements are sorted by one block, which needs nothing (1 byte)."""
    if n <= 256 * (19 * 4 // max(4, key, value)):
        return 1
    passes = ceil((8 * key if bits is None else max(bits, 1)) / 8)
    tile = FLOAT_KEYS_TILE if floating and (key, value) == (4, 0) else SORT_TILES[key, value]
    copies = (n * key, n * value) if passes > 1 else ()
    return parts(passes * 256 * 8, passes * 8, ceil(n / tile) * 1024, *copies)


@lru_cache(maxsize=4096)
def segmented_sort(n: int, key: int, value: int = 8) -> int:
    return parts(n * key, n * value)


@lru_cache(maxsize=4096)
def scan(n: int, itemsize: int) -> int:
    """A scan of n elements of PyTorch's cumulative functions: CUB's untuned policy of 128 threads, 15 items of 4 bytes each."""
    items = max(1, min(15 * 4 // itemsize, 30))
    words = ceil(n / (128 * items)) + 32  # what each tile tells the next ones: its state and two sums
    if itemsize == 2:  # not packed into one word
        return parts(4 * words, 2 * words, 2 * words, 1)
    return parts(words * (16 if itemsize == 8 else 8), 1)


@lru_cache(maxsize=4096)
def int_scan(n: int) -> int:
    """A sum scan of 32-bit integers, tuned: 128 threads, 24 items each."""
    return parts((ceil(n / 3072) + 32) * 8, 1)


@lru_cache(maxsize=4096)
def select(n: int, itemsize: int) -> int:
    """`DeviceSelect::Flagged` or `Unique` of n elements."""
    return parts((ceil(n / SELECT_TILES[itemsize]) + 32) * 8, 1)


@lru_cache(maxsize=4096)
def unique_by_key(n: int, itemsize: int) -> int:
    return parts((ceil(n / (2304 if itemsize == 8 else 3584)) + 32) * 8, 1, 1)


@lru_cache(maxsize=4096)
def run_lengths(n: int) -> int:
    return parts(16 * ceil(n / 768), 1, 1)


def count(n: int, multiprocessors: int = 132) -> int:
    """A reduction of n flags to a 32-bit number: one block up to 4096 elements, else as many as can be resident."""
    return 1 if n <= 4096 else parts(multiprocessors * 8 * 5 * 4)
