"""Checks of lesson 02, streams and synchronization.

Each keeps the GPU busy with `torch.cuda._sleep`, which does nothing for so many cycles, before the work that an answer must wait for.
So an answer that forgets an order reads old values on a real GPU too. Whether it waited is asked of an event that was recorded before.
An answer is called once before: kernels that are loaded and memory that is taken for the first time make the host wait too.
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

from gpulessons.lesson_02.gpu_seconds import cycles_in, gpu_seconds, told_by_values, turn_streams
from labkit import machine
from labkit.checks.checking import Check, Plain, Verdict, describe, during, not_yet, one_number, plural, quote, right, wrong_type

LONG = 0.1  # seconds: longer than the host needs for anything that a check asks
SIZE = 1 << 20  # numbers in a tensor whose copy takes a while


# 02.1: how long work takes on the GPU

CLOSE = 0.15  # the share within which a measurement is right
OVERHEAD = 0.5e-3  # seconds that launching and waiting may add


def draw_durations(generator: random.Random) -> Plain:
    """Milliseconds of the pieces of each work, of which two are short, and of what is queued already when it begins; on which stream."""
    kinds = ((1, 4, 0.0), (1, 4, generator.uniform(20, 40)), (3, 20, 0.0), (2, 20, generator.uniform(10, 30)))
    return [
        {"pieces": [generator.uniform(2, most) for _ in range(pieces)], "queued": queued, "aside": pieces > 1}
        for pieces, most, queued in generator.sample(kinds, k=4)
    ]


def observe_durations(seconds_of: Any, cases: Plain) -> Plain:
    """Return for each work the answer's seconds, those of two events, and how often the answer ran it."""
    rate, observations = cycles_in(1.0), []
    seconds_of(lambda: torch.cuda._sleep(1))
    for case in cases:
        cycles = [round(rate * milliseconds / 1e3) for milliseconds in case["pieces"]]

        calls: list[int] = []

        def work(cycles: list[int] = cycles, calls: list[int] = calls) -> None:
            calls.append(1)
            for count in cycles:
                torch.cuda._sleep(count)

        with told_by_values(torch.cuda.Stream() if case["aside"] else None), during(f"work of {sum(case['pieces']):.1f} ms"):
            torch.cuda._sleep(round(rate * case["queued"] / 1e3) + 1)
            said = seconds_of(work)
        ran, seconds = len(calls), one_number(said)
        told = type(said).__name__ if seconds is None else seconds
        observations.append([told, gpu_seconds(work), ran])
    return observations


def judge_durations(observations: Plain, cases: Plain) -> Verdict:
    for (said, due, ran), case in zip(observations, cases, strict=True):
        if isinstance(said, str):
            return wrong_type(said, "a number of seconds")
        if not abs(said - due) <= CLOSE * due + OVERHEAD:  # so that nan fails, here and below
            asked = "Did the GPU have time to finish, and do you read a clock that knows it, labkit.host_time() or events?"
            asked = "Is what was queued before part of it?" if case["queued"] and said > due else asked
            asked = "Seconds are asked for." if abs(said / 1e3 - due) <= CLOSE * due + OVERHEAD else asked
            return not_yet(f"for work of {due * 1e3:.1f} ms you measured {said * 1e3:.4g} ms. {asked}")
        if ran != 1:
            return not_yet(
                f"your function called work {plural(ran, 'time')}. Call it once: "
                "a training step, say, would change the model a second time."
            )
    if all(abs(said * 1e3 - round(said * 1e3)) < 1e-6 for said, *_ in observations):
        return not_yet("all your figures are whole milliseconds. The GPU's clock is finer than that.")
    return right("You measured this work, all of it, and nothing that was queued before it.")


# 02.2: a loop that does not wait


def mean_loss(model, batches):  # what the exercise hands out; without types, as in a notebook
    """Return the mean of the losses of all batches."""
    total = 0.0
    for batch in batches:
        loss = model(batch).square().mean()
        total += loss.item()
    return total / len(batches)


def draw_losses(generator: random.Random) -> Plain:
    """For each batch its value and its rows: a few batches, and so many that an answer comes to its hundredth step."""
    counts = [generator.randint(2, 8), generator.randint(101, 109)]
    drawn = [[[generator.randint(1, 8), generator.randint(1, 9)] for _ in range(count)] for count in counts]
    return [[*case[:-1], [9, 400]] for case in drawn]  # the last is not the mean, and by rows it nearly is


