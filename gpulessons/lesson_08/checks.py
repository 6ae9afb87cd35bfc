"""The checks of lesson 08: memory that processes share, who keeps it alive, and what each of them holds."""

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


# 08.1: a copy that other processes can use

DTYPES = ("float64", "int32", "float16")
KINDS = ("whole", "transposed", "rows")


def draw_tensors(generator: random.Random) -> Plain:
    """Matrices, each of its own dtype, and none square: whole, transposed, and a few rows of a larger one."""
    rows, columns = generator.sample(range(2, 7), k=2)
    kinds = zip(generator.sample(KINDS, k=3), generator.sample(DTYPES, k=3), strict=True)
    return [
        {"dtype": dtype, "kind": kind, "rows": rows, "columns": columns} for kind, dtype in kinds
    ]


def matrix(case: Plain) -> torch.Tensor:
    rows, columns = case["rows"], case["columns"]
    whole = torch.arange(rows * columns).to(getattr(torch, case["dtype"])).reshape(rows, columns)
    return {"whole": whole, "transposed": whole.t(), "rows": whole[1:]}[case["kind"]]


def observe_copies(shared_copy: Any, cases: Plain) -> Plain:
    found = []
    for case in cases:
        x = matrix(case)
        with during(f"a {case['kind']} matrix of {x.dtype}"):
            answer = shared_copy(x)
        told = {
            "answer": describe(answer),
            "private": not _seen_from_fork(x),
            "unchanged": describe(x) == describe(matrix(case)),
        }
        if told["answer"] == describe(matrix(case)):
            told["shared"] = _seen_from_fork(answer)
        found.append(told)
    return found


def _seen_from_fork(tensor: torch.Tensor) -> bool:
    """Whether this process sees what a forked child writes into the tensor."""
    if not hasattr(os, "fork"):
        return tensor.is_shared()
    first = ctypes.c_uint8.from_address(tensor.data_ptr())
    before = first.value
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # about threads: the child needs none, it writes one byte and is gone
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
                f"from {_short(expected)} you made {_short(answer)}: it should have the same values, shape, dtype and device."
            )
        if not told["shared"]:
            return not_yet(
                "a forked child wrote into what you returned, and this process did not see it. Whose memory is it?"
            )
        if not told["private"]:
            return not_yet(
                "a forked child wrote into x, and this process saw it. x should stay private."
            )
        if not told["unchanged"]:
            return not_yet("x has other values than before.")
    return right("Every process that gets this tensor sees the same memory.")


def _short(told: Plain) -> str:
    """Return the shape, the dtype, the device and the first values of a described tensor."""
    if told["type"] != "Tensor":
        return told["type"]
    first = ", ".join(f"{value:.6g}" for value in told["values"][:4])
    return f"{told['shape']} of {told['dtype']} on {told['device']}, [{first}…]"


# 08.2: what is in use outside this process's cache


def draw_held(generator: random.Random) -> Plain:
    """MiB that this process keeps, that it gives back to its cache, and that another process keeps."""
    return {name: generator.randint(30, 90) for name in ("kept", "cached", "other")}


def observe_held(outside_cache: Any, inputs: Plain) -> Plain:
    """The answer and the truth: at first, with memory of this process's own, and beside another process."""
    _take(inputs["kept"])
    torch.cuda.empty_cache()  # so that the most that was ever reserved is not what is reserved
    found = [_asked(outside_cache)]
    kept = _take(inputs["kept"])
    _take(inputs["cached"])  # and let go of it
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
    """In another process: hold memory of the GPU until nobody listens any more."""
    held = _take(mebibytes)
    line.send(held.nbytes)
    line.poll(None)


def _asked(outside_cache: Any) -> Plain:
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
            return not_yet(f"{known}; you said {answer / MIB:,.0f} MiB. Whose is the cache?")
        if told["emptied"]:
            return not_yet("your function emptied this process's cache. It should only look.")
    return right("The contexts, this process's own among them, and all that other processes hold.")


# 08.4: a limit with which several processes fit


def draw_limits(generator: random.Random) -> Plain:
    return [
        {"processes": count, "context": generator.randint(100, 600) * MIB}
        for count in generator.sample(range(2, 9), k=3)
    ]


def observe_limits(share_fairly: Any, cases: Plain) -> Plain:
    """By case, the share of the GPU's memory that this process's cache may take afterwards."""
    found, before = [], torch.cuda.get_per_process_memory_fraction(DEVICE)
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    held = _take(64)  # reserved already, and part of what the limit allows
    try:
        for case in cases:
            torch.cuda.set_per_process_memory_fraction(1.0, DEVICE)
            with torch.cuda.device(DEVICE):
                share_fairly(case["processes"], case["context"])
            found.append(
                {"fraction": torch.cuda.get_per_process_memory_fraction(DEVICE), "total": total}
            )
    finally:
        del held
        torch.cuda.set_per_process_memory_fraction(before, DEVICE)
    return found


