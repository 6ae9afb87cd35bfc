"""Checks of lesson 05, the caching allocator."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gpulessons.lesson_05.labs.allocator_by_hand import unused_stream
from gputrace.units import byte_text
from labkit.checks.checking import (
    Check,
    Plain,
    Verdict,
    describe,
    during,
    not_yet,
    number_or_type,
    quote,
    right,
    wrong_type,
)
from labkit.checks.comparing import first_difference, sizes_alike

KIB, MIB = 1 << 10, 1 << 20
SEGMENT = 20 * MIB  # shared by requests of more than 1 MiB and less than 10 MiB


def _empty(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cuda")


@contextmanager
def _tidy() -> Iterator[None]:
    """Use a stream without segments in the block, and empty the cache afterwards.

    So free memory from earlier cells of the notebook does not count.
    """
    with torch.cuda.stream(unused_stream()):
        yield
    torch.cuda.empty_cache()


# 05.1: what a request makes PyTorch reserve


def draw_requests(generator: random.Random) -> Plain:
    """Draw sizes just below and just above each of the allocator's limits."""
    sizes = [
        generator.randint(1, 900 * KIB),
        MIB,
        MIB + generator.randint(1, 255),  # rounded to the nearest block, it would be small
        generator.randint(2 * MIB, 9 * MIB),
        10 * MIB - 512,  # the largest that shares a segment
        10 * MIB - generator.randint(257, 511),  # rounded up, its block has 10 MiB
        10 * MIB,
        10 * MIB + generator.randint(1, MIB),
        generator.randint(11, 20) * 2 * MIB,
        generator.randint(25 * MIB, 60 * MIB),
    ]
    generator.shuffle(sizes)
    return sizes


def observe_requests(reserved_for: Any, sizes: Plain) -> Plain:
    """Return each answer, the bytes reserved, and the requests that the answer made."""
    observed = []
    for size in sizes:
        asked = _requests()
        with during(f"{size} bytes"):
            answer = reserved_for(size)
        asked = _requests() - asked
        with _tidy():
            before = torch.cuda.memory_reserved()
            tensor = _empty(size)
            observed.append([number_or_type(answer), torch.cuda.memory_reserved() - before, asked])
            del tensor
    return observed


def _requests() -> int:
    """Return the number of requests that the allocator has served so far."""
    return torch.cuda.memory_stats().get("allocation.all.allocated", 0)


def judge_requests(observed: Plain, sizes: Plain) -> Verdict:
    for (answer, measured, asked), size in zip(observed, sizes, strict=True):
        if isinstance(answer, str):
            return wrong_type(answer, "a number of bytes")
        if asked:
            return not_yet(
                "your function allocated GPU memory and measured it. "
                "Predict the result by calculation instead."
            )
        if answer != measured:
            reserved, said = sizes_alike(measured, answer)
            request = f"for a request of {size:,} bytes"
            return not_yet(f"{request} PyTorch reserved {reserved}. You returned {said}.")
    return right(f"{len(sizes)} requests were tried.")


# 05.2: the largest free block

CYCLES = 100_000_000  # keep a stream busy for longer than the answer takes


def draw_holes(generator: random.Random) -> Plain:
    """Draw several layouts of memory, each as a list of block sizes.

    In a single layout, the first or the last free block may be the largest by chance.
    """
    sizes = [[generator.randint(10, 18) * 256 * KIB for _ in range(12)] for _ in range(4)]
    odd_are_larger = []
    for index in range(12):
        if index % 2:
            low, high = (10, 13)
        else:
            low, high = (14, 18)
        odd_are_larger.append(generator.randint(low, high) * 256 * KIB)
    sizes.append(odd_are_larger)
    # The blocks of the last layout are small. They are in two segments.
    small = []
    for index in range(12):
        if index % 2:
            low, high = (290, 310)
        else:
            low, high = (350, 370)
        small.append(generator.randint(low, high) * KIB)
    sizes.append(small)
    # Blocks of one size that leave a rest of more than 1 MiB at the end of each segment.
    edges = [int(generator.choice((3, 3.5, 3.75, 4.25)) * MIB)] * 12
    return {"sizes": [*sizes, edges], "larger": generator.randint(30, 40) * MIB}


def observe_holes(largest_free_block: Any, inputs: Plain) -> Plain:
    """Return the answers for several layouts of memory, and the true free blocks.

    The answer also runs on streams without blocks.
    """
    with _tidy(), during("a stream that has no blocks yet"):
        answer = number_or_type(largest_free_block())
    observed: list[Plain] = [{"answer": answer, "free": [], "emptied": False}]
    layouts = inputs["sizes"]
    return observed + [
        _with_holes(largest_free_block, sizes, inputs["larger"]) for sizes in layouts
    ]