class Double(torch.nn.Module):
    """Double the batch. `modes` notes for each call whether the model was in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(2.0, device="cuda"))
        self.modes: list[bool] = []

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.modes.append(self.training)
        return self.weight * batch


def observe_losses(answer: Any, cases: Plain) -> Plain:
    """Return for each list of values the result and what else happened.

    The model is in training mode for the first list and in evaluation mode for the second.
    """
    observations, sleep, model = list[Plain](), cycles_in(LONG), Double()
    for training, case in zip((True, False), cases, strict=True):
        model.train(training).modes.clear()
        batches = [torch.tensor([[value, value, -value, value]] * rows, dtype=torch.float32, device="cuda") for value, rows in case]
        with during(f"{len(case)} batches"):
            answer(model, batches)
            torch.empty(SIZE * 8, device="cuda")  # a segment of its own, which is free now: returning it waits
            torch.cuda.synchronize()
            torch.cuda._sleep(sleep)
            earlier = torch.cuda.current_stream().record_event()
            result = answer(model, batches)
        told = {"waited": earlier.query(), "graph": getattr(result, "requires_grad", False), "backward": model.weight.grad is not None}
        told |= {"training": training, "modes": sorted(set(model.modes))}
        observations.append(told | {"result": describe(result)})
        torch.cuda.synchronize()
    return observations


def judge_losses(observations: Plain, cases: Plain) -> Verdict:
    for observed, case in zip(observations, cases, strict=True):
        result, due = observed["result"], sum(4 * value**2 for value, _ in case) / len(case)
        if observed["waited"]:
            return not_yet(
                "when your function returned, all that was launched before it was done: somewhere it waited. "
                "Which line needs a value from the GPU, or copies one from the host's pageable memory?"
            )
        if result["type"] != "Tensor":
            return not_yet(f"your function returned {result['type']}. A tensor on the GPU can be returned before its value is known.")
        if not result["device"].startswith("cuda") or result["shape"] not in ([], [1]):
            return not_yet(f"expected one number on the GPU. Yours is on {result['device']}, of shape {result['shape']}.")
        if not abs(result["values"][0] - due) <= 1e-3 * due:
            return not_yet(f"the mean of {len(case)} losses is {due:.5g}; yours is {result['values'][0]:.5g}.")
        if observed["modes"] != [observed["training"]]:
            mode = "training" if observed["training"] else "evaluation"
            return not_yet(
                f"the model was in {mode} mode, and your function ran it in another mode. "
                "Leave the mode alone: dropout, for example, would give another loss."
            )
        if observed["graph"]:
            return not_yet("your result requires a gradient: its graph keeps what every batch left for the backward pass.")
        if observed["backward"]:
            return not_yet("after your function the model's weight has a gradient, to which the next training would add.")
    return right("The host ran ahead; whoever prints the loss waits, once.")


# 02.3: values on the host, without waiting for what comes later


def draw_values(generator: random.Random) -> Plain:
    """Numbers with a point on the caller's default stream, whole ones on another."""
    rows = [[generator.randint(1, 99) for _ in range(generator.randint(4, 6))] for _ in range(2)]
    return [{"rows": rows[aside], "aside": aside, "dtype": f"torch.{('float32', 'int32')[aside]}"} for aside in (False, True)]


STALE = -2  # in the tensor before its values; no row has it


def observe_values(fetch: Any, cases: Plain) -> Plain:
    """Whether `fetch` waited for earlier work, and the function that it returned for later work, and what that gave."""
    observations = []
    for case in cases:
        here = torch.cuda.Stream() if case["aside"] else torch.cuda.current_stream()
        nap = cycles_in(LONG * (2 if case["aside"] else 0.5))  # no fixed pause is long enough for both, and not too long
        with told_by_values(here), during(f"a tensor of shape {[len(case['rows']), SIZE]}"):
            x = torch.zeros(len(case["rows"]), SIZE, dtype=getattr(torch, case["dtype"].split(".")[1]), device="cuda")
            target = torch.tensor([float(value) for value in case["rows"]], device="cuda")[:, None]
            for cycles in (1, nap):
                x.zero_()
                before = fetch(x)
                torch.cuda.synchronize()
                x.fill_(STALE)  # what a copy reads that does not wait for the caller's stream
                torch.cuda.synchronize()
                torch.cuda._sleep(cycles)
                x.copy_(target.expand_as(x))
            earlier = here.record_event()
            get = fetch(x)
            observed: dict[str, Plain] = {"waited": earlier.query(), "type": type(get).__name__}
            if callable(get):
                x.fill_(-1)  # no row has it; at once, while a copy that nothing holds back is still under way
                torch.cuda._sleep(2 * nap)
                later = here.record_event()
                got = get()
                observed |= {"too long": later.query(), "type": f"one that returns {type(got).__name__}"}
                if isinstance(got, torch.Tensor):
                    observed |= {"device": str(got.device), "dtype": str(got.dtype), "shape": list(got.shape)}
                    observed["values"] = got.detach().cpu().reshape(len(got), -1)[:, -1].tolist() if got.dim() else [got.item()]
                    observed["before"] = bool(before().any())  # of the zeros that were fetched first
            torch.cuda.synchronize()
            observations.append(observed)
    return observations


