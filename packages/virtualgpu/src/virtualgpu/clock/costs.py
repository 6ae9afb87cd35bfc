"""How long a kernel, a copy or a CPU operator takes on a profile: the roofline, with the fixed costs of each.

Every function returns seconds of the device or the host that does the work. What a launch costs the host before the work can
start is the profile's `launch_seconds`, and the clock adds it.
"""

from math import ceil, prod
from typing import Literal

from virtualgpu.profiles import Profile

# Sides of the large tile that cuBLAS cuts a matrix product into, one a multiprocessor at a time; it may lie either way. Chosen among those
# tiles that it offers for the format, by the measured H200 table.
TILES = {
    "float32": (128, 128),
    "tf32": (128, 128),
    "float16": (128, 256),
    "bfloat16": (128, 256),
    "float64": (64, 64),
    "int8": (128, 256),
}
# Matrices with fewer rows or columns lie in tiles as if they were one long row: cuBLAS has narrow tiles for them, and kernels for vectors.
NARROW = 64
# How well a product's memory traffic hides behind its arithmetic. Fitted on every second row of the published products of five GPUs
# (benchmarks/public_operators.py): infinity would hide it altogether, 1 not at all.
OVERLAP = 3
# Sums are split among multiprocessors that would be idle (cuBLAS calls it split-K), each with so
# many terms at least. Adding up the pieces takes so much longer. Fitted on the products of
# benchmarks/timing/small_kernels.json.
SPLIT_TERMS = 128
SPLIT_SECONDS = 3e-6
PARTIAL_BYTES = 2 * 4  # of a piece's result, written in float32 and read again
# cuBLASLt multiplies where a bias is added, and hardly splits sums in float32. Fitted on the linear
# layers of benchmarks/timing/small_kernels.json.
BIASED_SPLIT_TERMS = 1024
# A thread of a memory-bound kernel has one vector of 16 bytes under way: so many threads are busy, if there are as many bytes.
VECTOR_BYTES = 16
# A pageable copy goes through a pinned staging buffer; its first piece has to be there before the copy engine can start.
STAGING_BYTES = 65536

Sides = tuple[int, int]  # rows and columns
CopyKind = Literal["h2d", "d2h", "d2d", "p2p"]


def kernel_seconds(
    profile: Profile,
    *,
    bytes_moved: float,
    flops: float = 0,
    format: str = "float32",
    matmul: bool = False,
    outputs: int = 0,
    matrix: Sides | None = None,
    split_terms: int = SPLIT_TERMS,
) -> float:
    """Device seconds of one kernel that reads and writes `bytes_moved` bytes of device memory and does `flops` operations.

    The roofline (Williams, Waterman and Patterson, 2009): whichever of memory and arithmetic takes longer, after a fixed minimum. Where a
    matrix product needs both for about as long, it takes somewhat longer than either. `format` is one of `profiles.FORMATS`. `outputs` is
    the number of elements of a matrix product's result, over the whole batch; 0 stands for the square product of as many operations.
    `matrix` are the rows and columns of each result in the batch, where those are matrices: each has tiles of its own. Their sums may be
    split into pieces of `split_terms` terms or more.
    """
    memory = _memory_seconds(profile, bytes_moved)
    if not flops:
        return profile.kernel_minimum_seconds + memory
    try:
        if matmul:
            arithmetic = _matmul_seconds(profile, flops, format, outputs, matrix, split_terms)
        else:
            arithmetic = flops / _vector_flops(profile, format)
    except KeyError:
        raise ValueError(f"no rate for the format {format!r}; choose one of {', '.join(TILES)}") from None
    return profile.kernel_minimum_seconds + (_beside(memory, arithmetic) if matmul else max(memory, arithmetic))


def _beside(memory: float, arithmetic: float) -> float:
    """Seconds of a product that needs its memory and its arithmetic for so long: neither hides quite behind the other."""
    longer, shorter = max(memory, arithmetic), min(memory, arithmetic)
    return longer * (1 + (shorter / longer) ** OVERLAP) ** (1 / OVERLAP)


def further_seconds(profile: Profile, clocks: float, serial: float, around: float) -> float:
    """Device seconds beyond the roofline: see `ops.call.Work`."""
    instructions = (clocks / profile.multiprocessors + serial) / (1e3 * profile.sm_clock_khz)
    return instructions + _memory_seconds(profile, around)


def clocks_beyond_memory(profile: Profile, clocks: float, bytes_moved: float) -> float:
    """Clocks of a multiprocessor, of all of them together, that a kernel of so many takes longer than to move so many bytes meanwhile."""
    return max(0.0, clocks - _memory_seconds(profile, bytes_moved) * 1e3 * profile.sm_clock_khz * profile.multiprocessors)


def _memory_seconds(profile: Profile, bytes_moved: float) -> float:
    return bytes_moved / (profile.memory_bytes_per_second * profile.memory_efficiency)


def _vector_flops(profile: Profile, format: str) -> float:
    """Outside matrix products no tensor cores: 16-bit formats are computed in float32, float64 at its own rate at most."""
    return min(profile.peak_flops["float32"], profile.peak_flops[format])


