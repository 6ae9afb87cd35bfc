"""Checks of lesson 02, streams and synchronization.

Each keeps the GPU busy with `torch.cuda._sleep`, which does nothing for so many cycles, before the work that an answer must wait for.
So an answer that forgets an order reads old values on a real GPU too, and one that waits too long is seen to: the stream is idle then.
An answer is called once before: kernels that are loaded and memory that is taken for the first time make the host wait too.
"""

import gc
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any

import torch

from labkit import machine
from labkit.checks.checking import Check, Plain, Verdict, describe, during, not_yet, right
from virtualgpu import RaceWarning

PROBE = 10_000_000  # cycles, to learn how many there are in a second
LONG = 0.1  # seconds: longer than the host needs for anything that a check asks
SIZE = 1 << 20  # numbers in a tensor whose copy takes a while


def _cycles(seconds: float) -> int:
    """How many cycles `torch.cuda._sleep` needs for so many seconds on this GPU."""
    return round(seconds * PROBE / _gpu_seconds(lambda: torch.cuda._sleep(PROBE)))


def _gpu_seconds(work: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


@contextmanager
def _told_by_values() -> Iterator[None]:
    """A race shows in what the check observes, so nothing is printed of it; and what is under way ends with the block."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RaceWarning)
        try:
            yield
        finally:
            torch.cuda.synchronize()


# 02.1: how long work takes on the GPU

CLOSE = 0.15  # a measurement is right within this share
OVERHEAD = 0.5e-3  # seconds that launching and waiting may add


def draw_durations(generator: random.Random) -> Plain:
    """Milliseconds of the pieces of each work, and of what is queued already when it begins."""
    cases = [
        {"pieces": [generator.uniform(2, 20) for _ in range(pieces)], "queued": queued}
        for pieces, queued in ((1, 0.0), (1, generator.uniform(20, 40)), (3, 0.0), (2, generator.uniform(10, 30)))
    ]
    generator.shuffle(cases)
    return cases


def observe_durations(seconds_of: Any, cases: Plain) -> Plain:
    """What the answer says of each work, and what two events say, both in seconds."""
    rate, observations = _cycles(1.0), []
    for case in cases:
        cycles = [round(rate * milliseconds / 1e3) for milliseconds in case["pieces"]]

        def work(cycles: list[int] = cycles) -> None:
            for count in cycles:
                torch.cuda._sleep(count)

        due = _gpu_seconds(work)
        torch.cuda._sleep(round(rate * case["queued"] / 1e3) + 1)
        with during(f"work of {due * 1e3:.1f} ms"):
            said = seconds_of(work)
        torch.cuda.synchronize()
        observations.append([float(said) if isinstance(said, int | float) else type(said).__name__, due])
    return observations


def judge_durations(observations: Plain, cases: Plain) -> Verdict:
    for (said, due), case in zip(observations, cases, strict=True):
        if isinstance(said, str):
            return not_yet(f"your function returned {said}, not a number of seconds.")
        if not abs(said - due) <= CLOSE * due + OVERHEAD:  # so that nan fails, here and below
            asked = "Did the GPU have time to finish, and do you read a clock that knows it, labkit.host_time() or events?"
            asked = "Is what was queued before part of it?" if case["queued"] and said > due else asked
            asked = "Seconds are asked for." if abs(said / 1e3 - due) <= CLOSE * due + OVERHEAD else asked
            return not_yet(f"for work of {due * 1e3:.1f} ms you measured {said * 1e3:.4g} ms. {asked}")
    return right("The clock was read while the GPU had nothing else to do.")


# 02.2: a loop that does not wait


def mean_loss(model, batches):  # what the exercise hands out; without types, as in a notebook
    """The mean of the losses of all batches."""
    total = 0.0
    for batch in batches:
        loss = model(batch).square().mean()
        total += loss.item()
    return total / len(batches)


def draw_losses(generator: random.Random) -> Plain:
    return [[generator.randint(1, 9) for _ in range(count)] for count in generator.sample(range(2, 9), 2)]


def observe_losses(answer: Any, cases: Plain) -> Plain:
    """For each list of values the result, where it is, whether the GPU was busy when the function returned, and how often it asked."""
    observations = []
    sleep = _cycles(LONG)
    for values in cases:
        batches = [torch.full((8, 4), float(value), device="cuda") for value in values]
        calls: list[int] = []

        def model(batch: torch.Tensor, calls: list[int] = calls) -> torch.Tensor:
            calls.append(1)
            return 2 * batch

        with during(f"{len(values)} batches"):
            answer(model, batches)
            calls.clear()
            torch.cuda.synchronize()
            torch.cuda._sleep(sleep)
            result = answer(model, batches)
        busy = not torch.cuda.current_stream().query()
        observations.append({"result": describe(result), "busy": busy, "calls": len(calls)})
        torch.cuda.synchronize()
    return observations


def judge_losses(observations: Plain, cases: Plain) -> Verdict:
    for observed, values in zip(observations, cases, strict=True):
        result, due = observed["result"], sum(4 * value * value for value in values) / len(values)
        if not observed["busy"]:
            return not_yet("when your function returned, the GPU was done: somewhere it waited. Which line asks for a number?")
        if result["type"] != "Tensor":
            return not_yet(f"your function returned {result['type']}. A tensor on the GPU can be returned before its value is known.")
        if not result["device"].startswith("cuda") or result["shape"] not in ([], [1]):
            return not_yet(f"one number on the GPU was due; yours is on {result['device']}, of shape {result['shape']}.")
        if observed["calls"] != len(values) or not abs(result["values"][0] - due) <= 1e-3 * due:
            return not_yet(f"the mean of {len(values)} losses is {due:.5g}; yours is {result['values'][0]:.5g}.")
    return right("The host ran ahead; whoever prints the loss waits, once.")


# 02.3: work on another stream, in order


def draw_work(generator: random.Random) -> Plain:
    return [{"value": generator.randint(1, 9), "factor": generator.randint(2, 9)} for _ in range(2)]


def observe_work(run_on: Any, cases: Plain) -> Plain:
    """For each case where the work ran, whether the host waited, and the sum of the result, which is used at once and then let go of."""
    observations = []
    nap = _cycles(LONG / 4)
    with _told_by_values():
        for case in cases:
            stream = torch.cuda.Stream()
            seen: list[Plain] = []
            value, factor = float(case["value"]), case["factor"]
            x = torch.zeros(SIZE, device="cuda")

            def work(x: torch.Tensor, factor: int = factor, seen: list = seen, stream: torch.cuda.Stream = stream) -> torch.Tensor:
                seen.append(torch.cuda.current_stream() == stream)
                torch.cuda._sleep(nap)
                return x * factor

            with during("work that multiplies"):
                run_on(stream, work, x)
                seen.clear()
                torch.cuda.synchronize()
                torch.cuda._sleep(2 * nap)  # longer than the work's own nap, or it would read the value in time without an order
                x.fill_(value)
                y = run_on(stream, work, x)
            busy = not torch.cuda.current_stream().query()
            observed = {"type": type(y).__name__, "seen": list(seen), "busy": busy, "sum": None}
            if isinstance(y, torch.Tensor):
                torch.cuda._sleep(nap)
                total = y.sum()
                del y
                with torch.cuda.stream(stream):  # what is free for this stream is taken and written to at once
                    taken = torch.full((SIZE,), -1.0, device="cuda")
                torch.cuda.synchronize()
                observed["sum"] = total.item()
                del taken
            observations.append(observed)
    return observations


def judge_work(observations: Plain, cases: Plain) -> Verdict:
    for observed, case in zip(observations, cases, strict=True):
        due = case["value"] * case["factor"] * SIZE
        if observed["seen"] != [True]:
            where = "was not called once" if len(observed["seen"]) != 1 else "was called on another stream"
            return not_yet(f"work {where}. `with torch.cuda.stream(stream):` makes a stream the current one.")
        if observed["sum"] is None:
            return not_yet(f"your function returned {observed['type']}, not work's result.")
        if not observed["busy"]:
            return not_yet("when your function returned, the GPU was done: the host waited. Let streams wait for streams.")
        if observed["sum"] == -SIZE:
            return not_yet("the result was overwritten while the caller's stream still read it. Who tells the allocator?")
        if not abs(observed["sum"] - due) <= 1e-3 * due:
            return not_yet(f"the result adds up to {observed['sum']:g}, not to {due}: somebody read what was not there yet.")
    return right("Two waits and a word to the allocator.")


# 02.4: values on the host, without waiting for what comes later


def draw_values(generator: random.Random) -> Plain:
    return [[generator.randint(1, 99) for _ in range(generator.randint(2, 5))] for _ in range(2)]


def observe_values(fetch: Any, cases: Plain) -> Plain:
    """Whether the GPU was busy after `fetch`, and still with later work after the function that it returned, and what that gave."""
    observations = []
    nap = _cycles(LONG)
    with _told_by_values():
        for values in cases:
            x = torch.zeros(len(values), SIZE // 4, device="cuda")
            target = torch.tensor([float(value) for value in values], device="cuda")[:, None]
            with during(f"a tensor of shape {list(x.shape)}"):
                fetch(x)
                torch.cuda.synchronize()
                torch.cuda._sleep(nap)
                x.copy_(target.expand_as(x))
                get = fetch(x)
                observed: dict[str, Plain] = {"busy": not torch.cuda.current_stream().query(), "type": type(get).__name__}
                if callable(get):
                    torch.cuda._sleep(2 * nap)
                    x.zero_()
                    got = get()
                    observed["later"] = not torch.cuda.current_stream().query()
                    observed["type"] = type(got).__name__
                    if isinstance(got, torch.Tensor):
                        observed["device"], observed["shape"] = str(got.device), list(got.shape)
                        observed["values"] = got.detach().cpu().reshape(len(got), -1)[:, -1].tolist() if got.dim() else [got.item()]
            torch.cuda.synchronize()
            observations.append(observed)
    return observations


def judge_values(observations: Plain, cases: Plain) -> Verdict:
    for observed, values in zip(observations, cases, strict=True):
        if not observed["busy"]:
            return not_yet("fetch itself waited for the GPU. Which copies let the host go on?")
        if "values" not in observed:
            return not_yet(f"fetch was to return a function that returns the tensor; you gave {observed['type']}.")
        if observed["device"] != "cpu" or observed["shape"] != [len(values), SIZE // 4]:
            return not_yet(f"the values belong on the cpu, in their own shape; yours are on {observed['device']}.")
        if observed["values"] != [float(value) for value in values]:
            return not_yet(f"the rows are {values}; the host read {observed['values']}. Had the copy arrived?")
        if not observed["later"]:
            return not_yet("the values were right, but the host waited for work that was launched after the copy. Wait for less.")
    return right("An event marks the place in the queue that you wait for.")


# 02.5: a loader that copies ahead

COPY = 16 << 20  # bytes of a batch
BATCHES = 8
REACHED = 0.6  # of what can be hidden; one copy in eight never can
AHEAD = 2  # batches that may be drawn beyond the one in use


def draw_batches(generator: random.Random) -> Plain:
    """The value that each batch is full of, and how much longer its work takes than its copy."""
    return {"values": [generator.randint(1, 99) for _ in range(BATCHES)], "longer": generator.uniform(1.5, 2.5)}


def observe_batches(prefetched: Any, inputs: Plain) -> Plain:
    """What each batch's work read, how far ahead the source was drawn, and the seconds of copies, of work, and of both together."""
    hosts = [torch.zeros(COPY // 4).pin_memory() for _ in inputs["values"]]
    scratch = torch.empty(COPY // 4, device="cuda")
    copy = partial(scratch.copy_, hosts[0], non_blocking=True)
    copying = min(_gpu_seconds(copy) for _ in range(5))
    cycles = _cycles(inputs["longer"] * copying)
    drawn: list[int] = []

    def source() -> Iterator[torch.Tensor]:
        for host in hosts:
            drawn.append(1)
            yield host

    def work(batch: torch.Tensor) -> torch.Tensor:
        mean = batch.sum() / batch.numel()  # at once: a copy that nobody waits for would be there after the sleep
        torch.cuda._sleep(cycles)
        return mean

    working = min(_gpu_seconds(partial(work, scratch)) for _ in range(3)) * BATCHES
    with _told_by_values():
        for filled in (False, True):  # the first takes memory from the device, and leaves no batch's values in it
            for host, value in zip(hosts, inputs["values"], strict=True):
                host.fill_(float(value) if filled else 0.0)
            drawn.clear()
            torch.cuda.synchronize()
            start = machine.host_time()
            means, devices, ahead = [], [], 0
            for index, batch in enumerate(islice(prefetched(source()), BATCHES + 1)):  # one more than there are: it might never end
                ahead = max(ahead, len(drawn) - index - 1)
                devices.append(str(batch.device))
                means.append(work(batch))
                del batch
                gc.collect(0)
            torch.cuda.synchronize()
            seconds = machine.host_time() - start
    return {"means": [mean.item() for mean in means], "devices": devices, "ahead": ahead, "seconds": [copying * BATCHES, working, seconds]}


def judge_batches(observed: Plain, inputs: Plain) -> Verdict:
    due = [float(value) for value in inputs["values"]]
    if len(observed["means"]) != len(due):
        count = len(observed["means"])
        given = f"{count} or more. Does it end" if count > len(due) else f"{count}. Does the last one come"
        return not_yet(f"of {len(due)} batches your loader gave {given}?")
    if any(not device.startswith("cuda") for device in observed["devices"]):
        return not_yet("a batch was not on the GPU.")
    read = enumerate(zip(observed["means"], due, strict=True))
    wrong = [index for index, (mean, value) in read if not abs(mean - value) <= 1e-3 * value]
    if wrong:
        index = wrong[0]
        other = "another batch's" if any(abs(observed["means"][index] - value) <= 1e-3 * value for value in due) else "no batch's"
        return not_yet(
            f"the work on batch {index} read {other} values. Does its stream wait for the copy, and does the allocator know who reads?"
        )
    if observed["ahead"] > AHEAD:
        return not_yet(f"your loader drew {observed['ahead']} batches ahead: a large data set would not fit the GPU. Copy one ahead.")
    copies, works, both = observed["seconds"]
    share = (copies + works - both) / min(copies, works)
    if share < REACHED:
        return not_yet(
            f"copies take {copies * 1e3:.3g} ms, the work {works * 1e3:.3g} ms, both with your loader {both * 1e3:.3g} ms: "
            f"{max(0.0, share):.0%} of the copying is hidden, and {REACHED:.0%} is asked for."
        )
    return right(f"{min(1.0, share):.0%} of the copying is hidden behind the work.")


CHECKS = [
    Check("02.1", draw_durations, observe_durations, judge_durations),
    Check("02.2", draw_losses, observe_losses, judge_losses, script=mean_loss),
    Check("02.3", draw_work, observe_work, judge_work),
    Check("02.4", draw_values, observe_values, judge_values),
    Check("02.5", draw_batches, observe_batches, judge_batches),
]