def judge_values(observations: Plain, cases: Plain) -> Verdict:
    for observed, case in zip(observations, cases, strict=True):
        if observed["waited"]:
            return not_yet("when fetch returned, all that was launched before it was done: fetch itself waited. Which copies let it go on?")
        if "values" not in observed:
            return not_yet(f"expected fetch to return a function that returns the tensor. It returned {observed['type']}.")
        if (own := [observed[name] for name in ("device", "dtype", "shape")]) != (due := ["cpu", case["dtype"], [len(case["rows"]), SIZE]]):
            return not_yet("the values belong on {}, of {} and shape {}; yours are on {}, of {} and shape {}.".format(*due, *own))
        if -1 in observed["values"]:
            return not_yet("your copy read what the caller wrote to its tensor after fetch had returned. Who waits for the copy?")
        if STALE in observed["values"]:
            return not_yet(
                "your copy read the tensor before the caller's stream had written its values. "
                "Which stream made the copy, and does it wait for the caller's stream?"
            )
        if observed["values"] != [float(value) for value in case["rows"]]:
            return not_yet(f"the rows are {case['rows']}; the host read {observed['values']}. Had the copy arrived?")
        if observed["too long"]:
            return not_yet("the values were right, but the host waited for work that was launched after the copy. Wait for less.")
        if observed["before"]:
            return not_yet("what was fetched before changed when the next tensor was fetched: each needs memory of its own.")
    return right("The host waited for the copy, and for nothing after it.")


# 02.4: work on another stream, in order


def draw_work(generator: random.Random) -> Plain:
    """Once on the caller's default stream, once on another."""
    return [{"value": generator.randint(1, 9), "factor": generator.randint(2, 9), "aside": aside} for aside in (False, True)]


def observe_work(run_on: Any, cases: Plain) -> Plain:
    """For each case where the work ran, whether the host waited, and the sum of the result, which is used at once and then let go of."""
    observations, nap = list[Plain](), cycles_in(LONG / 5)
    for case in cases:
        stream, here = torch.cuda.Stream(), torch.cuda.Stream() if case["aside"] else torch.cuda.current_stream()
        seen: list[Plain] = []

        def work(x: torch.Tensor, case: Plain = case, seen: list = seen, stream: torch.cuda.Stream = stream) -> torch.Tensor:
            seen.append(torch.cuda.current_stream() == stream)
            torch.cuda._sleep(2 * nap)  # the caller reads after one nap
            return x * case["factor"]

        with told_by_values(here):
            held, x = torch.cuda.memory_allocated(), torch.zeros(SIZE, device="cuda")
            with during("work that multiplies"):
                run_on(stream, work, x)
                torch.cuda.set_stream(here)
                seen.clear()
                torch.cuda.synchronize()
                torch.cuda._sleep(3 * nap)  # longer than the work's own nap, or it would read the value in time without an order
                x.fill_(float(case["value"]))
                earlier = here.record_event()
                y = run_on(stream, work, x)
            observed = {"type": type(y).__name__, "seen": list(seen), "waited": earlier.query(), "sum": None}
            observed["left"] = torch.cuda.current_stream() != here
            torch.cuda.set_stream(here)
            if isinstance(y, torch.Tensor):
                torch.cuda._sleep(nap)
                total = y.sum()
                del y
                with torch.cuda.stream(stream):  # what is free for this stream is taken and written to at once
                    taken = [torch.full((SIZE,), -1.0, device="cuda") for _ in range(4)]
                torch.cuda.synchronize()
                observed["sum"] = total.item()
                del taken, x
                torch.cuda.empty_cache()  # what waited for an event is free, too
                observed["kept"] = torch.cuda.memory_allocated() - held >= 4 * SIZE
            observations.append(observed)
    return observations


