"""Checks of lesson 08: memory that processes share, and what each process holds."""

import ctypes
import math
import os
import random
import warnings
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import torch
from torch import nn

from gpulessons.lesson_08.producer import ENDING, observe_producer
from gputrace import units
from labkit import processes
from labkit.checks.checking import (
    Check,
    Plain,
    Verdict,
    describe,
    during,
    not_yet,
    number_or_type,
    right,
    wrong_type,
)
from labkit.checks.comparing import sizes_alike

DEVICE = "cuda:0"
MIB = 1 << 20


# 08.1: make a copy that other processes can use

DTYPES = ("float64", "int32", "float16")
KINDS = ("whole", "transposed", "rows")


def draw_tensors(generator: random.Random) -> Plain:
    """Draw three matrices that are not square: whole, transposed, and a part of a larger one.

    Each has its own dtype.
    """
    rows, columns = generator.sample(range(2, 7), k=2)
    kinds, dtypes = generator.sample(KINDS, k=3), generator.sample(DTYPES, k=3)
    return [
        {"dtype": dtype, "kind": kind, "rows": rows, "columns": columns}
        for kind, dtype in zip(kinds, dtypes, strict=True)
    ]


def matrix(case: Plain) -> torch.Tensor:
    """Return the drawn matrix of a case."""
    rows, columns = case["rows"], case["columns"]
    whole = torch.arange(rows * columns).to(getattr(torch, case["dtype"])).reshape(rows, columns)
    if case["kind"] == "transposed":
        return whole.t()
    if case["kind"] == "rows":
        return whole[1:]
    return whole


def observe_copies(shared_copy: Any, cases: Plain) -> Plain:
    """Return for each matrix the copy, and whether other processes share copy and matrix."""
    found = []
    for case in cases:
        x = matrix(case)
        with during(f"a {case['kind']} matrix of {x.dtype}"):
            answer = shared_copy(x)
        told = {"answer": describe(answer), "private": not _seen_from_fork(x)}
        told["unchanged"] = describe(x) == describe(matrix(case))
        if told["answer"] == describe(matrix(case)):
            told["shared"] = _seen_from_fork(answer)
        found.append(told)
    return found


def _seen_from_fork(tensor: torch.Tensor) -> bool:
    """Return whether this process sees what a forked child writes into the tensor."""
    first = ctypes.c_uint8.from_address(tensor.data_ptr())
    before = first.value
    with warnings.catch_warnings():
        # Python warns of forks beside threads. This child needs no thread: it writes one byte.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        first.value = before ^ 0xFF
        os._exit(0)
    os.waitpid(child, 0)
    seen, first.value = first.value != before, before
    return seen


def judge_copies(found: Plain, cases: Plain) -> Verdict:
    for told, case in zip(found, cases, strict=True):
        expected, answer = describe(matrix(case)), told["answer"]
        if answer != expected:
            return not_yet(
                f"expected {_short(expected)}, got {_short(answer)}. "
                "The copy should have the same values, shape, dtype and device."
            )
        if not told["shared"]:
            return not_yet(
                "a forked child wrote into what you returned, and this process did not see it. "
                "Whose memory is it?"
            )
        if not told["private"]:
            return not_yet(
                "a forked child wrote into x, and this process saw the change. "
                "x should stay private."
            )
        if not told["unchanged"]:
            return not_yet("your function changed the values of x.")
    return right("Every process that gets this tensor sees the same memory.")


def _short(told: Plain) -> str:
    """Return the shape, the dtype, the device and the first values of a described tensor."""
    if told["type"] != "Tensor":
        return told["type"]
    first = ", ".join(f"{value:.6g}" for value in told["values"][:4])
    return f"{told['shape']} of {told['dtype']} on {told['device']}, [{first}…]"


# 08.2: the GPU memory in use outside this process's cache


def draw_held(generator: random.Random) -> Plain:
    """Draw how many MiB this process keeps and frees, and how many another process keeps."""
    return {name: generator.randint(30, 90) for name in ("kept", "cached", "other")}