def _with_holes(largest_free_block: Any, sizes: list[int], larger: int) -> Plain:
    """Return the answer for memory with blocks of these `sizes`, some of them free.

    Every second block is free. If all sizes are equal, the first and the last block of each segment
    are free instead, so that the free blocks of two segments are neighbours in the snapshot. Blocks
    of `larger` bytes exist, too: one is in use, one waits for another stream, and one belongs to
    another stream.
    """
    with _tidy():
        here = torch.cuda.current_stream()
        tensors = [_empty(size) for size in sizes]
        if len(set(sizes)) == 1:
            first = {segment["address"] for segment in torch.cuda.memory_snapshot()}
            tensors = [tensor for tensor in tensors if tensor.data_ptr() not in first]
        else:
            # Fill the rest of each segment. The rests of large segments have 1 MiB or more.
            tensors += [_empty(size) for size in _free(here)]
            del tensors[1 : len(sizes) : 2]
        tensors.append(_empty(larger))
        other = unused_stream()
        pending = _empty(larger)
        pending.record_stream(other)
        with torch.cuda.stream(other):
            torch.cuda._sleep(CYCLES)
            _empty(larger)
        del pending
        free = _free(here)
        reserved = torch.cuda.memory_reserved()
        answer = number_or_type(largest_free_block())
        emptied = torch.cuda.memory_reserved() < reserved
        other.synchronize()
        tensors.clear()
    return {"answer": answer, "free": free, "emptied": emptied}


def _free(stream: torch.cuda.Stream) -> list[int]:
    """Return the sizes of a stream's free blocks."""
    snapshot = torch.cuda.memory_snapshot()
    segments = [segment for segment in snapshot if segment["stream"] == stream.cuda_stream]
    blocks = [block for segment in segments for block in segment["blocks"]]
    return [block["size"] for block in blocks if block["state"] == "inactive"]


def judge_holes(observed: Plain, inputs: Plain) -> Verdict:
    for found in observed:
        answer, free = found["answer"], found["free"]
        expected = max(free, default=0)
        if isinstance(answer, str):
            return wrong_type(answer, "a number of bytes")
        if found["emptied"]:
            return not_yet(
                "your function returned free segments to the GPU. It should only look at them."
            )
        if answer == expected:
            continue
        if not expected:
            return not_yet(
                "expected 0, because the current stream has no free block. "
                f"You returned {byte_text(answer)}. Which stream has such a block?"
            )
        largest_size, said = sizes_alike(expected, answer)
        largest = f"the largest free block of the current stream has {largest_size}"
        if answer == sum(free):
            return not_yet(
                f"{largest}. You returned {said}, the sum of its free blocks. "
                "A request needs one block that is large enough."
            )
        return not_yet(
            f"{largest}. You returned {said}. Which blocks are free, and of which stream?"
        )
    blocks = f"{len(free)} blocks are free, {byte_text(sum(free))} in total"
    return right(f"{blocks}, and the largest has {byte_text(max(free))}.")


# 05.3: a few tensors that pin many segments

# Each tensor has a block of this size before it. The block is too small for another tensor. If one
# tensor stays behind such a block, the segment has no place for all the others.
BEFORE = 4000 * KIB
# Formats that NumPy has, too. Each holds the values exactly.
SCATTERED_DTYPES = ("float64", "float16", "int16")


def draw_scattered(generator: random.Random) -> Plain:
    """Draw four different sizes, the largest first, which together fill most of a segment."""
    sizes = sorted(generator.sample(range(4300, 4900), k=4), reverse=True)
    orders = [[0, 1, 2, 3], [3, 2, 1, 0], generator.sample(range(4), k=4)]
    values = generator.sample(range(1, 250), k=4)
    dtypes = generator.sample(SCATTERED_DTYPES, k=len(orders))  # each list has its own format
    drawn = {"values": values, "orders": orders, "dtypes": dtypes}
    return {"sizes": [size * KIB for size in sizes], **drawn}


def observe_scattered(compact: Any, inputs: Plain) -> Plain:
    """Return the worst of three results of the answer, which is to compact a list of tensors.

    The lists are in order of allocation, reversed and shuffled. With one list alone, an answer that
    moves one tensor at a time could be right by luck.
    """
    found = []
    for order, dtype in zip(inputs["orders"], inputs["dtypes"], strict=True):
        found.append(_scattered(compact, inputs["sizes"], inputs["values"], order, dtype))
    return max(found, key=_badness)


