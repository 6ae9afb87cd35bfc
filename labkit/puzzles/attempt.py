"""Run a puzzle's function in a process of its own, and return what it did.

The function runs twice with different inputs of the same shapes. The first call loads libraries,
and only the second call counts. The expected values do not exist while the function runs.
"""

import gc
import secrets
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from gputrace import Trace, record
from gputrace.holders import tensors
from labkit import machine
from labkit.checks.checking import quote
from labkit.checks.left_behind import Followed
from labkit.puzzles.definitions import Puzzle, find
from labkit.puzzles.replaced import Replaced

_TRUSTED = ("torch", "virtualgpu")  # the packages that define the classes of tensors
_ENDING = 5.0  # seconds for a thread pool that is no longer used to end its threads


@dataclass(frozen=True)
class Attempt:
    """What a function did in the call that counts.

    Attributes:
        trace: the recording of the call, None if the function raised an error.
        trouble: what is wrong with the function apart from its score, "" if nothing is.
    """

    trace: Trace | None
    trouble: str


@dataclass(frozen=True)
class Result:
    """A tensor that a function returned, or another value.

    Attributes:
        kind: the value's type, device, dtype and shape as text.
        value: the tensor's values on the host, or the value itself.
        is_known: whether the kind of value can be compared.
        is_given: whether the tensor has the memory of an argument.
    """

    kind: str
    value: Any
    is_known: bool = True
    is_given: bool = False


# The race itself names a line of the kit, which reads the results.
TOO_EARLY = (
    "there is a race after your function has returned. The next line of a program may read a "
    "result before another stream has written it. Let the current stream wait for your streams "
    "before you return."
)


class ThreadLeftError(Exception):
    """Error for a function that has returned while a thread that it started still runs."""


def attempts(
    name: str, function: Callable[..., Any], with_original: bool
) -> tuple[Attempt | None, Attempt]:
    """Run a function, and before it the puzzle's original function if `with_original` is set.

    `name` is the name of the puzzle. Return what each of the functions did.
    """
    puzzle = find(name)
    original = None
    if with_original:
        original = attempt(puzzle, puzzle.function)
    return original, guarded_attempt(puzzle, function, Replaced())


def guarded_attempt(
    puzzle: Puzzle,
    function: Callable[..., Any],
    replaced: Replaced,
    draw: Callable[[int], int] = secrets.randbits,
) -> Attempt:
    """Run a function, and return what it did. Trouble is also that it replaced known functions.

    Args:
        puzzle: the puzzle that the function solves.
        function: the learner's function.
        replaced: the functions of PyTorch and of the kit, from before the learner's code ran.
        draw: a function that draws the seed of the inputs. It gets the number of bits.
    """
    own = attempt(puzzle, function, draw)
    return replace(own, trouble=replaced.sentence() or own.trouble)


def attempt(
    puzzle: Puzzle, function: Callable[..., Any], draw: Callable[[int], int] = secrets.randbits
) -> Attempt:
    """Run a function, and return what it did. It leaves no memory allocated."""
    with warnings.catch_warnings(), machine.in_use().new_workspaces_freed():
        warnings.simplefilter("ignore")  # a race is reported as the trouble of an attempt
        return _attempt(puzzle, function, draw)


def _attempt(puzzle: Puzzle, function: Callable[..., Any], draw: Callable[[int], int]) -> Attempt:
    races = _races()
    left: list[str] = []
    late: list[Any] = []
    try:
        kept = _first_call(function, puzzle, draw(48), left, late)
        seed = draw(48)
        given = _given(puzzle, seed)
        trace, results = _recorded_call(function, given, left, late)
    except ThreadLeftError as error:
        return Attempt(None, str(error))
    except (Exception, SystemExit) as error:
        return Attempt(None, f"your function raised {quote(error, function)}")
    trouble = difference(puzzle, seed, given, results)
    found = _races()[len(races) :]
    if found and found[0] in late:
        trouble = TOO_EARLY
    elif found:
        trouble = f"there is a race. {found[0]}"
    elif not trouble and left:
        trouble = left[0]
    elif not trouble and kept > 0:
        were = "1 tensor was" if kept == 1 else f"{kept} tensors were"
        trouble = (
            f"after the first call, {were} still on the GPU, although its results were freed. "
            "Keep nothing for the next call."
        )
    return Attempt(trace, trouble)