def observe_held(outside_cache: Any, inputs: Plain) -> Plain:
    """Call the answer three times, and return its numbers and the true ones.

    The calls are at the start, after allocating memory, and while another process holds memory.
    """
    _take(inputs["kept"])
    torch.cuda.empty_cache()  # Then the peak of the reserved memory is not the reserved memory.
    found = [_asked(outside_cache)]
    kept = _take(inputs["kept"])
    _take(inputs["cached"])  # freed at once, so it stays in the cache
    found.append(_asked(outside_cache))
    ours, theirs = processes.context().Pipe()
    with processes.children(_hold, [(theirs, inputs["other"])]):
        theirs.close()
        ours.recv()
        found.append(_asked(outside_cache))
        ours.close()  # the child ends
    del kept
    return found


def _take(mebibytes: int) -> torch.Tensor:
    return torch.empty(mebibytes * MIB, dtype=torch.uint8, device=DEVICE)


def _hold(line: Connection, mebibytes: int) -> None:
    """Hold GPU memory in another process until the other end of the line is closed."""
    held = _take(mebibytes)
    line.send(held.nbytes)
    line.poll(None)


def _asked(outside_cache: Any) -> Plain:
    """Call the answer once.

    Return its number, and the bytes that are used, reserved and allocated.
    """
    with torch.cuda.device(DEVICE):
        free, total = torch.cuda.mem_get_info()
        own = {"reserved": torch.cuda.memory_reserved(), "allocated": torch.cuda.memory_allocated()}
        answer = outside_cache()
    emptied = torch.cuda.memory_reserved(DEVICE) < own["reserved"]
    return {"answer": number_or_type(answer), "used": total - free, "emptied": emptied, **own}


def judge_held(found: Plain, inputs: Plain) -> Verdict:
    for told in found:
        answer, truth = told["answer"], told["used"] - told["reserved"]
        if isinstance(answer, str):
            return wrong_type(answer, "a number of bytes")
        if not abs(answer - truth) <= MIB:  # so that nan fails
            names = ("used", "reserved", "allocated")
            sizes = {name: f"{told[name] / MIB:,.0f} MiB" for name in names}
            known = f"{sizes['used']} of the GPU are in use, of which this process has reserved "
            known += f"{sizes['reserved']} and allocated {sizes['allocated']}"
            return not_yet(f"{known}. You said {answer / MIB:,.0f} MiB. Whose is the cache?")
        if told["emptied"]:
            return not_yet("your function emptied this process's cache. It should only look.")
    return right("You counted the contexts, this process's too, and what other processes hold.")


# 08.4: a memory limit with which several processes fit on the GPU


def draw_limits(generator: random.Random) -> Plain:
    return [
        {"processes": count, "context": generator.randint(100, 600) * MIB}
        for count in generator.sample(range(2, 9), k=3)
    ]


def observe_limits(share_fairly: Any, cases: Plain) -> Plain:
    """Return for each case the share of the GPU's memory that this process may reserve."""
    found, before = [], torch.cuda.get_per_process_memory_fraction(DEVICE)
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    held = _take(64)  # This memory is reserved already, and the limit includes it.
    try:
        for case in cases:
            torch.cuda.set_per_process_memory_fraction(1.0, DEVICE)
            with torch.cuda.device(DEVICE):
                share_fairly(case["processes"], case["context"])
            fraction = torch.cuda.get_per_process_memory_fraction(DEVICE)
            found.append({"fraction": fraction, "total": total})
    finally:
        del held
        torch.cuda.set_per_process_memory_fraction(before, DEVICE)
    return found


NEAR = 1e-6  # as a share of the GPU's memory: some kilobytes


def judge_limits(found: Plain, cases: Plain) -> Verdict:
    for told, case in zip(found, cases, strict=True):
        if told["fraction"] == 1.0:
            return not_yet(
                "this process has no limit: torch.cuda.set_per_process_memory_fraction sets one."
            )
        limit, total = told["fraction"] * told["total"], told["total"]
        together = case["processes"] * (limit + case["context"])
        if total * (1 - NEAR) <= together <= total * (1 + NEAR):
            continue
        if not math.isfinite(together):
            return not_yet(f"this process's limit is {limit} bytes.")
        taken, there = sizes_alike(round(together), total)
        each = (
            f"{case['processes']} processes, each with a limit of {units.byte_text(limit)} "
            f"and a context of {units.byte_text(case['context'])}, take {taken}. "
            f"The GPU has {there}."
        )
        if together > total:
            return not_yet(f"{each} What does the limit count?")
        return not_yet(f"{each} The rest stays unused.")
    return right("The limit counts what PyTorch reserves, not the context.")


# 08.3: a producer that stays as long as it is needed. The exercise hands out this script:


def produce(queue: Any, done: Any, sizes: Any) -> None:
    """For each size, send that many ones."""
    for size in sizes:
        queue.put(torch.ones(size, device="cuda"))


def draw_sizes(generator: random.Random) -> Plain:
    """Draw a small, a middle and a large size, which are not sorted."""
    small, middle, large = sorted(generator.sample(range(1, 1001), k=3))
    return [middle, large, small]


def judge_producer(found: Plain, sizes: Plain) -> Verdict:
    if found["raised"]:
        return not_yet(f"in its process, your function raised {found['raised']}")
    if found["forged"]:
        return not_yet(
            "your producer set or cleared `done` itself. "
            "Who knows that the consumer has released the tensors?"
        )
    if found["lost"]:
        return not_yet(
            "your producer did not wait until the consumer was done. "
            "The tensors that it had sent were lost."
        )
    if len(found["came"]) >= len(sizes) and not found["waited"] and found["ended"]:
        return not_yet(
            "your producer ended and did not wait until `done` was set. "
            "How does it know that the consumer has released the tensors?"
        )
    if len(found["came"]) < len(sizes):
        return not_yet(
            f"expected {len(sizes)} tensors, and {len(found['came'])} came. Who waits for whom?"
        )
    for tensor, size in zip(found["came"], sizes, strict=False):
        is_tensor = tensor["type"] == "Tensor"
        if not is_tensor or tensor["values"] != [1.0] * size or tensor["shape"] != [size]:
            return not_yet(f"expected {size} ones, and {_short(tensor)} came.")
        if tensor["dtype"] != "torch.float32":
            return not_yet(
                f"the script sent torch.float32, and you send {tensor['dtype']}. "
                "Change only how the producer ends."
            )
        if not tensor["device"].startswith("cuda"):
            return not_yet(
                f"the tensors came on {tensor['device']}. Expected the GPU, without a copy."
            )
    if len(found["came"]) > len(sizes):
        return not_yet(
            f"after the {len(sizes)} tensors, more came. "
            "The consumer takes one tensor for each size."
        )
    if not found["ended"]:
        return not_yet(f"{ENDING:g} s after the consumer was done, your producer still ran.")
    return right("Your producer stayed until nobody needed its memory.")


# 08.5: one process has the model and answers many clients


class Requests:
    """Queue that contains all requests from the start, and None at the end.

    At each call of `get`, `looks` notes the number of replies and the allocated bytes.
    """

    def __init__(self, requests: list[tuple[int, torch.Tensor]], replies: SimpleQueue) -> None:
        self._requests, self._replies = iter([*requests, None]), replies
        self.looks: list[dict[str, int]] = []

    def get(self) -> tuple[int, torch.Tensor] | None:
        allocated = torch.cuda.memory_allocated(DEVICE)
        self.looks.append({"replies": self._replies.qsize(), "allocated": allocated})
        try:
            return next(self._requests)
        except StopIteration:
            raise RuntimeError("after None there are no more requests") from None


# From this look on, memory must not grow. cuBLAS has its workspace then, and the tensors of the
# last request exist.
EARLY = 2


def draw_requests(generator: random.Random) -> Plain:
    """Draw the client and the row of numbers of each request, and the weights of two layers.

    Client 0 sends a request, and some client sends two. The numbers are fractions, so that a
    rounded answer is noticed. The model answers each row with a negative and a positive number, and
    no two rows alike.
    """
    clients = [generator.randrange(10) for _ in range(generator.randint(4, 7))]
    clients += [0, clients[0]]
    generator.shuffle(clients)

    def matrix_of(rows: int, columns: int) -> list[list[float]]:
        return [[generator.randint(1, 36) / 4 for _ in range(columns)] for _ in range(rows)]

    requests = []
    for client in clients:
        row = [generator.randint(1000, 9000) / 1000 for _ in range(3)]
        requests.append({"client": client, "row": row})
    first, negative, positive = matrix_of(4, 3), matrix_of(1, 4)[0], matrix_of(1, 4)[0]
    second = [[-weight for weight in negative], positive]
    return {"requests": requests, "weights": [first, second]}