def _badness(found: dict[str, Plain]) -> tuple[bool, bool, int]:
    """Return a sort key for results of `_scattered`. The worst result has the largest key."""
    return bool(found["difference"]), bool(found["elsewhere"]), found["after"]


def _scattered(
    compact: Any, sizes: list[int], values: list[int], order: list[int], dtype: str
) -> dict[str, Plain]:
    """Call the answer on tensors of these `sizes` that are scattered over segments.

    `values` are the contents of the tensors, and `order` their order in the list. Return the
    difference to the expected values, other devices, and the reserved bytes.
    """
    with _tidy():
        base = torch.cuda.memory_reserved()
        # Four blocks fill a segment, and the second of them stays.
        parts = [part for size in sizes for part in (BEFORE, size, size, size)]
        blocks = [_empty(part).view(-1, KIB).view(getattr(torch, dtype)) for part in parts]
        kept = [blocks[4 * place + 1] for place in order]
        for block, value in zip(kept, values, strict=True):
            block.fill_(value)
            block[-1, -1] = 255  # shows a block that was filled with its first number
        expected = [block.cpu() for block in kept]
        del blocks, block
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved() - base
        smallest, largest = byte_text(min(sizes)), byte_text(max(sizes))
        with during(f"{len(kept)} tensors of {smallest} to {largest}"):
            compact(kept)
        after = torch.cuda.memory_reserved() - base
        torch.cuda.empty_cache()
        least = torch.cuda.memory_reserved() - base
        difference = first_difference(kept, expected)
        elsewhere = _elsewhere(kept)
        kept.clear()
    sizes_reserved = {"before": before, "after": after, "least": least}
    return {**sizes_reserved, "difference": difference, "elsewhere": elsewhere}


def _elsewhere(tensors: Any) -> str:
    """Return the device of the first tensor that is not on the current GPU, or ""."""
    here = torch.device("cuda", torch.cuda.current_device())
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.device != here:
            return str(tensor.device)
    return ""


def _place(device: str) -> str:
    """Return a device in words for a message, such as "the CPU"."""
    if device == "cpu":
        return "the CPU"
    return device


def judge_scattered(observed: Plain, inputs: Plain) -> Verdict:
    if observed["difference"]:
        difference = observed["difference"]
        return not_yet(f"the list must hold the same tensors in the same order. {difference}.")
    if observed["elsewhere"]:
        place = _place(observed["elsewhere"])
        return not_yet(
            f"the new tensors should be on the GPU of the old ones. Some are on {place}."
        )
    before, after = byte_text(observed["before"]), byte_text(observed["after"])
    if observed["after"] > SEGMENT:
        measured = f"{before} were reserved before and {after} afterwards"
        if observed["least"] <= SEGMENT:
            return not_yet(
                f"{measured}. Some segments are wholly free. What returns them, and when?"
            )
        return not_yet(
            f"{measured}. {byte_text(SEGMENT)} are enough. When you made the new tensors, old ones "
            "were still in memory. A list, a loop's variable or a copy on the GPU keeps a segment."
        )
    return right(f"{before} were reserved before, {after} afterwards.")


# 05.4: a part that does not keep the whole


DTYPES = {"bfloat16": 2, "float64": 8}  # bytes per number. Neither is PyTorch's default.


def draw_batches(generator: random.Random) -> Plain:
    return {
        "dtype": generator.choice(list(DTYPES)),
        "rows": [generator.randint(40, 80) for _ in range(3)],
        "columns": 8192 + 512 * generator.randint(0, 8),
        "count": generator.randint(2, 9),
    }


def observe_batches(first_rows: Any, inputs: Plain) -> Plain:
    """Return the answer's rows, and the bytes that remain allocated when the batches are gone."""
    columns, count, dtype = inputs["columns"], inputs["count"], getattr(torch, inputs["dtype"])
    before = requested()
    expected = [
        (torch.arange(rows * columns).remainder(1999) + rows).view(rows, columns).to(dtype)
        for rows in inputs["rows"]
    ]
    batches = [batch.cuda() for batch in expected]
    with during(f"{len(batches)} batches and {count} rows"):
        kept = first_rows(batches, count)
    del batches
    held = requested() - before
    if not isinstance(kept, list):
        return {"type": type(kept).__name__}
    difference = first_difference(kept, [batch[:count] for batch in expected])
    return {"type": "list", "held": held, "difference": difference, "elsewhere": _elsewhere(kept)}


