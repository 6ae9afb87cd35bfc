"""The seconds that kernels, copies and CPU operators take on a GPU model.

The times come from the roofline model plus fixed costs. Each function returns seconds of the device
or the host that does the work. The host time of a launch is the profile's `launch_seconds`, which
the clock adds.
"""

from math import ceil, prod
from typing import Literal

from virtualgpu.profiles import Profile

# Rows and columns of the tile that cuBLAS computes on one multiprocessor at a time. A tile may also
# be used turned by 90 degrees. These are the tiles, of those that cuBLAS offers for a format, that
# fit the measured table of an H200 best.
TILES = {
    "float32": (128, 128),
    "tf32": (128, 128),
    "float16": (128, 256),
    "bfloat16": (128, 256),
    "float64": (64, 64),
    "int8": (128, 256),
}
# cuBLAS has narrow tiles and vector kernels for matrices with fewer rows or columns than this. They
# are computed as if their elements were one long row.
NARROW = 64
# How well the memory traffic of a matrix product overlaps with its arithmetic. Infinity would be a
# perfect overlap, and 1 no overlap. Fitted on every second row of the published matrix products of
# five GPUs (benchmarks/public_operators.py).
OVERLAP = 3
# cuBLAS splits sums among multiprocessors that would be idle (split-K). Each part has at least
# SPLIT_TERMS terms, and adding the parts takes SPLIT_SECONDS more. Fitted on the products of
# benchmarks/timing/small_kernels.json.
SPLIT_TERMS = 128
SPLIT_SECONDS = 3e-6
PARTIAL_BYTES = 2 * 4  # per element of a part: it is written in float32 and read again
# cuBLASLt computes products to which a bias is added, and rarely splits float32 sums. Fitted on the
# linear layers of benchmarks/timing/small_kernels.json.
BIASED_SPLIT_TERMS = 1024
# Each thread of a memory-bound kernel has one vector of this many bytes in flight.
VECTOR_BYTES = 16
# A pageable copy goes through a pinned staging buffer. The copy engine can start when the first
# STAGING_BYTES bytes are there.
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
    """Return the device seconds of one kernel.

    The time follows the roofline model (Williams, Waterman and Patterson, 2009). It is a fixed
    minimum plus the longer of the memory time and the arithmetic time. A matrix product that needs
    both for about the same time takes somewhat longer than either.

    Args:
        profile: the GPU model
        bytes_moved: bytes of device memory read and written
        flops: arithmetic operations
        format: one of `profiles.FORMATS`
        matmul: whether the kernel is a matrix product
        outputs: elements of the product's result over the whole batch. 0 means the square product
            with this many operations
        matrix: rows and columns of each result in the batch, if the results are matrices
        split_terms: the least number of terms per part if sums are split

    Raises ValueError for an unknown format.
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
        formats = ", ".join(TILES)
        raise ValueError(f"expected one of the formats {formats}, got {format!r}") from None
    if matmul:
        return profile.kernel_minimum_seconds + _overlapping(memory, arithmetic)
    return profile.kernel_minimum_seconds + max(memory, arithmetic)


def _overlapping(memory: float, arithmetic: float) -> float:
    """Return the seconds of a matrix product from its memory seconds and its arithmetic seconds.

    The two overlap imperfectly, so the result is somewhat longer than the longer of them.
    """
    longer, shorter = max(memory, arithmetic), min(memory, arithmetic)
    return longer * (1 + (shorter / longer) ** OVERLAP) ** (1 / OVERLAP)


def further_seconds(profile: Profile, clocks: float, serial: float, around: float) -> float:
    """Return the device seconds that a kernel takes in addition to the roofline.

    `clocks` and `serial` are clocks of a multiprocessor, and `around` is bytes moved by further
    kernels (see `ops.call.Work`).
    """
    instructions = (clocks / profile.multiprocessors + serial) / (1e3 * profile.sm_clock_khz)
    return instructions + _memory_seconds(profile, around)


def clocks_beyond_memory(profile: Profile, clocks: float, bytes_moved: float) -> float:
    """Return the clocks of a kernel that are not hidden behind moving its bytes.

    `clocks` are those of the kernel's instructions. They are counted over all multiprocessors
    together.
    """
    memory = _memory_seconds(profile, bytes_moved)
    available = memory * 1e3 * profile.sm_clock_khz * profile.multiprocessors
    return max(0.0, clocks - available)


def _memory_seconds(profile: Profile, bytes_moved: float) -> float:
    """Return the seconds that the device memory needs to move this many bytes."""
    return bytes_moved / (profile.memory_bytes_per_second * profile.memory_efficiency)


def _vector_flops(profile: Profile, format: str) -> float:
    """Return the operations per second of kernels that are not matrix products.

    Only matrix products use tensor cores. 16-bit formats are therefore computed in float32.
    """
    return min(profile.peak_flops["float32"], profile.peak_flops[format])


def _matmul_seconds(
    profile: Profile,
    flops: float,
    format: str,
    outputs: int,
    matrix: Sides | None,
    split_terms: int,
) -> float:
    """Return the seconds that the arithmetic of a matrix product takes.

    The product is computed in waves of tiles, one tile per multiprocessor. The tiles are large, or
    small if less of the GPU is idle then. A small product stays far below the peak because it has
    fewer tiles than the GPU has multiprocessors. Tiles at a matrix's edge take as long as whole
    ones. Without tensor cores, a tile takes as long as if it had some more terms, because its first
    factors have to arrive and its results have to be written.

    The arguments are those of `kernel_seconds`.
    """
    fill = 0.0
    if _computed_as(profile, format) == "float32":
        fill = profile.fill_terms
    rate = profile.peak_flops[format] * profile.matmul_efficiency[format] / profile.multiprocessors
    seconds = []
    for tile, small in _tiles(profile, format):
        tiles, elements, terms = _tiling(flops, outputs, matrix, tile)
        reached = rate
        if small:
            reached = rate * profile.small_tile_efficiency
        waves = ceil(tiles / profile.multiprocessors)
        seconds.append(waves * 2 * elements * (terms + fill) / reached)
        parts = _parts(profile, matrix, tiles, terms, split_terms)
        if parts > 1:
            partial = parts * tiles * elements * PARTIAL_BYTES
            added_up = SPLIT_SECONDS + _memory_seconds(profile, partial)
            seconds.append(2 * elements * (terms / parts + fill) / reached + added_up)
    return min(seconds)


def _tiles(profile: Profile, format: str) -> list[tuple[Sides, bool]]:
    """Return (tile, whether it is small) for each size of tile that the product can use.

    Small tiles have half the rows and columns of large ones. `format` is the format of the factors.
    """
    rows, columns = TILES[_computed_as(profile, format)]
    orientations = [(rows, columns)]
    if rows != columns:
        orientations.append((columns, rows))
    large = [(tile, False) for tile in orientations]
    small = [((rows // 2, columns // 2), True) for rows, columns in orientations]
    return large + small


def _computed_as(profile: Profile, format: str) -> str:
    """Return the format in which the GPU's units compute matrix products of `format`.

    It is float32 if the GPU has no tensor cores for `format`.
    """
    if format not in ("tf32", "bfloat16"):
        return format
    if profile.peak_flops[format] == profile.peak_flops["float32"]:
        return "float32"
    return format


def _tiling(
    flops: float, outputs: int, matrix: Sides | None, tile: Sides
) -> tuple[int, int, float]:
    """Return (tiles, elements per tile, terms per element) of a matrix product.

    The product has `flops` operations and `outputs` elements (0 means a square result). `matrix` is
    the size of each result, and `tile` that of a tile.
    """
    outputs = outputs or round((flops / 2) ** (2 / 3))
    terms = flops / (2 * outputs)
    if matrix is None or min(matrix) < NARROW:
        return ceil(outputs / prod(tile)), min(prod(tile), outputs), terms
    rows, columns = matrix
    tiles_per_matrix = ceil(rows / tile[0]) * ceil(columns / tile[1])
    return outputs // prod(matrix) * tiles_per_matrix, prod(tile), terms


def _parts(
    profile: Profile, matrix: Sides | None, tiles: int, terms: float, split_terms: int
) -> int:
    """Return the number of multiprocessors among which the sums of a tile are split.

    Each sum has `terms` terms, and at least `split_terms` of them stay together. Only cuBLAS splits
    sums, so the number is 1 without a `matrix`.
    """
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
    """Return the share of the GPU that a kernel uses, above 0 and at most 1.

    Kernels of several streams run at the same time while their shares fit. The share of a matrix
    product is the part of the multiprocessors that have a tile, or the part of the time in which
    memory is busy, whichever is larger. The share of another kernel is the part of the threads that
    have bytes to read or write.
    """
    if flops:
        small = _tiles(profile, format)[-1][0]
        tiles, _, terms = _tiling(flops, outputs, matrix, small)
        parts = _parts(profile, matrix, tiles, terms, split_terms)
        memory = _memory_seconds(profile, bytes_moved)
        arithmetic = _matmul_seconds(profile, flops, format, outputs, matrix, split_terms)
        seconds = _overlapping(memory, arithmetic)
        return min(1.0, max(tiles * parts / profile.multiprocessors, memory / seconds))
    threads = profile.multiprocessors * profile.max_threads_per_multiprocessor
    return min(1.0, max(bytes_moved / (VECTOR_BYTES * threads), 1 / profile.multiprocessors))


def copy_seconds(profile: Profile, kind: CopyKind, nbytes: int, pinned: bool) -> float:
    """Return the seconds for which a copy of `nbytes` bytes keeps its engine busy.

    `kind` is "h2d" (host to device), "d2h", "d2d" (within a device, where a kernel copies) or "p2p"
    (between two devices). `pinned` says whether the host memory is page-locked, which does not
    matter for "d2d" and "p2p". Raises ValueError for another kind.
    """
    if kind == "d2d":
        kernel = kernel_seconds(profile, bytes_moved=2 * nbytes)
        return max(kernel, profile.kernel_minimum_seconds + profile.pinned_latency_seconds)
    if kind == "p2p":
        return profile.p2p_latency_seconds + nbytes / profile.p2p_bytes_per_second
    if kind not in ("h2d", "d2h"):
        raise ValueError(f'expected the kind "h2d", "d2h", "d2d" or "p2p", got {kind!r}')
    if pinned:
        rate = profile.pinned_d2h_bytes_per_second
        if kind == "h2d":
            rate = profile.pinned_h2d_bytes_per_second
        return profile.pinned_latency_seconds + nbytes / rate
    rate = profile.pageable_d2h_bytes_per_second
    if kind == "h2d":
        rate = profile.pageable_h2d_bytes_per_second
    staging = min(nbytes, STAGING_BYTES) / profile.staging_bytes_per_second
    return profile.pageable_latency_seconds + staging + nbytes / rate


def pin_seconds(profile: Profile, nbytes: int) -> float:
    """Return the host seconds of `pin_memory()`: page-lock `nbytes` bytes and copy into them."""
    return profile.pin_latency_seconds + nbytes / profile.pin_bytes_per_second


def cpu_seconds(profile: Profile, bytes_moved: int, flops: float = 0) -> float:
    """Return the host seconds of a CPU operator: the cost of the call plus the CPU's roofline."""
    memory = bytes_moved / profile.cpu_bytes_per_second
    arithmetic = flops / profile.cpu_flops
    return profile.cpu_launch_seconds + max(memory, arithmetic)