def observe_server(serve: Any, inputs: Plain) -> Plain:
    """Run the answer's server with drawn requests.

    Return the replies, where the model computed, and the server's memory at each request.
    """
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.ReLU(), nn.Linear(4, 2, bias=False))
    model.to(DEVICE)
    with torch.no_grad():
        for parameter, weight in zip(model.parameters(), inputs["weights"], strict=True):
            parameter.copy_(torch.tensor(weight))
    model.eval()
    computed: list[str] = []  # the device of each call
    model[0].register_forward_hook(
        lambda module, given, output: computed.append(str(output.device))
    )
    replies: SimpleQueue = SimpleQueue()
    sent = [(request["client"], torch.tensor([request["row"]])) for request in inputs["requests"]]
    requests = Requests(sent, replies)
    with torch.cuda.device(DEVICE):
        serve(model, requests, replies)
    answered = [_reply(replies.get()) for _ in range(replies.qsize())]
    return {"looks": requests.looks, "replies": answered, "computed": computed}


def _reply(reply: Any) -> Plain:
    if not (isinstance(reply, tuple | list) and len(reply) == 2):
        return {"client": None, "answer": {"type": type(reply).__name__}, "graph": False}
    client, answer = reply
    graph = isinstance(answer, torch.Tensor) and answer.requires_grad
    if not isinstance(client, int):
        client = type(client).__name__
    return {"client": client, "answer": describe(answer), "graph": graph}


def judge_server(found: Plain, inputs: Plain) -> Verdict:
    looks, replies, requests = found["looks"], found["replies"], inputs["requests"]
    for count, look in enumerate(looks):
        if look["replies"] < count:
            return not_yet(
                f"you asked for request {count + 1} when client {requests[count - 1]['client']} "
                "still had no reply."
            )
    if len(looks) <= len(requests):
        return not_yet(
            f"you answered {len(looks)} of {len(requests)} requests. Go on until None comes."
        )
    places = [place for place in found["computed"] if not place.startswith("cuda")]
    if places:
        return not_yet(
            f"the model computed on {min(places)}. It was on the GPU. What should be moved?"
        )
    if len(replies) != len(requests):
        return not_yet(f"there are {len(replies)} replies to {len(requests)} requests.")
    for reply, request in zip(replies, requests, strict=True):
        answer = reply["answer"]
        if answer["type"] != "Tensor" or reply["client"] != request["client"]:
            return not_yet(
                f"expected a pair of the client, here {request['client']}, and a tensor; "
                f"got {reply['client']}, {answer}."
            )
        if answer["device"] != "cpu":
            return not_yet(
                f"a reply came on {answer['device']}. Every client would need a context, and the "
                "server would have to outlive the clients. Send .cpu()."
            )
        if reply["graph"]:
            return not_yet(
                "a reply requires a gradient, and no queue accepts it. The server does not train."
            )
        expected = _answered(inputs["weights"], request["row"])
        is_right = answer["shape"] == [1, len(expected)] and all(
            abs(a - b) <= 1e-2 for a, b in zip(answer["values"], expected, strict=True)
        )
        if not is_right:
            return not_yet(
                f"to the request {_numbers(request['row'])} the model answers "
                f"{_numbers(expected)}. You sent a tensor of {_short(answer)}."
            )
    grown = looks[-1]["allocated"] - looks[EARLY]["allocated"]
    if grown > 0:
        return not_yet(
            f"after {len(looks) - 1 - EARLY} more requests, you held {units.byte_text(grown)} "
            "more on the GPU. A server runs for months."
        )
    return right("One model, one context, any number of clients.")


def _numbers(values: list[float]) -> str:
    """Return numbers as text with six digits each."""
    return f"[{', '.join(f'{value:.6g}' for value in values)}]"


def _answered(weights: Plain, row: list[float]) -> list[float]:
    """Return the reply that the model with these weights should give to a row."""
    first, second = weights
    hidden = [max(0.0, sum(a * b for a, b in zip(row, column, strict=True))) for column in first]
    return [sum(a * b for a, b in zip(hidden, column, strict=True)) for column in second]


SERVER = "A model for each, or one server"

CHECKS = [
    Check(
        "08.1", draw_tensors, observe_copies, judge_copies, section="What a child process shares"
    ),
    Check(
        "08.2", draw_held, observe_held, judge_held, children=True, section="What a process costs"
    ),
    Check(
        "08.3",
        draw_sizes,
        observe_producer,
        judge_producer,
        script=produce,
        children=True,
        section="A producer that ends",
    ),
    Check("08.4", draw_limits, observe_limits, judge_limits, section=SERVER),
    Check("08.5", draw_requests, observe_server, judge_server, section=SERVER),
]