def judge_work(observations: Plain, cases: Plain) -> Verdict:
    for observed, case in zip(observations, cases, strict=True):
        due = case["value"] * case["factor"] * SIZE
        if observed["seen"] != [True]:
            where = f"ran {plural(len(observed['seen']), 'time')}" if len(observed["seen"]) != 1 else "was called on another stream"
            return not_yet(
                f"expected work to run once, on `stream`; it {where}. `with torch.cuda.stream(stream):` makes it the current stream."
            )
        if observed["sum"] is None:
            return wrong_type(observed["type"], "work's result")
        if observed["left"]:
            return not_yet("the caller's stream was no longer the current one when your function returned.")
        if observed["waited"]:
            return not_yet("when your function returned, its caller's work was done: the host waited. Let streams wait for streams.")
        if observed["sum"] == -SIZE:
            return not_yet("the result was overwritten while the caller's stream still read it. Who tells the allocator?")
        if not abs(observed["sum"] - due) <= 1e-3 * due:
            return not_yet(
                f"the result adds up to {observed['sum']:g}, not to {due}: somebody read what was not there yet. "
                "Does `stream` wait for the caller's stream, and that one for `stream`?"
            )
        if observed["kept"]:
            return not_yet("the caller deleted the result, and its memory was not free afterwards. Who else holds it?")
    return right("The streams wait for each other, the host for neither.")


# 02.5: a loader that copies ahead

COPY = 0.7e-3  # seconds that the copy of a batch takes about
REACHED = 0.6  # of what can be hidden; one copy in eight never can
BATCHES, AHEAD = 8, 2  # how many there are, and how many may be drawn beyond the one in use
HELD = 0.6  # of a copy's time that the loader may keep the host for a batch


def draw_batches(generator: random.Random) -> Plain:
    """The value that each batch is full of, and how much longer its work takes than its copy."""
    return {"values": generator.sample(range(1, 100), k=BATCHES), "longer": generator.uniform(1.5, 2.5)}


def observe_batches(prefetched: Any, inputs: Plain) -> Plain:
    """What each batch's work read, what the loader drew, held and waited for, and the seconds of copies, of work and of both."""
    host, scratch = torch.zeros(SIZE).pin_memory(), torch.empty(SIZE, device="cuda")
    size = round(SIZE * COPY / min(gpu_seconds(lambda: scratch.copy_(host, non_blocking=True)) for _ in range(5)))
    (other, *hosts), scratch = [torch.ones(size).pin_memory() for _ in range(BATCHES + 1)], torch.empty(size, device="cuda")
    copying = BATCHES * min(gpu_seconds(lambda: scratch.copy_(hosts[0], non_blocking=True)) for _ in range(5))
    cycles = cycles_in(inputs["longer"] * copying / BATCHES)
    busy, seen, took = cycles_in(LONG), dict[str, Plain](), list[tuple[float, float]]()

    def work(batch: torch.Tensor) -> torch.Tensor:
        mean = batch.sum() / batch.numel()  # at once: a copy that nobody waits for would be there after the sleep
        torch.cuda._sleep(cycles)
        return mean

    working = BATCHES * min(gpu_seconds(lambda: work(scratch)) for _ in range(3))
    with told_by_values(torch.cuda.Stream()):
        # The first finds the GPU busy, takes memory from it, and leaves zeros there; each of the others, values of another sign than
        # the one before. The best of them counts: a real GPU's host is at times late.
        for sign in (0, 1) if machine.in_use().virtual else (0, 1, -1, 1, -1, 1):
            for host, value in zip(hosts, inputs["values"], strict=True):
                host.fill_(float(sign * value))
            torch.cuda.synchronize()
            turn_streams()
            torch.cuda._sleep(1 if sign else busy)
            earlier = torch.cuda.current_stream().record_event()
            start = machine.host_time()
            means: list[torch.Tensor] = []
            devices, ahead, held, used, kept = [], 0, [], [], 0
            loader = iter(prefetched(source := iter(hosts)))
            while len(means) <= BATCHES:  # one more than there are: it might never end
                asked = machine.host_time()
                batch = next(loader, None)
                held.append(machine.host_time() - asked)
                if batch is None:
                    break
                ahead = max(ahead, BATCHES - length_hint(source) - len(means) - 1)
                if not isinstance(batch, torch.Tensor):
                    return {"type": type(batch).__name__}
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
                break  # or a later try might hide it
        tries = 1 if machine.in_use().virtual else 5
        first = min(_seconds_before_the_first(prefetched, hosts) for _ in range(tries))
    try:
        seen["none"] = len(list(islice(prefetched(iter([])), 1)))
    except Exception as error:
        seen["none"] = quote(error, prefetched)
    seconds = {"copies": copying, "work": working, "first": first} | dict(zip(("both", "held"), min(took[1:]), strict=True))
    return {"means": read, "devices": devices, "seconds": seconds, "ahead": ahead, "kept": kept, **seen}