def _first_call(
    function: Callable[..., Any], puzzle: Puzzle, seed: int, left: list[str], late: list[Any]
) -> int:
    """Call a function for the first time, and return how many tensors on GPUs it keeps.

    The call that counts could use work that is stored there, such as a captured graph. `left` gets
    sentences about what the call changed.
    """
    before = len(tensors.alive().storages)
    _call(Followed(_with_threads_ended(function)), _given(puzzle, seed), left, late)
    gc.collect()
    return len(tensors.alive().storages) - before


def _with_threads_ended(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, which then waits for the threads that it started.

    It raises ThreadLeftError for a thread that does not end.
    """

    def called(*given: Any) -> Any:
        before = set(threading.enumerate())
        returned = function(*given)
        deadline = time.monotonic() + _ENDING
        for thread in set(threading.enumerate()) - before:
            if isinstance(thread, threading._DummyThread):  # a thread of C++, as in a backward pass
                continue
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                raise ThreadLeftError(
                    f"your function returned while its thread {thread.name!r} was still running. "
                    "Wait for the thread with `join` before you return."
                )
        return returned

    return called


def drawn(puzzle: Puzzle, seed: int) -> tuple[Any, ...]:
    """Return the inputs of one call. The same seed gives the same values."""
    return puzzle.inputs(torch.Generator().manual_seed(seed))


def _given(puzzle: Puzzle, seed: int) -> tuple[Any, ...]:
    """Return the inputs of one call, in memory that is reserved for them.

    In a larger block of earlier work, they would keep the whole block reserved.
    """
    gc.collect()
    torch.cuda.empty_cache()
    return drawn(puzzle, seed)


def _recorded_call(
    function: Callable[..., Any], given: tuple[Any, ...], left: list[str], late: list[Any]
) -> tuple[Trace, list[Result]]:
    """Call the function with `given`, record the call, and return the recording and the results.

    `left` gets sentences about what the call changed, and `late` the races with the results.
    """
    traces = []

    followed = _with_threads_ended(function)

    def recorded(*given: Any) -> Any:
        with record(timeline=True) as trace:
            returned = followed(*given)
        trace.census = None  # it refers to the tensors that were alive
        traces.append(trace)
        return returned

    gc.collect()
    torch.cuda.empty_cache()
    machine.synchronize()
    results = _call(Followed(recorded), given, left, late)
    return traces[0], results


def _call(
    followed: Followed, given: tuple[Any, ...], left: list[str], late: list[Any]
) -> list[Result]:
    """Call the function, and return the results.

    Add to `left` what the call changed and should have left unchanged. The results are read as
    the next line of a program would read them. If the function does not make the current stream
    wait for its own streams, there is a race with this read, which is added to `late`.
    """
    returned = followed(*given)
    left += followed.left
    before = len(_races())
    results = results_of(returned, given)
    late += _races()[before:]
    return results


def _races() -> list[Any]:
    """Return the races that were found so far. Real GPUs do not tell about races."""
    used = machine.in_use()
    return used.races() if used.virtual else []


def results_of(returned: Any, given: tuple[Any, ...]) -> list[Result]:
    """Return a `Result` for each value that a function returned.

    `given` are the arguments of the function.
    """
    places = {_place(value) for value in flattened(_without_modules(given))} - {None}
    results = []
    for value in flattened(returned):
        results.append(replace(_result(value), is_given=_place(value) in places))
    return results


def _place(value: Any) -> tuple[torch.device, int] | None:
    """Return the device and address of a tensor's memory on a GPU, None for other values."""
    if not _is_trusted(value) or not value.is_cuda or value.layout is not torch.strided:
        return None
    return value.device, value.untyped_storage().data_ptr()


def _without_modules(value: Any) -> Any:
    """Return arguments with the tensors of each module in its place."""
    if isinstance(value, list | tuple):
        return [_without_modules(part) for part in value]
    if isinstance(value, nn.Module):
        return dict(value.named_parameters()) | dict(value.named_buffers())
    return value


def flattened(value: Any) -> Iterator[Any]:
    """Yield the tensors and the other values in nested lists, tuples and dictionaries."""
    if isinstance(value, dict):
        value = dict(dict.items(value))
        value = [part for key in sorted(value) for part in (key, value[key])]
    # The methods of the built-in types, because a class of the learner's own could compute late.
    if isinstance(value, list):
        value = tuple(list.__iter__(value))
    if isinstance(value, tuple):
        for part in tuple.__iter__(value):
            yield from flattened(part)
    else:
        yield value


def _is_trusted(value: Any) -> bool:
    """Return whether a value is a tensor of a class of PyTorch's or the virtual GPU's."""
    return isinstance(value, torch.Tensor) and type(value).__module__.partition(".")[0] in _TRUSTED


def _result(value: Any) -> Result:
    """Return a `Result` for one value, which has a tensor's values on the host.

    A tensor class of the learner's own is not trusted.
    """
    kind = type(value)
    if _is_trusted(value):
        text = f"a tensor of shape {list(value.shape)}, {value.dtype}, on {value.device}"
        # Not `value.detach()`, because a tensor may have an attribute of this name.
        return Result(text, torch.Tensor.detach(value).cpu().clone())
    if kind in (bool, int, float, str, type(None)):
        return Result(f"a value of type {kind.__name__}", value)
    return Result(f"an object of the class {kind.__name__}", None, is_known=False)


def difference(puzzle: Puzzle, seed: int, given: tuple[Any, ...], results: list[Result]) -> str:
    """Return a sentence about the first difference from the original's values, "" if none.

    `given` are the arguments after the call. They must have the values that they had before.
    """
    fresh = drawn(puzzle, seed)
    before, after = (
        list(map(_result, flattened(_without_modules(inputs)))) for inputs in (fresh, given)
    )
    if _first_apart(after, before, 0.0):
        return "your function changed a tensor that it was given. Leave it as it was."
    expected = results_of(puzzle.function(*fresh), fresh)
    if len(results) != len(expected):
        values = "1 value" if len(results) == 1 else f"{len(results)} values"
        return f"your function returned {values} instead of {len(expected)}."
    return _first_apart(results, expected, puzzle.tolerance)


def _first_apart(found: list[Result], expected: list[Result], tolerance: float) -> str:
    """Return a sentence about the first pair of results that differ, or "" if there is none.

    `tolerance` is relative to the largest element.
    """
    for number, (one, other) in enumerate(zip(found, expected, strict=True), 1):
        which = "the result" if len(expected) == 1 else f"result {number} of {len(expected)}"
        if one.kind != other.kind or not one.is_known:
            return f"{which} is {one.kind}, not {other.kind}."
        if one.is_given and not other.is_given:
            return f"{which} uses the memory of an argument. Return a new tensor."
        if not isinstance(other.value, torch.Tensor):
            if one.value != other.value:
                return f"{which} is {one.value!r} instead of {other.value!r}."
            continue
        apart = _apart(one.value, other.value, tolerance)
        if apart.any():
            index = apart.nonzero()[0].tolist()
            values = [float(each.value[tuple(index)]) for each in (one, other)]
            where = f" at {index}" if index else ""
            return (
                f"{which} differs in {int(apart.sum()):,} of {apart.numel():,} elements. "
                f"It is {values[0]:g} instead of {values[1]:g}{where}."
            )
    return ""


def _apart(one: torch.Tensor, other: torch.Tensor, tolerance: float) -> torch.Tensor:
    """Return a mask of the elements of `one` that differ from those of `other`.

    A difference counts if it exceeds the tolerance times the largest element of `other`.
    """
    if not other.is_floating_point():
        return one != other
    one, other = one.double(), other.double()
    largest = float(other[other.isfinite()].abs().max()) if other.isfinite().any() else 0.0
    return ~torch.isclose(one, other, rtol=0.0, atol=tolerance * largest, equal_nan=True)
