"""Checks of lesson 05, the caching allocator."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gpulessons.lesson_05.labs.allocator_by_hand import unused_stream
from gputrace.units import byte_text
from labkit.checks.checking import Check, Plain, Verdict, describe, during, not_yet, number_or_type, quote, right, wrong_type
from labkit.checks.comparing import first_difference, sizes_alike

KIB, MIB = 1 << 10, 1 << 20
SEGMENT = 20 * MIB  # what requests of more than 1 MiB and less than 10 MiB share


def _empty(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cuda")


@contextmanager
def _tidy() -> Iterator[None]:
    """An empty cache and a stream of its own: what lies free in the notebook's own segments changes nothing in the block."""
    with torch.cuda.stream(unused_stream()):
        yield
    torch.cuda.empty_cache()


# 05.1: what a request makes PyTorch reserve


def draw_requests(generator: random.Random) -> Plain:
    """Sizes on both sides of each of the allocator's limits."""
    sizes = [
        generator.randint(1, 900 * KIB),
        MIB,
        MIB + generator.randint(1, 255),  # rounded to the nearest block, it would be small
        generator.randint(2 * MIB, 9 * MIB),
        10 * MIB - 512,  # the largest that shares a segment
        10 * MIB - generator.randint(257, 511),  # its block is 10 MiB large, though that is not the nearest
        10 * MIB,
        10 * MIB + generator.randint(1, MIB),
        generator.randint(11, 20) * 2 * MIB,
        generator.randint(25 * MIB, 60 * MIB),
    ]
    generator.shuffle(sizes)
    return sizes


def observe_requests(reserved_for: Any, sizes: Plain) -> Plain:
    """For each size, what the answer says, what the allocator did, and how often the answer itself asked it for memory."""
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
    return torch.cuda.memory_stats().get("allocation.all.allocated", 0)


def judge_requests(observed: Plain, sizes: Plain) -> Verdict:
    for (answer, measured, asked), size in zip(observed, sizes, strict=True):
        if isinstance(answer, str):
            return wrong_type(answer, "a number of bytes")
        if asked:
            return not_yet("your function allocated memory on the GPU and looked. Compute what PyTorch will do.")
        if answer != measured:
            reserved, said = sizes_alike(measured, answer)
            request = f"for a request of {size:,} bytes"
            return not_yet(f"{request} PyTorch reserved {reserved}; you said {said}.")
    return right(f"{len(sizes)} requests were tried.")


# 05.2: a part that does not keep the whole


DTYPES = {"bfloat16": 2, "float64": 8}  # bytes of a number; not what PyTorch makes of Python's numbers


def draw_batches(generator: random.Random) -> Plain:
    return {
        "dtype": generator.choice(list(DTYPES)),
        "rows": [generator.randint(40, 80) for _ in range(3)],
        "columns": 8192 + 512 * generator.randint(0, 8),
        "count": generator.randint(2, 9),
    }


def observe_batches(first_rows: Any, inputs: Plain) -> Plain:
    """What the answer returns, and the bytes that stay allocated for it when the batches are gone."""
    columns, count = inputs["columns"], inputs["count"]
    before = _requested()
    due = [
        (torch.arange(rows * columns).remainder(1999) + rows).view(rows, columns).to(getattr(torch, inputs["dtype"]))
        for rows in inputs["rows"]
    ]
    batches = [batch.cuda() for batch in due]
    with during(f"{len(batches)} batches and {count} rows"):
        kept = first_rows(batches, count)
    del batches
    held = _requested() - before
    if not isinstance(kept, list | tuple):
        return {"type": type(kept).__name__}
    devices = [part.device.type for part in kept if isinstance(part, torch.Tensor)]
    difference = first_difference(kept, [batch[:count] for batch in due])
    return {"type": "list", "held": held, "difference": difference, "devices": devices}


def _requested() -> int:
    """Bytes that tensors asked for: a block may be larger."""
    return torch.cuda.memory_stats().get("requested_bytes.all.current", 0)