def requested() -> int:
    """Return the bytes that tensors have requested. Their blocks may be larger."""
    return torch.cuda.memory_stats().get("requested_bytes.all.current", 0)


def judge_batches(observed: Plain, inputs: Plain) -> Verdict:
    if observed["type"] != "list":
        return wrong_type(observed["type"], "a list of tensors")
    count = inputs["count"]
    if observed["difference"]:
        return not_yet(
            f"expected the first {count} rows of each of the {len(inputs['rows'])} batches, "
            f"with all columns and the same dtype. {observed['difference']}."
        )
    if observed["elsewhere"]:
        place = _place(observed["elsewhere"])
        return not_yet(f"the rows should stay on the GPU of the batches. Yours are on {place}.")
    needed = len(inputs["rows"]) * DTYPES[inputs["dtype"]] * count * inputs["columns"]
    if observed["held"] > needed + 512 * len(inputs["rows"]):
        taken = f"the rows take {byte_text(needed)}"
        held = f"{byte_text(observed['held'])} stay allocated"
        return not_yet(f"{taken}, but {held}. Whose storage do your rows use?")
    return right(f"{byte_text(observed['held'])} stay allocated, no more than the rows take.")


# 05.5: a batch in pieces that fit

COLUMNS = 3  # of the batch, so that rows and numbers have different counts
RESULT_COLUMNS = COLUMNS + 1
RESULT_DTYPE = torch.float64  # not that of the batch
SCRATCH = 4 * MIB  # what the work holds when it fails
MOST_TRIES = 200


def draw_work(generator: random.Random) -> Plain:
    """Draw four cases of work that may run out of memory.

    In the first two, the rows are odd and must be halved several times. In the third, not even one
    row fits. In the fourth, the work fails for another reason.
    """
    odd = 2 * generator.randint(10, 19) + 1
    cases = [{"rows": odd, "fits": generator.randint(5, 9), "fails": False}]
    odd = 2 * generator.randint(20, 29) + 1
    cases.append({"rows": odd, "fits": generator.randint(3, 5), "fails": False})
    cases.append({"rows": generator.randint(3, 9), "fits": 0, "fails": False})
    cases.append({"rows": generator.randint(3, 9), "fits": 1, "fails": True})
    return cases


def observe_work(in_pieces: Any, cases: Plain) -> Plain:
    """Return each case's result or error, and the rows and the allocated bytes of each try."""
    observations = []
    for case in cases:
        numbers = torch.arange(COLUMNS * case["rows"], device="cuda", dtype=torch.float32)
        batch = numbers.view(-1, COLUMNS)
        tries: list[list[int]] = []
        observed: dict[str, Any] = {"result": None, "raised": None}
        try:
            work = _work(case, tries, torch.cuda.memory_allocated())
            observed["result"] = describe(in_pieces(work, batch))
        except (torch.OutOfMemoryError, UnrelatedError, EndlessError) as error:
            observed["raised"] = quote(error)
        observations.append({**observed, "tries": tries})
    return observations


UNFIT = "rows do not fit"  # the end of the error's message, by which the check finds the error


class UnrelatedError(RuntimeError):
    """Error of work that fails for a reason other than memory."""


class EndlessError(Exception):
    """Error that ends an answer which tries the work again and again."""


