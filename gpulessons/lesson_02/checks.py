"""Checks of lesson 02, streams and synchronization.

Before the work that an answer must wait for, a check keeps the GPU busy with `torch.cuda._sleep`.
An answer that forgets an order then reads old values, also on a real GPU. An event that was
recorded before the answer ran tells whether the host waited. Each answer also runs once before it
is observed, because loading kernels and taking memory for the first time can make the host wait.
"""

import gc
import random
import statistics
import weakref
from collections.abc import Sequence
from itertools import islice
from operator import length_hint
from typing import Any

import torch

from gpulessons.lesson_02.gpu_seconds import (
    cycles_in,
    gpu_seconds,
    turn_streams,
    without_race_warnings,
)
from labkit import machine
from labkit.checks.checking import (
    Check,
    Plain,
    Verdict,
    describe,
    during,
    not_yet,
    one_number,
    plural,
    quote,
    right,
    wrong_type,
)

LONG = 0.1  # seconds: longer than the host needs for anything that a check asks
SIZE = 1 << 20  # numbers in a tensor that is slow to copy


# 02.1: how long work takes on the GPU

CLOSE = 0.15  # relative error that a right measurement may have
OVERHEAD = 0.5e-3  # seconds that launching and waiting may add


def draw_durations(generator: random.Random) -> Plain:
    """Draw four tasks for the GPU, each with a stream and milliseconds of work.

    The milliseconds are those of the task's kernels and of earlier work. Two tasks are short. Two
    find the stream busy.
    """
    kinds = (  # kernels, most milliseconds of a kernel, milliseconds of the work before it
        (1, 4, 0.0),
        (1, 4, generator.uniform(20, 40)),
        (3, 20, 0.0),
        (2, 20, generator.uniform(10, 30)),
    )
    cases = []
    for kernels, most, queued in generator.sample(kinds, k=4):
        pieces = [generator.uniform(2, most) for _ in range(kernels)]
        cases.append({"pieces": pieces, "queued": queued, "aside": kernels > 1})
    return cases


def observe_durations(seconds_of: Any, cases: Plain) -> Plain:
    """Return for each task the answer's seconds, the right seconds, and the calls made.

    The right seconds are those between two events.
    """
    rate, observations = cycles_in(1.0), []
    seconds_of(lambda: torch.cuda._sleep(1))
    for case in cases:
        cycles = [round(rate * milliseconds / 1e3) for milliseconds in case["pieces"]]

        calls: list[int] = []

        def work(cycles: list[int] = cycles, calls: list[int] = calls) -> None:
            calls.append(1)
            for count in cycles:
                torch.cuda._sleep(count)

        stream = None
        if case["aside"]:
            stream = torch.cuda.Stream()
        milliseconds = sum(case["pieces"])
        with without_race_warnings(stream), during(f"work of {milliseconds:.1f} ms"):
            torch.cuda._sleep(round(rate * case["queued"] / 1e3) + 1)
            said = seconds_of(work)
        ran, seconds = len(calls), one_number(said)
        told: Plain = seconds
        if seconds is None:
            told = type(said).__name__
        observations.append([told, gpu_seconds(work), ran])
    return observations


def _is_close(seconds: float, expected: float) -> bool:
    """Return whether a measured time is close enough. nan is wrong."""
    return abs(seconds - expected) <= CLOSE * expected + OVERHEAD


def judge_durations(observations: Plain, cases: Plain) -> Verdict:
    for (said, took, ran), case in zip(observations, cases, strict=True):
        if isinstance(said, str):
            return wrong_type(said, "a number of seconds")
        if not _is_close(said, took):
            return not_yet(
                f"the GPU worked for {took * 1e3:.1f} ms, and you measured {said * 1e3:.4g} ms. "
                f"{_duration_hint(said, took, case)}"
            )
        if ran != 1:
            return not_yet(
                f"your function called work {plural(ran, 'time')}. Call it once. "
                "A training step, for example, would change the model with each call."
            )
    if all(abs(said * 1e3 - round(said * 1e3)) < 1e-6 for said, *_ in observations):
        return not_yet("all your results are whole milliseconds. The clocks are finer than that.")
    return right("You measured all of this work, and nothing that was in the stream before.")