def judge_batches(observed: Plain, inputs: Plain) -> Verdict:
    if observed["type"] != "list":
        return wrong_type(observed["type"], "a list of tensors")
    count = inputs["count"]
    if observed["difference"]:
        return not_yet(
            f"expected the first {count} rows of each of the {len(inputs['rows'])} batches, "
            f"with all columns and the same dtype; {observed['difference']}."
        )
    if "cpu" in observed["devices"]:
        return not_yet("the rows were to stay on the GPU; yours are on the CPU.")
    needed = len(inputs["rows"]) * DTYPES[inputs["dtype"]] * count * inputs["columns"]
    if observed["held"] > needed + 512 * len(inputs["rows"]):
        return not_yet(
            f"the rows take {byte_text(needed)}, and {byte_text(observed['held'])} stay allocated. Whose storage do your rows use?"
        )
    return right(f"{byte_text(observed['held'])} stay allocated, no more than the rows take.")


# 05.3: the largest free block

CYCLES = 100_000_000  # for which a stream stays busy: longer than the answer needs


def draw_holes(generator: random.Random) -> Plain:
    """Sizes of the blocks of some layouts: in one alone, the largest may well be the first that is free, or the last."""
    sizes = [[generator.randint(10, 18) * 256 * KIB for _ in range(12)] for _ in range(4)]
    sizes.append([generator.randint(*((14, 18), (10, 13))[index % 2]) * 256 * KIB for index in range(12)])  # the larger ones stay in use
    sizes.append([generator.randint(*((350, 370), (290, 310))[index % 2]) * KIB for index in range(12)])  # in two segments for small blocks
    return {"sizes": sizes, "larger": generator.randint(30, 40) * MIB}


def observe_holes(largest_free_block: Any, inputs: Plain) -> Plain:
    """What the answer says of streams without blocks and with some, and the stream's free blocks each time."""
    with _tidy(), during("a stream that has no blocks yet"):
        observed: list[Plain] = [{"answer": number_or_type(largest_free_block()), "free": [], "emptied": False}]
    return observed + [_with_holes(largest_free_block, sizes, inputs["larger"]) for sizes in inputs["sizes"]]


def _with_holes(largest_free_block: Any, sizes: list[int], larger: int) -> Plain:
    """Blocks larger than the free ones are in use, wait for another stream that still uses them, or belong to another stream."""
    with _tidy():
        here = torch.cuda.current_stream()
        tensors = [_empty(size) for size in sizes]
        tensors += [_empty(size) for size in _free(here)]  # the rests of the segments, of 1 MiB or more where the blocks are large
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
    """Sizes of a stream's free blocks."""
    segments = [segment for segment in torch.cuda.memory_snapshot() if segment["stream"] == stream.cuda_stream]
    return [block["size"] for segment in segments for block in segment["blocks"] if block["state"] == "inactive"]


def judge_holes(observed: Plain, inputs: Plain) -> Verdict:
    for found in observed:
        answer, free = found["answer"], found["free"]
        due = max(free, default=0)
        if isinstance(answer, str):
            return wrong_type(answer, "a number of bytes")
        if found["emptied"]:
            return not_yet("your function has returned free segments to the GPU. It should only look.")
        if answer == due:
            continue
        if not due:
            return not_yet(f"the current stream had no free block, so 0 was due; you said {byte_text(answer)}. Whose blocks are yours?")
        largest_size, said = sizes_alike(due, answer)
        largest = f"the largest free block of the current stream has {largest_size}"
        if answer == sum(free):
            together = f"{said} are all its free blocks together"
            return not_yet(f"{largest}; {together}, and no request gets them as one.")
        return not_yet(f"{largest}; you found {said}. Which blocks are free, and of which stream?")
    return right(f"{len(free)} blocks are free, {byte_text(sum(free))} in all, and the largest has {byte_text(max(free))}.")


# 05.4: a batch in as few pieces as fit

COLUMNS = 3  # of the batch: its rows are no numbers
SCRATCH = 4 * MIB  # that the work holds when it fails
MOST_TRIES = 200


def draw_work(generator: random.Random) -> Plain:
    """Odd numbers of rows, to be halved two or three times, and four or five; rows that never fit; work that fails for another reason."""
    sizes = ((2 * generator.randint(10, 19) + 1, generator.randint(5, 9)), (2 * generator.randint(20, 29) + 1, generator.randint(3, 5)))
    cases = [{"rows": rows, "fits": fits, "fails": False} for rows, fits in sizes]
    cases.append({"rows": generator.randint(3, 9), "fits": 0, "fails": False})
    cases.append({"rows": generator.randint(3, 9), "fits": 1, "fails": True})
    return cases