NEAR = 1e-6  # of the whole GPU: some kilobytes


def judge_limits(found: Plain, cases: Plain) -> Verdict:
    for told, case in zip(found, cases, strict=True):
        if told["fraction"] == 1.0:
            return not_yet(
                "this process has no limit: torch.cuda.set_per_process_memory_fraction sets one."
            )
        limit, total = told["fraction"] * told["total"], told["total"]
        together = case["processes"] * (limit + case["context"])
        if together <= total * (1 + NEAR) and together >= total * (1 - NEAR):
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
        return not_yet(f"{each} The rest lies idle.")
    return right("The limit counts what PyTorch reserves, not the context.")


# 08.3: a producer that stays as long as it is needed. The script as it is handed out:


def produce(queue: Any, done: Any, sizes: Any) -> None:
    """For each size, send that many ones."""
    for size in sizes:
        queue.put(torch.ones(size, device="cuda"))


def draw_sizes(generator: random.Random) -> Plain:
    """In no order."""
    small, middle, large = sorted(generator.sample(range(1, 1001), k=3))
    return [middle, large, small]


def judge_producer(found: Plain, sizes: Plain) -> Verdict:
    if found["raised"]:
        return not_yet(f"in its process, your function raised {found['raised']}")
    if found["forged"]:
        return not_yet(
            "your producer set `done` itself, or cleared it. Who can say that the consumer has released the tensors?"
        )
    if found["lost"]:
        return not_yet(
            "your producer did not wait until the consumer was done. What it had sent was gone."
        )
    if len(found["came"]) >= len(sizes) and not found["waited"] and found["ended"]:
        return not_yet(
            "your producer ended and did not wait until `done` was set. How does it know that the consumer has released the tensors?"
        )
    if len(found["came"]) < len(sizes):
        return not_yet(f"{len(found['came'])} of {len(sizes)} tensors came. Who waits for whom?")
    for tensor, size in zip(found["came"], sizes, strict=False):
        if (
            tensor["type"] != "Tensor"
            or tensor["values"] != [1.0] * size
            or tensor["shape"] != [size]
        ):
            return not_yet(f"expected {size} ones, and {_short(tensor)} came.")
        if tensor["dtype"] != "torch.float32":
            return not_yet(
                f"ones of torch.float32 were sent before, and you send {tensor['dtype']}. Only the end was to be corrected."
            )
        if not tensor["device"].startswith("cuda"):
            return not_yet(
                f"the tensors came on {tensor['device']}. They should stay on the GPU, uncopied."
            )
    if len(found["came"]) > len(sizes):
        return not_yet(
            f"after the {len(sizes)} tensors, more came. The consumer takes as many as there are sizes."
        )
    if not found["ended"]:
        return not_yet(f"{ENDING:g} s after the consumer was done, your producer still ran.")
    return right("It stayed until nobody needed its memory.")


# 08.5: one process with the model, for many


class Requests:
    """A queue of requests that are there already: its end is None. Notes what the server has done whenever it asks for the next."""

    def __init__(self, requests: list[tuple[int, torch.Tensor]], replies: SimpleQueue) -> None:
        self._requests, self._replies = iter([*requests, None]), replies
        self.looks: list[dict[str, int]] = []

    def get(self) -> tuple[int, torch.Tensor] | None:
        self.looks.append(
            {"replies": self._replies.qsize(), "allocated": torch.cuda.memory_allocated(DEVICE)}
        )
        try:
            return next(self._requests)
        except StopIteration:
            raise RuntimeError("after None there are no more requests") from None


EARLY = 2  # looks after which nothing may be added: cuBLAS has its workspace, and the last request's tensors are there


def draw_requests(generator: random.Random) -> Plain:
    """Who asks, client 0 and one that asks twice among them, and a row of numbers; the weights of the model's two layers.

    The numbers are fractions, so that an answer that is rounded is told. The model answers each row with a negative number and a
    positive one, and two rows never with the same.
    """
    clients = [generator.randrange(10) for _ in range(generator.randint(4, 7))]
    clients += [0, clients[0]]
    generator.shuffle(clients)

    def matrix_of(rows: int, columns: int) -> list[list[float]]:
        return [[generator.randint(1, 36) / 4 for _ in range(columns)] for _ in range(rows)]

    requests = [
        {"client": client, "row": [generator.randint(1000, 9000) / 1000 for _ in range(3)]}
        for client in clients
    ]
    return {
        "requests": requests,
        "weights": [
            matrix_of(4, 3),
            [[-weight for weight in matrix_of(1, 4)[0]], *matrix_of(1, 4)],
        ],
    }