def _matmul_seconds(profile: Profile, flops: float, format: str, outputs: int, matrix: Sides | None, split_terms: int) -> float:
    """Waves of tiles, one tile a multiprocessor: in large tiles, or in small ones where those leave less idle.

    A small product has fewer tiles than the GPU has multiprocessors: the idle ones are why it stays far below the peak. So are the tiles
    at a matrix's edges, which take as long as whole ones. Without tensor cores, a tile takes time for
    some more terms than it has: its first factors have to arrive, and its results have to be written.
    """
    fill = profile.fill_terms if _computed_as(profile, format) == "float32" else 0
    rate = profile.peak_flops[format] * profile.matmul_efficiency[format] / profile.multiprocessors
    seconds = []
    for tile, small in _tiles(profile, format):
        tiles, elements, terms = _tiling(flops, outputs, matrix, tile)
        reached = rate * profile.small_tile_efficiency if small else rate
        seconds.append(ceil(tiles / profile.multiprocessors) * 2 * elements * (terms + fill) / reached)
        pieces = _pieces(profile, matrix, tiles, terms, split_terms)
        if pieces > 1:
            partial = pieces * tiles * elements * PARTIAL_BYTES
            added_up = SPLIT_SECONDS + _memory_seconds(profile, partial)
            seconds.append(2 * elements * (terms / pieces + fill) / reached + added_up)
    return min(seconds)


def _tiles(profile: Profile, format: str) -> list[tuple[Sides, bool]]:
    """The tiles there are; which are small? Those have half the rows and columns."""
    a, b = TILES[_computed_as(profile, format)]
    ways = dict.fromkeys(((a, b), (b, a)))  # one, where they are alike
    return [(way, False) for way in ways] + [((rows // 2, columns // 2), True) for rows, columns in ways]


def _computed_as(profile: Profile, format: str) -> str:
    """Return the format in which a GPU computes this one: float32, if it has no tensor cores for it."""
    lacking = format in ("tf32", "bfloat16") and profile.peak_flops[format] == profile.peak_flops["float32"]
    return "float32" if lacking else format


def _tiling(flops: float, outputs: int, matrix: Sides | None, tile: Sides) -> tuple[int, int, float]:
    """How many tiles, and the elements of each and the terms of their sums."""
    outputs = outputs or round((flops / 2) ** (2 / 3))
    terms = flops / (2 * outputs)
    if matrix is None or min(matrix) < NARROW:
        tiles, elements = ceil(outputs / prod(tile)), min(prod(tile), outputs)
    else:
        tiles = outputs // prod(matrix) * prod(ceil(length / side) for length, side in zip(matrix, tile, strict=True))
        elements = prod(tile)
    return tiles, elements, terms


def _pieces(profile: Profile, matrix: Sides | None, tiles: int, terms: float, split_terms: int) -> int:
    """Return among how many multiprocessors cuBLAS may split a tile's sums. Others than cuBLAS split none."""
    if matrix is None:
        return 1
    return max(1, min(profile.multiprocessors // tiles, int(terms) // split_terms))


def share(
    profile: Profile,
    *,
    bytes_moved: float,
    flops: float = 0,
    format: str = "float32",
    outputs: int = 0,
    matrix: Sides | None = None,
    split_terms: int = SPLIT_TERMS,
) -> float:
    """The share of the GPU, above 0 and at most 1, that a kernel fills: kernels of several streams run at once while there is room.

    Of a matrix product the multiprocessors that have a tile, or the part of its time in which memory
    is busy, if that is more. Of another kernel the threads that have something to read or write.
    """
    if flops:
        small = _tiles(profile, format)[-1][0]
        tiles, _, terms = _tiling(flops, outputs, matrix, small)
        pieces = _pieces(profile, matrix, tiles, terms, split_terms)
        memory = _memory_seconds(profile, bytes_moved)
        seconds = _beside(memory, _matmul_seconds(profile, flops, format, outputs, matrix, split_terms))
        return min(1.0, max(tiles * pieces / profile.multiprocessors, memory / seconds))
    threads = profile.multiprocessors * profile.max_threads_per_multiprocessor
    return min(1.0, max(bytes_moved / (VECTOR_BYTES * threads), 1 / profile.multiprocessors))


def copy_seconds(profile: Profile, kind: CopyKind, nbytes: int, pinned: bool) -> float:
    """Seconds that a copy of `nbytes` bytes keeps its engine busy.

    `kind` is "h2d" (host to device), "d2h", "d2d" (within a device: a kernel that reads and writes) or "p2p" (between two
    devices). `pinned` says whether the host memory is page-locked; it plays no part in "d2d" and "p2p".
    """
    if kind == "d2d":
        return max(kernel_seconds(profile, bytes_moved=2 * nbytes), profile.kernel_minimum_seconds + profile.pinned_latency_seconds)
    if kind == "p2p":
        return profile.p2p_latency_seconds + nbytes / profile.p2p_bytes_per_second
    if kind not in ("h2d", "d2h"):
        raise ValueError(f'no copy of the kind {kind!r}; choose one of "h2d", "d2h", "d2d", "p2p"')
    if pinned:
        rate = profile.pinned_h2d_bytes_per_second if kind == "h2d" else profile.pinned_d2h_bytes_per_second
        return profile.pinned_latency_seconds + nbytes / rate
    rate = profile.pageable_h2d_bytes_per_second if kind == "h2d" else profile.pageable_d2h_bytes_per_second
    staging = min(nbytes, STAGING_BYTES) / profile.staging_bytes_per_second
    return profile.pageable_latency_seconds + staging + nbytes / rate


def pin_seconds(profile: Profile, nbytes: int) -> float:
    """Host seconds of `pin_memory()`: page-locking `nbytes` bytes and copying into them."""
    return profile.pin_latency_seconds + nbytes / profile.pin_bytes_per_second


def cpu_seconds(profile: Profile, bytes_moved: int, flops: float = 0) -> float:
    """Host seconds of a CPU operator: the same roofline for the CPU, after the cost of calling it."""
    return profile.cpu_launch_seconds + max(bytes_moved / profile.cpu_bytes_per_second, flops / profile.cpu_flops)