def observe_work(in_pieces: Any, cases: Plain) -> Plain:
    """The result or the error of each case, the pieces that were tried, and the bytes that were allocated as each try began."""
    observations = []
    for case in cases:
        batch = torch.arange(COLUMNS * case["rows"], device="cuda", dtype=torch.float32).view(-1, COLUMNS)
        tries: list[list[int]] = []
        observed: dict[str, Any] = {"result": None, "raised": None}
        try:
            observed["result"] = describe(in_pieces(_work(case, tries, torch.cuda.memory_allocated()), batch))
        except (torch.OutOfMemoryError, UnrelatedError, EndlessError) as error:
            observed["raised"] = quote(error)
        observations.append({**observed, "tries": tries})
    return observations


UNFIT = "rows do not fit"  # says the error, by which it is known again


class UnrelatedError(RuntimeError):
    """What some of the work raises that has nothing to do with memory."""


class EndlessError(Exception):
    """Raised when the work is tried again and again."""


def _work(case: Plain, tries: list[list[int]], before: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Doubles a batch; runs out of memory above so many rows, while it holds memory of its own."""

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
        return 2 * batch

    return work


def judge_work(observations: Plain, cases: Plain) -> Verdict:
    for observed, case in zip(observations, cases, strict=True):
        sizes = [size for size, _ in observed["tries"]]
        rows, raised = case["rows"], observed["raised"]
        if not sizes or sizes[0] != rows:
            return not_yet(f"try the whole batch of {rows} rows first; your first try had {sizes[0] if sizes else 'no'} rows.")
        if case["fails"]:
            if raised is None or not raised.startswith("UnrelatedError") or len(sizes) > 1:
                return not_yet("work raised an error that was not about memory: let it go up to the caller at once.")
            continue
        if len(sizes) == 1:
            return not_yet(f"{rows} rows did not fit, and no fewer were tried; there was {raised or 'a result'}.")
        if max(held for _, held in observed["tries"]) > SCRATCH // 2:
            return not_yet(
                f"as a piece was tried again, {byte_text(max(held for _, held in observed['tries']))} of the try that failed were still "
                "allocated: inside `except`, the error holds its traceback, and that holds the variables of the work."
            )
        halves = {rows // 2, -(-rows // 2)}
        halved = {size for power in range(1, rows.bit_length() + 1) for size in (rows >> power, -(-rows >> power))}
        failed = [size for size in sizes[2:] if size > case["fits"]]  # a piece that fits may also be what is left over
        if other := [size for size in sizes[1:2] if size not in halves] + [size for size in failed if size not in halved]:
            return not_yet(f"{rows} rows did not fit: halve them, again and again. You tried {other[0]} of the {rows} rows.")
        if case["fits"] == 0:
            if raised is None or UNFIT not in raised:
                return not_yet(f"not even one row fitted: work's own OutOfMemoryError was due; there was {raised or 'a result'}.")
            continue
        if raised is not None:
            return not_yet(f"pieces of {case['fits']} rows fit, and your function raised {raised}.")
        if wrong := _wrong_result(observed["result"], rows):
            return not_yet(f"the pieces' results must be joined row by row, in order. {wrong}")
        result = observed["result"]
        if result["device"] == "cpu":
            return not_yet("the results of the pieces were on the GPU; what you returned is on the CPU.")
        fitting = [size for size in sizes if size <= case["fits"]]
        if len(fitting) > 2 * (-(-rows // case["fits"])):
            return not_yet(f"{rows} rows, of which {case['fits']} fit at once, took {len(fitting)} pieces: halve, and no more.")
    return right("Each piece was as large as repeated halving allows.")


def _wrong_result(result: Plain, rows: int) -> str:
    """Say how the joined result differs from the expected rows. Empty if it does not."""
    if "shape" not in result:
        return f"You returned {result['type']}, not a tensor."
    if result["shape"] != [rows, COLUMNS]:
        return f"Expected a tensor of shape [{rows}, {COLUMNS}]; yours has shape {result['shape']}."
    starts = range(0, COLUMNS * rows, COLUMNS)
    found = [result["values"][start : start + COLUMNS] for start in starts]
    expected = [[2.0 * entry for entry in range(start, start + COLUMNS)] for start in starts]
    if found == expected:
        return ""
    if sorted(found) == expected:
        return "Your result has the right rows in another order."
    return "Your result has the right shape, but other values."


# 05.5: a few tensors that keep many segments

BEFORE = 4000 * KIB  # what lies before each: too small for another one, and a tensor left behind it leaves no place for all the others


def draw_scattered(generator: random.Random) -> Plain:
    """Sizes of which four fill most of a segment, no two alike, the largest first, and what the tensors are full of."""
    sizes = sorted(generator.sample(range(4300, 4900), k=4), reverse=True)
    orders = [[0, 1, 2, 3], [3, 2, 1, 0], generator.sample(range(4), k=4)]
    return {"sizes": [size * KIB for size in sizes], "values": generator.sample(range(1, 250), k=4), "orders": orders}


def observe_scattered(compact: Any, inputs: Plain) -> Plain:
    """The worst of three lists: as allocated, the other way round, and shuffled. With one, moving one at a time is enough by luck."""
    found = [_scattered(compact, inputs["sizes"], inputs["values"], order) for order in inputs["orders"]]
    return max(
        found,
        key=lambda each: (bool(each["difference"]), "cpu" in each["devices"], each["after"]),
    )


def _scattered(compact: Any, sizes: list[int], values: list[int], order: list[int]) -> dict[str, Plain]:
    """The values afterwards, where they are, and what is reserved for the tensors before and after."""
    with _tidy():
        base = torch.cuda.memory_reserved()
        blocks = [_empty(part).view(-1, KIB) for size in sizes for part in (BEFORE, size, size, size)]  # four lie in a segment
        kept = [blocks[4 * place + 1] for place in order]
        for block, value in zip(kept, values, strict=True):
            block.fill_(value)
            block[-1, -1] = 255  # a block filled with its first number is another one
        due = [block.cpu() for block in kept]
        del blocks, block
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved() - base
        with during(f"{len(kept)} tensors of {byte_text(min(sizes))} to {byte_text(max(sizes))}"):
            compact(kept)
        after = torch.cuda.memory_reserved() - base
        torch.cuda.empty_cache()
        least = torch.cuda.memory_reserved() - base
        difference = first_difference(kept, due)
        devices = [tensor.device.type for tensor in kept if isinstance(tensor, torch.Tensor)]
        kept.clear()
    sizes_reserved = {"before": before, "after": after, "least": least}
    return {**sizes_reserved, "difference": difference, "devices": devices}


def judge_scattered(observed: Plain, inputs: Plain) -> Verdict:
    if observed["difference"]:
        difference = observed["difference"]
        return not_yet(f"the list must hold the same tensors in the same order; {difference}.")
    if "cpu" in observed["devices"]:
        return not_yet("the tensors were to be on the GPU again; some are on the CPU.")
    if observed["after"] > SEGMENT:
        told = f"{byte_text(observed['before'])} were reserved before and {byte_text(observed['after'])} afterwards"
        if observed["least"] <= SEGMENT:
            return not_yet(f"{told}; segments that are wholly free are still PyTorch's. Who gives them back, and when?")
        return not_yet(
            f"{told}; {byte_text(SEGMENT)} are enough. When new tensors were made, old ones, or blocks beside them, were still in "
            "use: a list, a loop's variable or a copy on the GPU keeps a segment."
        )
    return right(f"{byte_text(observed['before'])} were reserved before, {byte_text(observed['after'])} afterwards.")


CHECKS = [
    Check("05.1", draw_requests, observe_requests, judge_requests, section="Blocks and segments"),
    Check("05.2", draw_batches, observe_batches, judge_batches, section="What you did not allocate"),
    Check("05.3", draw_holes, observe_holes, judge_holes, section="Blocks and segments"),
    Check("05.4", draw_work, observe_work, judge_work, section="Fragmentation"),
    Check("05.5", draw_scattered, observe_scattered, judge_scattered, alters=("values",), section="A second process"),
]