def observe_server(serve: Any, inputs: Plain) -> Plain:
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.ReLU(), nn.Linear(4, 2, bias=False)).to(
        DEVICE
    )
    with torch.no_grad():
        for parameter, weight in zip(model.parameters(), inputs["weights"], strict=True):
            parameter.copy_(torch.tensor(weight))
    model.eval()
    computed: list[str] = []  # where
    model[0].register_forward_hook(
        lambda module, given, output: computed.append(str(output.device))
    )
    replies: SimpleQueue = SimpleQueue()
    requests = Requests(
        [(request["client"], torch.tensor([request["row"]])) for request in inputs["requests"]],
        replies,
    )
    with torch.cuda.device(DEVICE):
        serve(model, requests, replies)
    return {
        "looks": requests.looks,
        "replies": [_reply(replies.get()) for _ in range(replies.qsize())],
        "computed": computed,
    }


def _reply(reply: Any) -> Plain:
    if not (isinstance(reply, tuple | list) and len(reply) == 2):
        return {"client": None, "answer": {"type": type(reply).__name__}, "graph": False}
    client, answer = reply
    graph = isinstance(answer, torch.Tensor) and answer.requires_grad
    return {
        "client": client if isinstance(client, int) else type(client).__name__,
        "answer": describe(answer),
        "graph": graph,
    }


def judge_server(found: Plain, inputs: Plain) -> Verdict:
    looks, replies, requests = found["looks"], found["replies"], inputs["requests"]
    for count, look in enumerate(looks):
        if look["replies"] < count:
            return not_yet(
                f"you asked for request {count + 1} when client {requests[count - 1]['client']} still had no reply."
            )
    if len(looks) <= len(requests):
        return not_yet(
            f"you answered {len(looks)} of {len(requests)} requests; go on until None comes."
        )
    if places := sorted({place for place in found["computed"] if not place.startswith("cuda")}):
        return not_yet(f"the model computed on {places[0]}. It was on the GPU: what should move?")
    if len(replies) != len(requests):
        return not_yet(f"there are {len(replies)} replies to {len(requests)} requests.")
    for reply, request in zip(replies, requests, strict=True):
        answer = reply["answer"]
        if answer["type"] != "Tensor" or reply["client"] != request["client"]:
            return not_yet(
                f"a reply is a pair of the client, here {request['client']}, and a tensor; yours: {reply['client']}, {answer}."
            )
        if answer["device"] != "cpu":
            return not_yet(
                f"a reply came on {answer['device']}: then every client needs a context, and you must outlive them. Send .cpu()."
            )
        if reply["graph"]:
            return not_yet(
                "a reply requires a gradient, and no queue takes it. The server does not train."
            )
        expected = _answered(inputs["weights"], request["row"])
        if answer["shape"] != [1, len(expected)] or not all(
            abs(a - b) <= 1e-2 for a, b in zip(answer["values"], expected, strict=True)
        ):
            return not_yet(
                f"to the request {_numbers(request['row'])} the model answers {_numbers(expected)}. You sent a tensor of {_short(answer)}"
            )
    grown = looks[-1]["allocated"] - looks[EARLY]["allocated"]
    if grown > 0:
        return not_yet(
            f"{len(looks) - 1 - EARLY} requests later you held {units.byte_text(grown)} more on the GPU. A server runs for months."
        )
    return right("One model, one context, any number of clients.")


def _numbers(values: list[float]) -> str:
    """Return numbers as text, with six digits each."""
    return f"[{', '.join(f'{value:.6g}' for value in values)}]"


def _answered(weights: Plain, row: list[float]) -> list[float]:
    first, second = weights
    hidden = [max(0.0, sum(a * b for a, b in zip(row, column, strict=True))) for column in first]
    return [sum(a * b for a, b in zip(hidden, column, strict=True)) for column in second]


CHECKS = [
    Check(
        "08.1",
        draw_tensors,
        observe_copies,
        judge_copies,
        section="What a child process shares",
    ),
    Check(
        "08.2",
        draw_held,
        observe_held,
        judge_held,
        children=True,
        section="What a process costs",
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
    Check(
        "08.4",
        draw_limits,
        observe_limits,
        judge_limits,
        section="A model for each, or one server",
    ),
    Check(
        "08.5",
        draw_requests,
        observe_server,
        judge_server,
        section="A model for each, or one server",
    ),
]