def _seconds_before_the_first(prefetched: Any, hosts: Sequence[torch.Tensor]) -> float:
    """Return how long after the start work on the first batch can begin."""
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
    """Which batches' work read other values than theirs."""
    return [index for index, (mean, value) in enumerate(zip(means, values, strict=False)) if not abs(mean - value) <= 1e-3 * value]


def judge_batches(observed: Plain, inputs: Plain) -> Verdict:
    if "type" in observed:
        return not_yet(f"your loader yielded {observed['type']}. Expected a tensor.")
    due = [float(value) for value in inputs["values"]]
    if (count := len(observed["means"])) != len(due):
        given = f"{count} or more. Does it end" if count > len(due) else f"{count}. Does the last one come"
        return not_yet(f"of {len(due)} batches your loader gave {given}?")
    if any(not device.startswith("cuda") for device in observed["devices"]):
        return not_yet("a batch was not on the GPU.")
    if wrong := _wrong(observed["means"], due) or observed["reused"]:
        index = wrong[0]
        other = "another batch's" if any(abs(observed["means"][index] - value) <= 1e-3 * value for value in due) else "no batch's"
        return not_yet(
            f"the work on batch {index} read {other} values. Does its stream wait for the copy, and does the allocator know who reads?"
        )
    if observed["ahead"] > AHEAD:
        return not_yet(f"your loader drew {observed['ahead']} batches ahead: a large data set would not fit the GPU. Copy one ahead.")
    if observed["kept"] > AHEAD:
        return not_yet(f"your loader still held {observed['kept']} batches that had been used. Who else keeps memory that is being read?")
    copies, works, both, held = (observed["seconds"][name] for name in ("copies", "work", "both", "held"))
    share = (copies + works - both) / min(copies, works)
    if not share >= REACHED:
        return not_yet(
            f"copies take {copies * 1e3:.3g} ms, the work {works * 1e3:.3g} ms, both with your loader {both * 1e3:.3g} ms: "
            f"{max(0.0, share):.0%} of the copying is hidden, and {REACHED:.0%} is asked for."
        )
    if not observed["seconds"]["first"] <= 1.5 * copies / BATCHES:
        return not_yet(
            "the work on the first batch began only after the second batch had been copied. "
            "Let it wait for the copy of its own batch, and for no later copy."
        )
    if observed["waited"]:
        return not_yet("when your loader had ended, the work that was launched before it was done: the host waited in your loader.")
    if not held <= HELD * copies / BATCHES:
        return not_yet(
            f"a copy takes {copies / BATCHES * 1e3:.3g} ms, and for each batch the host spends {held * 1e3:.3g} ms in your loader: "
            "it waits there. Let streams wait for streams."
        )
    if (observed["alone"], observed["none"]) != (1, 0):
        return not_yet(f"of one batch your loader made {observed['alone']}; of none it made: {observed['none']}. `batches` may be empty.")
    return right(f"{min(1.0, share):.0%} of the copying is hidden behind the work.")


CHECKS = [
    Check("02.1", draw_durations, observe_durations, judge_durations, section="What a clock measures"),
    Check("02.2", draw_losses, observe_losses, judge_losses, script=mean_loss, section="What waiting costs"),
    Check("02.3", draw_values, observe_values, judge_values, section="The host is too early"),
    Check("02.4", draw_work, observe_work, judge_work, section="Memory that is used again"),
    Check("02.5", draw_batches, observe_batches, judge_batches, section="Copies beside products"),
]