def _work(
    case: Plain, tries: list[list[int]], before: int
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that doubles a batch, or runs out of memory if the batch has too many rows.

    Its result has other columns and another dtype than the batch, as a model's result does. The
    last column is the first one of the batch.
    """

    def work(batch: torch.Tensor) -> torch.Tensor:
        if len(tries) == MOST_TRIES:
            raise EndlessError(f"{MOST_TRIES} tries")
        tries.append([len(batch), torch.cuda.memory_allocated() - before])
        scratch = _empty(SCRATCH)
        if case["fails"]:
            raise UnrelatedError("mat1 and mat2 shapes cannot be multiplied")
        if len(batch) > case["fits"]:
            raise torch.OutOfMemoryError(f"CUDA out of memory: {len(batch)} {UNFIT}")
        del scratch
        return torch.cat([2 * batch, batch[:, :1]], dim=1).to(RESULT_DTYPE)

    return work


def judge_work(observations: Plain, cases: Plain) -> Verdict:
    for observed, case in zip(observations, cases, strict=True):
        sizes = [size for size, _ in observed["tries"]]
        rows, raised = case["rows"], observed["raised"]
        ended = raised or "a result"
        if not sizes or sizes[0] != rows:
            first = "no"
            if sizes:
                first = sizes[0]
            return not_yet(
                f"try the whole batch of {rows} rows first. Your first try had {first} rows."
            )
        if case["fails"]:
            if raised is None or not raised.startswith("UnrelatedError") or len(sizes) > 1:
                return not_yet(
                    "`work` raised an error that is not about memory. "
                    "Pass it on to the caller, and do not try again."
                )
            continue
        if len(sizes) == 1:
            return not_yet(
                f"{rows} rows did not fit, and your function tried no fewer. It ended with {ended}."
            )
        held = max(held for _, held in observed["tries"])
        if held > SCRATCH // 2:
            return not_yet(
                f"when your function tried a piece, {byte_text(held)} of the failed attempt were "
                "still allocated. Inside `except`, the error holds its traceback, which holds the "
                "variables of `work`."
            )
        wrong_size = _not_halved(sizes, case)
        if wrong_size:
            return not_yet(
                f"{rows} rows did not fit. Halve them, again and again. "
                f"You tried {wrong_size} of the {rows} rows."
            )
        if case["fits"] == 0:
            if raised is None or UNFIT not in raised:
                return not_yet(
                    "not even one row fits, so raise the OutOfMemoryError of `work`. "
                    f"Your function ended with {ended}."
                )
            continue
        if raised is not None:
            return not_yet(f"pieces of {case['fits']} rows fit, but your function raised {raised}.")
        wrong = _wrong_result(observed["result"], rows)
        if wrong:
            return not_yet(f"join the results of the pieces row by row, in order. {wrong}")
        if observed["result"]["device"] == "cpu":
            return not_yet(
                "the results of the pieces are on the GPU. What you returned is on the CPU."
            )
        fitting = [size for size in sizes if size <= case["fits"]]
        if len(fitting) > 2 * (-(-rows // case["fits"])):
            return not_yet(
                f"{case['fits']} of the {rows} rows fit at once. "
                f"You used {len(fitting)} pieces. Halve only what does not fit."
            )
    return right("Each batch that did not fit was halved until its pieces fit.")


def _not_halved(sizes: list[int], case: Plain) -> int:
    """Return the rows of the first attempt that is not half, a quarter and so on of all rows, or 0.

    A smaller number is also allowed for the rows that are left over.
    """
    rows = case["rows"]
    halves = {rows // 2, -(-rows // 2)}
    halved = set()
    for power in range(1, rows.bit_length() + 1):
        halved |= {rows >> power, -(-rows >> power)}
    if len(sizes) > 1 and sizes[1] not in halves:
        return sizes[1]
    for size in sizes[2:]:
        if size > case["fits"] and size not in halved:
            return size
    return 0


def _wrong_result(result: Plain, rows: int) -> str:
    """Return how the joined result differs from the expected rows, or "".

    `rows` is the expected number of rows.
    """
    if "shape" not in result:
        return f"You returned {result['type']}, not a tensor."
    if result["shape"] != [rows, RESULT_COLUMNS]:
        return (
            f"Expected a tensor of shape [{rows}, {RESULT_COLUMNS}], as `work` makes it. "
            f"Yours has shape {result['shape']}."
        )
    if result["dtype"] != str(RESULT_DTYPE):
        return f"`work` returns {RESULT_DTYPE}, and you returned {result['dtype']}."
    starts = range(0, RESULT_COLUMNS * rows, RESULT_COLUMNS)
    found = [result["values"][start : start + RESULT_COLUMNS] for start in starts]
    expected = [_worked_row(row) for row in range(rows)]
    if found == expected:
        return ""
    if sorted(found) == expected:
        return "Your result has the right rows in another order."
    return "Your result has the right shape, but other values."


def _worked_row(row: int) -> list[float]:
    """Return the expected result of a row: the doubled numbers, and the row's first number."""
    numbers = [float(entry) for entry in range(COLUMNS * row, COLUMNS * (row + 1))]
    return [*(2 * number for number in numbers), numbers[0]]


CHECKS = [
    Check("05.1", draw_requests, observe_requests, judge_requests, section="Segments"),
    Check("05.2", draw_holes, observe_holes, judge_holes, section="Two streams"),
    Check(
        "05.3",
        draw_scattered,
        observe_scattered,
        judge_scattered,
        alters=("values",),
        section="Giving memory back",
    ),
    Check("05.4", draw_batches, observe_batches, judge_batches, section="A row of a matrix"),
    Check("05.5", draw_work, observe_work, judge_work, section="Build it: a batch that fits"),
]