def _duration_hint(said: float, took: float, case: Plain) -> str:
    if _is_close(said / 1e3, took) or _is_close(said / 1e6, took):
        return "Return seconds."
    if case["queued"] and said > took:
        return "Did you count work that was in the stream before?"
    if said < 0:
        return "Which of the two times comes first?"
    return (
        "Did you wait until the GPU had finished? "
        "And do you read a clock that includes the GPU's time: events, or labkit.host_time()?"
    )


# 02.2: a loop that does not wait


def mean_loss(model, batches):  # what the exercise hands out; without types, as in a notebook
    """Return the mean of the losses of all batches."""
    total = 0.0
    for batch in batches:
        loss = model(batch).square().mean()
        total += loss.item()
    return total / len(batches)


def draw_losses(generator: random.Random) -> Plain:
    """Draw the value and the rows of each batch, for a few batches and for over a hundred.

    The long list is for loops that wait only in every hundredth step.
    """
    cases = []
    for count in (generator.randint(2, 8), generator.randint(101, 109)):
        case = [[generator.randint(1, 8), generator.randint(1, 9)] for _ in range(count)]
        case[-1] = [9, 400]  # So the loss of the last batch is not the mean.
        cases.append(case)
    return cases


class Double(torch.nn.Module):
    """Module that doubles the batch. `modes` lists, per call, whether it was in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(2.0, device="cuda"))
        self.modes: list[bool] = []

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.modes.append(self.training)
        return self.weight * batch


def _batch(value: int, rows: int) -> torch.Tensor:
    """Return rows of four numbers whose mean square is `value` squared.

    The first two rows differ from the others, and their mean square is the same together.
    """
    numbers = [[value, value, -value, value]] * rows
    if rows > 1:
        numbers[:2] = [[0, 0, 0, 0], [2 * value, -2 * value, 0, 0]]
    return torch.tensor(numbers, dtype=torch.float32, device="cuda")


def observe_losses(answer: Any, cases: Plain) -> Plain:
    """Run the answer on each list of batches, once in training and once in evaluation mode.

    Return for each the result, whether the host waited, and what the answer changed.
    """
    observations, sleep, model = list[Plain](), cycles_in(LONG), Double()
    for training, case in zip((True, False), cases, strict=True):
        model.train(training).modes.clear()
        batches = [_batch(value, rows) for value, rows in case]
        with during(f"{len(case)} batches"):
            answer(model, batches)
            torch.empty(SIZE * 8, device="cuda")  # a free segment: empty_cache returns it and waits
            torch.cuda.synchronize()
            torch.cuda._sleep(sleep)
            earlier = torch.cuda.current_stream().record_event()
            result = answer(model, batches)
        observations.append(
            {
                "waited": earlier.query(),
                "graph": getattr(result, "requires_grad", False),
                "backward": model.weight.grad is not None,
                "training": training,
                "modes": sorted(set(model.modes)),
                "result": describe(result),
            }
        )
        torch.cuda.synchronize()
    return observations


def judge_losses(observations: Plain, cases: Plain) -> Verdict:
    for observed, case in zip(observations, cases, strict=True):
        result, mean = observed["result"], sum(4 * value**2 for value, _ in case) / len(case)
        if observed["waited"]:
            return not_yet(
                "your function waited: when it returned, the GPU had finished all earlier work. "
                "Which line needs a value from the GPU, or copies from pageable memory?"
            )
        if result["type"] != "Tensor":
            return not_yet(
                f"expected a tensor on the GPU, and your function returned {result['type']}. "
                "You need not know the tensor's value to return it."
            )
        if not result["device"].startswith("cuda") or result["shape"] not in ([], [1]):
            return not_yet(
                f"expected a tensor with one number on the GPU, got one on {result['device']} "
                f"with shape {result['shape']}."
            )
        if not abs(result["values"][0] - mean) <= 1e-3 * mean:
            return not_yet(
                f"the mean of the {len(case)} losses is {mean:.5g}. "
                f"Your result is {result['values'][0]:.5g}."
            )
        if observed["modes"] != [observed["training"]]:
            mode = "training" if observed["training"] else "evaluation"
            return not_yet(
                f"the model was in {mode} mode, and your function ran it in another mode. "
                "Do not change the mode. With dropout, for example, the loss would differ."
            )
        if observed["graph"]:
            return not_yet(
                "your result requires a gradient. Its graph keeps activations in memory."
            )
        if observed["backward"]:
            return not_yet(
                "after your function, the model's weight has a gradient. "
                "The next training step would add to it."
            )
    return right("The host never waited. Only the line that prints the loss will wait, once.")


# 02.3: values on the host, without waiting for what comes later


def draw_values(generator: random.Random) -> Plain:
    """Draw rows of float32 for the default stream, and rows of int32 for another stream."""
    cases = []
    for aside, dtype in ((False, "torch.float32"), (True, "torch.int32")):
        row_values = [generator.randint(1, 99) for _ in range(generator.randint(4, 6))]
        cases.append({"rows": row_values, "aside": aside, "dtype": dtype})
    return cases


STALE = -2  # what the tensor has before its values. No row has this number.


def observe_values(fetch: Any, cases: Plain) -> Plain:
    """Return the values that the answer fetched from the GPU.

    Also return whether the host waited for earlier or for later work.
    """
    observations = []
    for case in cases:
        if case["aside"]:
            here = torch.cuda.Stream()
        else:
            here = torch.cuda.current_stream()
        # The pauses differ, so that no fixed pause in an answer suits both cases.
        nap = cycles_in(LONG * (2 if case["aside"] else 0.5))
        shape = [len(case["rows"]), SIZE]
        dtype = getattr(torch, case["dtype"].removeprefix("torch."))
        with without_race_warnings(here), during(f"a tensor of shape {shape}"):
            x = torch.zeros(shape, dtype=dtype, device="cuda")
            target = torch.tensor([float(value) for value in case["rows"]], device="cuda")[:, None]
            for cycles in (1, nap):
                x.zero_()
                before = fetch(x)
                torch.cuda.synchronize()
                x.fill_(STALE)  # a copy that does not wait for the caller's stream reads this
                torch.cuda.synchronize()
                torch.cuda._sleep(cycles)
                x.copy_(target.expand_as(x))
            earlier = here.record_event()
            get = fetch(x)
            observed: dict[str, Plain] = {"waited": earlier.query(), "type": type(get).__name__}
            if callable(get):
                x.fill_(-1)  # No row has this number. A late copy reads it.
                torch.cuda._sleep(2 * nap)
                later = here.record_event()
                got = get()
                observed["too long"] = later.query()
                observed["type"] = f"a function that returns {type(got).__name__}"
                if isinstance(got, torch.Tensor):
                    observed["device"], observed["dtype"] = str(got.device), str(got.dtype)
                    observed["shape"] = list(got.shape)
                    observed["values"] = _last_of_each_row(got)
                    # This tensor had only zeros when it was fetched.
                    observed["before"] = bool(before().any())
            torch.cuda.synchronize()
            observations.append(observed)
    return observations


def _last_of_each_row(got: torch.Tensor) -> Plain:
    if got.dim() == 0:
        return [got.item()]
    return got.detach().cpu().reshape(len(got), -1)[:, -1].tolist()


def judge_values(observations: Plain, cases: Plain) -> Verdict:
    for observed, case in zip(observations, cases, strict=True):
        if observed["waited"]:
            return not_yet(
                "fetch itself waited: when it returned, the GPU had finished all earlier work. "
                "Which copies return at once?"
            )
        if "values" not in observed:
            return not_yet(
                "expected fetch to return a function that returns the tensor. "
                f"It returned {observed['type']}."
            )
        shape = [len(case["rows"]), SIZE]
        expected = f"a tensor on cpu of {case['dtype']} with shape {shape}"
        device, dtype = observed["device"], observed["dtype"]
        got = f"a tensor on {device} of {dtype} with shape {observed['shape']}"
        if got != expected:
            return not_yet(f"expected {expected}, got {got}.")
        if -1 in observed["values"]:
            return not_yet(
                "your copy has numbers that the caller wrote to `x` after fetch had returned. "
                "Later work on the caller's stream must not come before the copy."
            )
        if STALE in observed["values"]:
            return not_yet(
                "your copy read the tensor before the caller's stream had written its values. "
                "Which stream made the copy, and does it wait for the caller's stream?"
            )
        if observed["values"] != [float(value) for value in case["rows"]]:
            return not_yet(
                f"the rows are full of {case['rows']}, and the host read {observed['values']}. "
                "Had the copy arrived?"
            )
        if observed["too long"]:
            return not_yet(
                "the values are right, but the host also waited for work that was launched after "
                "the copy. Wait for less."
            )
        if observed["before"]:
            return not_yet(
                "the tensor that was fetched first changed when the next one was fetched. "
                "Each result needs its own memory."
            )
    return right("The host waited for the copy, and for nothing after it.")


# 02.4: work on another stream, in order


def draw_work(generator: random.Random) -> Plain:
    """Draw two cases of work: the caller uses the default stream, or another stream."""
    return [
        {"value": generator.randint(1, 9), "factor": generator.randint(2, 9), "aside": aside}
        for aside in (False, True)
    ]


def observe_work(run_on: Any, cases: Plain) -> Plain:
    """Return for each case where the work ran, whether the host waited, and the result's sum.

    The caller uses the result at once and then deletes it.
    """
    observations, nap = list[Plain](), cycles_in(LONG / 5)
    for case in cases:
        stream = torch.cuda.Stream()
        if case["aside"]:
            here = torch.cuda.Stream()
        else:
            here = torch.cuda.current_stream()
        seen: list[Plain] = []

        def work(
            x: torch.Tensor,
            case: Plain = case,
            seen: list = seen,
            stream: torch.cuda.Stream = stream,
        ) -> torch.Tensor:
            seen.append(torch.cuda.current_stream() == stream)
            torch.cuda._sleep(2 * nap)  # the caller reads after one nap
            return x * case["factor"]

        with without_race_warnings(here):
            held, x = torch.cuda.memory_allocated(), torch.zeros(SIZE, device="cuda")
            with during("work that multiplies"):
                run_on(stream, work, x)
                torch.cuda.set_stream(here)
                seen.clear()
                torch.cuda.synchronize()
                # The pause is longer than the work's own pause. Otherwise the work would read the
                # value in time, even without an order.
                torch.cuda._sleep(3 * nap)
                x.fill_(float(case["value"]))
                earlier = here.record_event()
                y = run_on(stream, work, x)
            observed = {"type": type(y).__name__, "seen": list(seen), "waited": earlier.query()}
            observed["sum"] = None
            observed["left"] = torch.cuda.current_stream() != here
            torch.cuda.set_stream(here)
            if isinstance(y, torch.Tensor):
                torch.cuda._sleep(nap)
                total = y.sum()
                del y
                with torch.cuda.stream(stream):  # write to all memory that is free for this stream
                    taken = [torch.full((SIZE,), -1.0, device="cuda") for _ in range(4)]
                torch.cuda.synchronize()
                observed["sum"] = total.item()
                del taken, x
                torch.cuda.empty_cache()  # also frees blocks that waited for an event
                observed["kept"] = torch.cuda.memory_allocated() - held >= 4 * SIZE
            observations.append(observed)
    return observations


def judge_work(observations: Plain, cases: Plain) -> Verdict:
    for observed, case in zip(observations, cases, strict=True):
        expected = case["value"] * case["factor"] * SIZE
        if observed["seen"] != [True]:
            where = "was called on another stream"
            if len(observed["seen"]) != 1:
                where = f"ran {plural(len(observed['seen']), 'time')}"
            return not_yet(
                f"expected work to run once, on `stream`. It {where}. "
                "`with torch.cuda.stream(stream):` makes `stream` the current stream."
            )
        if observed["sum"] is None:
            return wrong_type(observed["type"], "work's result")
        if observed["left"]:
            return not_yet(
                "when your function returned, the caller's stream was no longer the current one."
            )
        if observed["waited"]:
            return not_yet(
                "the host waited: when your function returned, the caller's earlier work had "
                "finished. Let the streams wait for each other."
            )
        if observed["sum"] == -SIZE:
            return not_yet(
                "the memory of the result was overwritten before the caller's stream had read it. "
                "Does the allocator know that the caller's stream reads the result?"
            )
        if abs(observed["sum"] - case["value"] * SIZE) <= 1e-3 * expected:
            return not_yet("the sum of the result is that of `x`. Return what `work(x)` returned.")
        if not abs(observed["sum"] - expected) <= 1e-3 * expected:
            return not_yet(
                f"expected {expected} as the sum of the result, got {observed['sum']:g}. "
                "Work read numbers that were not there yet. Which stream waits for which?"
            )
        if observed["kept"]:
            return not_yet(
                "the caller deleted the result, but its memory was not freed. "
                "What else holds the result?"
            )
    return right("The streams wait for each other. The host waits for neither.")


# 02.5: a loader that copies ahead

COPY = 0.7e-3  # approximate seconds for the copy of a batch
REACHED = 0.6  # share of the copies that must be hidden. One copy in eight never can.
BATCHES = 8
AHEAD = 2  # how many batches may be taken beyond the one in use
HELD = 0.6  # share of a copy's time that the loader may keep the host for each batch


def draw_batches(generator: random.Random) -> Plain:
    """Draw the value of each batch, and the ratio of its work's time to its copy's time."""
    return {
        "values": generator.sample(range(1, 100), k=BATCHES),
        "longer": generator.uniform(1.5, 2.5),
    }


def observe_batches(prefetched: Any, inputs: Plain) -> Plain:
    """Observe a loader of batches in several rounds, of which the best one counts.

    Return what each batch's work read, the times, and what the loader took, kept and awaited. In
    the first round the GPU is busy and allocates memory, which is left full of zeros. Each later
    round leaves values of another sign than the round before. The best round counts, because a real
    GPU's host is sometimes late.
    """
    size = _numbers_copied_in(COPY)
    other, *hosts = [torch.ones(size).pin_memory() for _ in range(BATCHES + 1)]
    scratch = torch.empty(size, device="cuda")
    copying = BATCHES * _copy_seconds(scratch, hosts[0])
    cycles = cycles_in(inputs["longer"] * copying / BATCHES)
    busy, seen, took = cycles_in(LONG), dict[str, Plain](), list[tuple[float, float]]()

    def work(batch: torch.Tensor) -> torch.Tensor:
        # Read before the sleep. Otherwise even a copy without an order would arrive in time.
        mean = batch.sum() / batch.numel()
        torch.cuda._sleep(cycles)
        return mean

    working = BATCHES * min(gpu_seconds(lambda: work(scratch)) for _ in range(3))
    with without_race_warnings(torch.cuda.Stream()):
        here, moved = torch.cuda.current_stream(), False
        for sign in _signs_of_rounds():
            for host, value in zip(hosts, inputs["values"], strict=True):
                host.fill_(float(sign * value))
            torch.cuda.synchronize()
            turn_streams()
            torch.cuda._sleep(1 if sign else busy)
            earlier = torch.cuda.current_stream().record_event()
            start = machine.host_time()
            means: list[torch.Tensor] = []
            devices, ahead, held, used, kept = [], 0, [], [], 0
            source = iter(hosts)
            loader = iter(prefetched(source))
            while len(means) <= BATCHES:  # Ask for one batch too many, in case there is no end.
                asked = machine.host_time()
                batch = next(loader, None)
                held.append(machine.host_time() - asked)
                if batch is None:
                    break
                ahead = max(ahead, BATCHES - length_hint(source) - len(means) - 1)
                if not isinstance(batch, torch.Tensor):
                    return {"type": type(batch).__name__}
                moved = moved or torch.cuda.current_stream() != here
                devices.append(str(batch.device))
                means.append(work(batch))
                used.append(weakref.ref(batch))
                del batch
                gc.collect(0)
                kept = max(kept, len({id(there()) for there in used} - {id(None)}))
            if not sign:
                turn_streams()
                seen["alone"] = len(list(islice(prefetched(iter([other])), 2)))
                seen["waited"] = earlier.query()
                seen["reused"] = [index for index, mean in enumerate(means) if mean.item() != 0]
            torch.cuda.synchronize()
            took.append((machine.host_time() - start, statistics.median(held)))
            read = [sign * mean.item() for mean in means]
            if sign and _wrong(read, inputs["values"]):
                break  # A later round might hide the wrong values.
        tries = 1 if machine.in_use().virtual else 5
        first = min(_seconds_before_the_first(prefetched, hosts) for _ in range(tries))
    try:
        seen["none"] = len(list(islice(prefetched(iter([])), 1)))
    except Exception as error:
        seen["none"] = quote(error, prefetched)
    both, held_seconds = min(took[1:])
    seconds = {"copies": copying, "work": working, "both": both, "held": held_seconds}
    seconds["first"] = first
    loaded = {"means": read, "devices": devices, "ahead": ahead, "kept": kept, "moved": moved}
    return {**loaded, "seconds": seconds, **seen}


def _signs_of_rounds() -> tuple[int, ...]:
    """Return the sign of the values in each round. The first round has zeros."""
    if machine.in_use().virtual:
        return 0, 1
    return 0, 1, -1, 1, -1, 1


def _numbers_copied_in(seconds: float) -> int:
    """Return how many float32 values can be copied from pinned memory in these seconds."""
    host, device = torch.zeros(SIZE).pin_memory(), torch.empty(SIZE, device="cuda")
    return round(SIZE * seconds / _copy_seconds(device, host))


def _copy_seconds(device: torch.Tensor, host: torch.Tensor) -> float:
    """Return the seconds of the fastest of five copies."""
    return min(gpu_seconds(lambda: device.copy_(host, non_blocking=True)) for _ in range(5))


def _seconds_before_the_first(prefetched: Any, hosts: Sequence[torch.Tensor]) -> float:
    """Return the seconds from the start until work on the first batch can begin."""
    begin, begun = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    turn_streams()
    begin.record()
    loader = iter(prefetched(iter(hosts)))
    next(loader, None)
    begun.record()
    for _ in islice(loader, len(hosts)):
        pass
    torch.cuda.synchronize()
    return begin.elapsed_time(begun) / 1e3


def _wrong(means: Sequence[float], values: Sequence[float]) -> list[int]:
    """Return the indices of the batches whose work read wrong values.

    `means` are the means that the work read, and `values` the right ones.
    """
    wrong = []
    for index, (mean, value) in enumerate(zip(means, values, strict=False)):
        if not abs(mean - value) <= 1e-3 * value:
            wrong.append(index)
    return wrong


def judge_batches(observed: Plain, inputs: Plain) -> Verdict:
    if "type" in observed:
        return not_yet(f"expected a tensor, and your loader yielded {observed['type']}.")
    expected = [float(value) for value in inputs["values"]]
    count = len(observed["means"])
    if count > len(expected):
        return not_yet(
            f"there are {len(expected)} batches, and your loader gave {count} or more. Does it end?"
        )
    if count < len(expected):
        return not_yet(
            f"there are {len(expected)} batches, and your loader gave {count}. "
            "Does your loader yield the first and the last batch?"
        )
    if any(not device.startswith("cuda") for device in observed["devices"]):
        return not_yet(f"expected batches on the GPU, got one on {min(observed['devices'])}.")
    if observed["moved"]:
        return not_yet(
            "when your loader yielded a batch, the current stream was not the stream of the loop. "
            "The loop would launch its work there. Yield outside of `with torch.cuda.stream(…)`."
        )
    wrong = _wrong(observed["means"], expected) or observed["reused"]
    if wrong:
        read = observed["means"][wrong[0]]
        other = "values of no batch"
        if any(abs(read - value) <= 1e-3 * value for value in expected):
            other = "values of another batch"
        return not_yet(
            f"the work on batch {wrong[0]} read {other}. Does the work wait for the copy? "
            "And does the allocator know which stream reads the batch?"
        )
    if observed["ahead"] > AHEAD:
        return not_yet(
            f"your loader took {observed['ahead']} batches that the loop had not asked for. "
            "A large data set would not fit on the GPU. Copy one ahead."
        )
    if observed["kept"] > AHEAD + 1:  # such as three buffers that are used in turn
        return not_yet(
            f"your loader still held {observed['kept']} batches that the loop had finished with. "
            "With `record_stream` the allocator keeps their memory as long as it is read."
        )
    return _judge_overlap(observed)


def _judge_overlap(observed: Plain) -> Verdict:
    """Judge how much of the copying a loader with the right values hides, and who waits."""
    seconds = observed["seconds"]
    copies, works, both, held = (seconds[name] for name in ("copies", "work", "both", "held"))
    share = (copies + works - both) / min(copies, works)
    if not share >= REACHED:
        return not_yet(
            f"the copies take {copies * 1e3:.3g} ms, the work takes {works * 1e3:.3g} ms, and both "
            f"take {both * 1e3:.3g} ms with your loader. "
            f"So {max(0.0, share):.0%} of the copying is hidden. Expected {REACHED:.0%}."
        )
    if not observed["seconds"]["first"] <= 1.5 * copies / BATCHES:
        return not_yet(
            "the work on the first batch began only after the second batch had been copied. "
            "The work on a batch should wait for the copy of this batch, and for no later copy."
        )
    if observed["waited"]:
        return not_yet(
            "the host waited in your loader: when it ended, the GPU had finished the work that was "
            "launched before."
        )
    if not held <= HELD * copies / BATCHES:
        return not_yet(
            f"a copy takes {copies / BATCHES * 1e3:.3g} ms, and the host spends "
            f"{held * 1e3:.3g} ms per batch in your loader, so it waits there. "
            "Let the streams wait for each other."
        )
    if (observed["alone"], observed["none"]) != (1, 0):
        return not_yet(
            f"for one batch your loader gave {observed['alone']}, and for none it gave "
            f"{observed['none']}. `batches` may be empty."
        )
    return right(f"{min(1.0, share):.0%} of the copying is hidden behind the work.")


CHECKS = [
    Check(
        "02.1", draw_durations, observe_durations, judge_durations, section="What a clock measures"
    ),
    Check(
        "02.2",
        draw_losses,
        observe_losses,
        judge_losses,
        script=mean_loss,
        section="What waiting costs",
    ),
    Check("02.3", draw_values, observe_values, judge_values, section="Copies and the host"),
    Check("02.4", draw_work, observe_work, judge_work, section="Memory that is used again"),
    Check("02.5", draw_batches, observe_batches, judge_batches, section="Copies beside products"),
]
