"""Measure what each function of PyTorch costs the host, one function at a time.

usage: python benchmarks/timing/host_functions.py OUT.json

The script needs a CUDA GPU and takes about a minute. host_functions.json has the results of three
machines.

Every figure is in microseconds of host time and is the median of several rounds. The tensors are so
small that the GPU is never the limit.

- "operators" has a plain call of each operator, the same call recorded by autograd, and one node of
  its backward pass. The node's time is the slope between a short and a long chain.
- "functions" has the work around operators: module calls, autocast, optimizers per parameter, and
  synchronization. Operators and functions are repeated, so the processor caches their code and
  data.
- "mixed" shows how much slower operators are if they run in turn.
- "programs" has random programs of operators and modules. As in a network, each operator and module
  has parameters of its own.
- "trainings" has long random networks and the parts of their training steps.
- "turns" has how much longer a call takes if other calls lie between it and its repetition.
"""

import datetime
import json
import os
import platform
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable

import torch
import torch.nn.functional as F
from host import Identity
from torch import nn

ROUNDS = 7
CALLS = 100
SHORT, LONG = 4, 36
Work = Callable[[], object]


def microseconds(
    work: Work, calls: int = CALLS, prepare: Callable[[], object] | None = None
) -> float:
    """Return the host microseconds of one call. `prepare` runs before each round, untimed."""
    found = []
    for _ in range(ROUNDS + 1):
        if prepare is not None:
            prepare()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            work()
        found.append((time.perf_counter() - start) / calls * 1e6)
    torch.cuda.synchronize()
    return statistics.median(found[1:])


def once(work: Callable[[object], object], make: Callable[[], object]) -> float:
    """Return the host microseconds of `work(x)`, with a new `x` for each round."""
    found = []
    for _ in range(3 * ROUNDS):
        x = make()
        torch.cuda.synchronize()
        start = time.perf_counter()
        work(x)
        found.append((time.perf_counter() - start) * 1e6)
    torch.cuda.synchronize()
    return statistics.median(found[3:])


class Operators:
    """The operators to measure, which keep the shape of their first argument for chains."""

    def __init__(self) -> None:
        device = "cuda"
        self.x = torch.randn(16, 16, device=device)
        self.w = torch.randn(16, 16, device=device)
        self.b = torch.randn(16, device=device)
        self.pictures = torch.randn(2, 16, 8, 8, device=device)
        self.kernel = torch.randn(16, 16, 3, 3, device=device)
        self.depthwise = torch.randn(16, 1, 3, 3, device=device)
        self.mean, self.var = torch.zeros(16, device=device), torch.ones(16, device=device)
        self.rows = torch.randn(2, 16, 16, device=device)
        self.heads = torch.randn(2, 2, 16, 16, device=device)
        self.half_heads = self.heads.to(torch.bfloat16)
        self.index = torch.arange(16, device=device)
        self.mask = torch.zeros(16, 16, dtype=torch.bool, device=device)
        self.classes = torch.zeros(16, dtype=torch.int64, device=device)
        self.lstm, self.gru = nn.LSTM(16, 16).to(device), nn.GRU(16, 16).to(device)
        self.deep_gru = nn.GRU(16, 16, 2).to(device)

    def modules(self) -> dict[str, tuple[torch.Tensor, nn.Module]]:
        """Return (first argument, module) by name."""
        rows = {
            "nn.Linear": nn.Linear(16, 16),
            "nn.Linear without bias": nn.Linear(16, 16, bias=False),
            "nn.LayerNorm": nn.LayerNorm(16),
            "nn.ReLU": nn.ReLU(),
            "nn.Dropout": nn.Dropout(0.1),
            "nn.Identity": nn.Identity(),
        }
        pictures = {
            "nn.Conv2d": nn.Conv2d(16, 16, 3, padding=1),
            "nn.Conv2d without bias": nn.Conv2d(16, 16, 3, padding=1, bias=False),
            "nn.BatchNorm2d": nn.BatchNorm2d(16),
        }
        made = {name: (self.x, module.cuda()) for name, module in rows.items()}
        return made | {name: (self.pictures, module.cuda()) for name, module in pictures.items()}

    def all(self) -> dict[str, tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]]:
        """Return (first argument, function of it) by name."""
        s = self
        return {
            "add": (s.x, lambda y: y + s.w),
            "add a number": (s.x, lambda y: y + 1.0),
            "mul": (s.x, lambda y: y * s.w),
            "mul a number": (s.x, lambda y: y * 0.5),
            "sin": (s.x, torch.sin),
            "relu": (s.x, torch.relu),
            "gelu": (s.x, F.gelu),
            "silu": (s.x, F.silu),
            "pow 2": (s.x, lambda y: y.pow(2)),
            "where": (s.x, lambda y: torch.where(s.mask, y, s.w)),
            "masked_fill": (s.x, lambda y: y.masked_fill(s.mask, 0.0)),
            "dropout": (s.x, lambda y: F.dropout(y, 0.1)),
            "softmax": (s.x, lambda y: F.softmax(y, -1)),
            "log_softmax": (s.x, lambda y: F.log_softmax(y, -1)),
            "layer_norm": (s.x, lambda y: F.layer_norm(y, (16,), s.b, s.b)),
            "group_norm": (s.pictures, lambda y: F.group_norm(y, 4, s.b, s.b)),
            "rms_norm": (s.x, lambda y: F.rms_norm(y, (16,), s.b)),
            "mm": (s.x, lambda y: y @ s.w),
            "linear": (s.x, lambda y: F.linear(y, s.w, s.b)),
            "linear of three dimensions": (s.rows, lambda y: F.linear(y, s.w, s.b)),
            "linear without bias": (s.rows, lambda y: F.linear(y, s.w)),
            "bmm": (s.rows, lambda y: torch.bmm(y, s.rows)),
            "matmul of four dimensions": (s.heads, lambda y: y @ s.heads),
            "baddbmm": (s.rows, lambda y: torch.baddbmm(y, s.rows, s.rows)),
            "attention": (s.heads, lambda y: F.scaled_dot_product_attention(y, y, y)),
            "attention in bfloat16": (
                s.half_heads,
                lambda y: F.scaled_dot_product_attention(y, y, y, is_causal=True),
            ),
            "conv2d": (s.pictures, lambda y: F.conv2d(y, s.kernel, None, padding=1)),
            "conv2d with bias": (s.pictures, lambda y: F.conv2d(y, s.kernel, s.b, padding=1)),
            "conv2d depthwise": (
                s.pictures,
                lambda y: F.conv2d(y, s.depthwise, None, padding=1, groups=16),
            ),
            "batch_norm": (
                s.pictures,
                lambda y: F.batch_norm(y, s.mean, s.var, s.b, s.b, training=True),
            ),
            "batch_norm in eval": (s.pictures, lambda y: F.batch_norm(y, s.mean, s.var, s.b, s.b)),
            "max_pool2d": (s.pictures, lambda y: F.max_pool2d(y, 3, 1, 1)),
            "avg_pool2d": (s.pictures, lambda y: F.avg_pool2d(y, 3, 1, 1)),
            "cat": (s.x, lambda y: torch.cat([y, y])[:16]),
            "index_select": (s.x, lambda y: y.index_select(0, s.index)),
            "indexed by a tensor": (s.x, lambda y: y[s.index]),
            "gather": (s.x, lambda y: y.gather(1, s.classes[:, None].expand(16, 16))),
            "clone": (s.x, torch.clone),
            "contiguous of a transposed": (s.x, lambda y: y.t().contiguous()),
            "sum of a dimension": (s.rows, lambda y: y.sum(0, keepdim=True).expand(2, 16, 16)),
            "mean of a dimension": (s.rows, lambda y: y.mean(0, keepdim=True).expand(2, 16, 16)),
            "to bfloat16 and back": (s.x, lambda y: y.to(torch.bfloat16).float()),
            "view": (s.x, lambda y: y.view(16, 16)),
            "transpose": (s.x, lambda y: y.t()),
            "reshape": (s.x, lambda y: y.reshape(16, 16)),
            "permute": (s.heads, lambda y: y.permute(0, 2, 1, 3)),
            "expand": (s.x, lambda y: y.expand(16, 16)),
            "slice": (s.x, lambda y: y[:]),
            "chunk of two and cat": (s.x, lambda y: torch.cat(y.chunk(2))),
            "unsqueeze and squeeze": (s.x, lambda y: y.unsqueeze(0).squeeze(0)),
            "roll": (s.x, lambda y: y.roll(1, 0)),
            "pad and slice": (s.x, lambda y: F.pad(y, (1, 1))[:, 1:-1]),
            "einsum": (s.x, lambda y: torch.einsum("ij,jk->ik", y, s.w)),
            "sigmoid": (s.x, torch.sigmoid),
            "hardswish": (s.x, F.hardswish),
            "cumsum": (s.x, lambda y: y.cumsum(0)),
            "stack of an unbound": (s.rows, lambda y: torch.stack(y.unbind(0))),
            "interpolate and slice": (
                s.pictures,
                lambda y: F.interpolate(y, scale_factor=2)[:, :, ::2, ::2],
            ),
            "lstm": (s.rows, lambda y: s.lstm(y)[0]),
            "gru": (s.rows, lambda y: s.gru(y)[0]),
            "two layers of gru": (s.rows, lambda y: s.deep_gru(y)[0]),
        }


def measure_operators() -> dict[str, dict[str, float]]:
    found = {}
    operators = Operators()
    for name, (first, work) in (operators.all() | operators.modules()).items():
        leaf = first.detach().clone().requires_grad_()
        with torch.no_grad():
            plain = microseconds(lambda first=first, work=work: work(first))
        with torch.inference_mode():
            inside = first.clone()
            inference = microseconds(lambda inside=inside, work=work: work(inside))
        recorded = microseconds(lambda leaf=leaf, work=work: work(leaf))

        def chain(length: int, leaf: torch.Tensor = leaf, work=work) -> torch.Tensor:
            y = leaf
            for _ in range(length):
                y = work(y)
            return y

        def backward(length: int, leaf: torch.Tensor = leaf, work=work) -> float:
            ones = torch.ones_like(leaf)

            def run(y: torch.Tensor) -> None:
                y.backward(ones)
                leaf.grad = None
                if isinstance(work, nn.Module):
                    work.zero_grad()

            return once(run, lambda: chain(length))

        short, long = backward(SHORT), backward(LONG)
        found[name] = {
            "no_grad": plain,
            "inference_mode": inference,
            "recorded": recorded,
            "backward node": (long - short) / (LONG - SHORT),
            "backward once": short - SHORT * (long - short) / (LONG - SHORT),
        }
    return found


def parameters_with_gradients(count: int) -> list[torch.Tensor]:
    made = [torch.randn(16, 16, device="cuda", requires_grad=True) for _ in range(count)]
    for parameter in made:
        parameter.grad = torch.ones_like(parameter)
    return made


OPTIMIZERS: dict[str, Callable[[list[torch.Tensor]], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "SGD, momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "SGD, one by one": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=False),
    "SGD, fused": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True),
    "Adam": torch.optim.Adam,
    "Adam, one by one": lambda p: torch.optim.Adam(p, foreach=False),
    "Adam, fused": lambda p: torch.optim.Adam(p, fused=True),
    "AdamW": torch.optim.AdamW,
    "Adadelta": torch.optim.Adadelta,
    "Adagrad": torch.optim.Adagrad,
    "RMSprop": torch.optim.RMSprop,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adamax": torch.optim.Adamax,
}
FEW, MANY = 8, 200


def measure_optimizers() -> dict[str, dict[str, float]]:
    found = {}
    for name, make in OPTIMIZERS.items():
        times = {}
        for count in (FEW, MANY):
            optimizer = make(parameters_with_gradients(count))
            calls = 1 if "one by one" in name else 10
            times[count] = microseconds(optimizer.step, calls)
        found[name] = {
            str(FEW): times[FEW],
            str(MANY): times[MANY],
            "per parameter": (times[MANY] - times[FEW]) / (MANY - FEW),
        }
    for name, options in {"zero_grad": {}, "zero_grad, filled": {"set_to_none": False}}.items():
        times = {}
        for count in (FEW, MANY):
            made = parameters_with_gradients(count)
            optimizer = torch.optim.SGD(made, 0.1)
            gradients = [parameter.grad for parameter in made]

            def give_back(made=made, gradients=gradients) -> None:
                for parameter, gradient in zip(made, gradients, strict=True):
                    parameter.grad = gradient

            def clear(optimizer=optimizer, options=options) -> None:
                optimizer.zero_grad(**options)

            times[count] = microseconds(clear, 1, give_back)
        found[name] = {str(FEW): times[FEW], str(MANY): times[MANY]}
    for count in (FEW, MANY):
        made = parameters_with_gradients(count)
        optimizer = torch.optim.SGD(made, 0.1)

        def make_gradients(made=made) -> None:
            for parameter in made:
                parameter.grad = torch.empty_like(parameter)

        cell = found.setdefault("zero_grad, memory freed", {})
        cell[str(count)] = microseconds(optimizer.zero_grad, 1, make_gradients)
    for count in (FEW, MANY):
        made = parameters_with_gradients(count)
        cell = found.setdefault("clip_grad_norm_", {})
        cell[str(count)] = microseconds(lambda made=made: nn.utils.clip_grad_norm_(made, 1.0), 3)
    return found


def measure_foreach() -> dict[str, dict[str, float]]:
    """Return the number of launches of foreach operators, as a fixed part and a part per tensor."""
    found = {}
    works: dict[str, Callable[[list[torch.Tensor]], object]] = {
        "_foreach_add_": lambda p: torch._foreach_add_(p, p),
        "_foreach_mul_ by a number": lambda p: torch._foreach_mul_(p, 1.0),
        "_foreach_addcdiv_": lambda p: torch._foreach_addcdiv_(p, p, p, 0.0),
        "_foreach_sqrt": torch._foreach_sqrt,
        "_foreach_norm": torch._foreach_norm,
        "grouping": lambda p: torch.utils._foreach_utils._group_tensors_by_device_and_dtype([p, p]),
    }
    for name, work in works.items():
        found[name] = {}
        for count in (FEW, MANY):
            tensors = [torch.ones(16, 16, device="cuda") for _ in range(count)]
            found[name][str(count)] = microseconds(
                lambda tensors=tensors, work=work: work(tensors), 10
            )
    return found


def measure_functions() -> dict[str, float]:
    device = "cuda"
    x = torch.randn(16, 16, device=device)
    p = torch.randn(16, 16, device=device, requires_grad=True)
    number = torch.zeros((), device=device)
    pinned = torch.zeros(16, 16).pin_memory()
    host = torch.zeros(16, 16)
    logits = torch.randn(16, 10, device=device, requires_grad=True)
    classes = torch.zeros(16, dtype=torch.int64, device=device)
    empty = nn.Identity()
    hooked = nn.Identity()
    hooked.register_forward_hook(lambda module, given, result: None)
    nested = nn.Sequential(*(nn.Identity() for _ in range(16)))
    linear = nn.Linear(16, 16).to(device)
    norm, picture_norm = nn.LayerNorm(16).to(device), nn.BatchNorm2d(16).to(device)
    pictures = torch.randn(2, 16, 8, 8, device=device)
    convolution = nn.Conv2d(16, 16, 3, padding=1, bias=False).to(device)
    attention = nn.MultiheadAttention(16, 2, batch_first=True).to(device)
    encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).to(device)
    rows = torch.randn(2, 16, 16, device=device)
    lstm, gru = nn.LSTM(16, 16).to(device), nn.GRU(16, 16).to(device)
    words = nn.Embedding(16, 16).to(device)
    scaler = torch.amp.GradScaler("cuda")
    event, stream = torch.cuda.Event(), torch.cuda.Stream()

    def no_grad() -> None:
        with torch.no_grad():
            pass

    def autocast() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            pass

    def on_stream() -> None:
        with torch.cuda.stream(stream):
            pass

    def half_linear() -> None:
        F.linear(x, p)

    def named() -> None:
        with torch.profiler.record_function("name"):
            pass

    functions: dict[str, Work] = {
        "nothing": lambda: None,
        "module call": lambda: empty(x),
        "module call with a hook": lambda: hooked(x),
        "Sequential of 16": lambda: nested(x),
        "nn.Linear": lambda: linear(x),
        "nn.LayerNorm": lambda: norm(x),
        "nn.BatchNorm2d": lambda: picture_norm(pictures),
        "nn.Conv2d": lambda: convolution(pictures),
        "nn.MultiheadAttention": lambda: attention(rows, rows, rows, need_weights=False),
        "nn.TransformerEncoderLayer": lambda: encoder(rows),
        "nn.LSTM": lambda: lstm(rows),
        "nn.GRU": lambda: gru(rows),
        "nn.Embedding": lambda: words(classes),
        "no_grad": no_grad,
        "autocast": autocast,
        "record_function": named,
        "Function.apply of a view": lambda: Identity.apply(p),
        "detach": lambda: p.detach(),
        "empty": lambda: torch.empty(16, device=device),
        "zeros": lambda: torch.zeros(16, device=device),
        "ones_like": lambda: torch.ones_like(x),
        "randn": lambda: torch.randn(16, device=device),
        "arange": lambda: torch.arange(16, device=device),
        "add_": lambda: x.add_(0),
        "add_ of a tensor": lambda: x.add_(x, alpha=0.0),
        "copy_": lambda: x.copy_(p.detach()),
        "zero_": lambda: x.zero_(),
        "sum": lambda: x.sum(),
        "mean": lambda: x.mean(),
        "argmax": lambda: x.argmax(1),
        "max of a dimension": lambda: x.max(1),
        "topk": lambda: x.topk(2),
        "equal elements": lambda: x.eq(p.detach()),
        "cross_entropy": lambda: F.cross_entropy(logits, classes),
        "nll_loss": lambda: F.nll_loss(logits, classes),
        "mse_loss": lambda: F.mse_loss(p, x),
        "item": lambda: number.item(),
        "synchronize": torch.cuda.synchronize,
        "to the GPU, pageable": lambda: host.to(device),
        "to the GPU, pinned": lambda: pinned.to(device, non_blocking=True),
        "to the CPU": lambda: x.cpu(),
        "to where it is": lambda: x.to(device),
        "event.record": event.record,
        "stream.wait_event": lambda: stream.wait_event(event),
        "current_stream": torch.cuda.current_stream,
        "cuda.stream": on_stream,
        "memory_allocated": torch.cuda.memory_allocated,
        "clip_grad_norm_ of one": lambda: nn.utils.clip_grad_norm_([p], 1.0),
        "scaler.scale": lambda: scaler.scale(number),
        "CPU add": lambda: host + host,
        "CPU sum": lambda: host.sum(),
        "CPU stack of 16": lambda: torch.stack([host] * 16),
    }
    found = {}
    p.grad = torch.zeros_like(p)
    with torch.no_grad():
        for name, work in functions.items():
            found[f"{name}, no_grad"] = microseconds(work)
    for name in (
        "nn.Linear",
        "nn.LayerNorm",
        "nn.BatchNorm2d",
        "nn.Conv2d",
        "nn.MultiheadAttention",
    ):
        found[name] = microseconds(functions[name])
    for name in ("nn.TransformerEncoderLayer", "nn.LSTM", "nn.GRU", "nn.Embedding", "detach"):
        found[name] = microseconds(functions[name], 50)
    for name in ("cross_entropy", "mse_loss", "Function.apply of a view", "nothing"):
        found[name] = microseconds(functions[name])
    with torch.autocast("cuda", torch.bfloat16):
        half_linear()
        found["linear under autocast, weight cached"] = microseconds(half_linear)
    with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
        found["linear under autocast, not cached"] = microseconds(half_linear)
    linears = nn.Sequential(*(nn.Linear(16, 16) for _ in range(32))).to(device)

    def step_of_32() -> None:
        linears(x).sum().backward()

    def clear() -> None:
        linears.zero_grad(set_to_none=True)

    found["32 nn.Linear, forward and backward, new gradients"] = microseconds(step_of_32, 1, clear)
    found["32 nn.Linear, forward and backward, gradients added"] = microseconds(step_of_32, 1)
    found["32 nn.Linear, forward"] = microseconds(lambda: linears(x).sum(), 1)
    return found


class Programs:
    """Random programs: sequences of operators and modules, each use with parameters of its own.

    A function that is called repeatedly finds its code and its data in the processor's caches. In a
    network it does not. The time of a random program, compared with the sum of its functions' own
    times, shows by how much.
    """

    LENGTH, PROGRAMS = 40, 160

    def __init__(self) -> None:
        operators = Operators()
        rows = {n: work for n, (first, work) in operators.all().items() if first is operators.x}
        pictures = {
            n: work for n, (first, work) in operators.all().items() if first is operators.pictures
        }
        modules: dict[str, Callable[[], nn.Module]] = {
            "nn.Linear": lambda: nn.Linear(16, 16),
            "nn.Linear without bias": lambda: nn.Linear(16, 16, bias=False),
            "nn.LayerNorm": lambda: nn.LayerNorm(16),
            "nn.ReLU": nn.ReLU,
            "nn.Dropout": lambda: nn.Dropout(0.1),
            "nn.Identity": nn.Identity,
        }
        picture_modules: dict[str, Callable[[], nn.Module]] = {
            "nn.Conv2d": lambda: nn.Conv2d(16, 16, 3, padding=1),
            "nn.Conv2d without bias": lambda: nn.Conv2d(16, 16, 3, padding=1, bias=False),
            "nn.BatchNorm2d": lambda: nn.BatchNorm2d(16),
            "nn.ReLU": nn.ReLU,
            "nn.Identity": nn.Identity,
        }
        self.kinds = [
            ("rows", operators.x, rows, modules),
            ("pictures", operators.pictures, pictures, picture_modules),
        ]

    def measure(self) -> list[dict]:
        """Return each program's contents, and the microseconds of its three parts."""
        draw = random.Random(0)
        found = []
        for index in range(self.PROGRAMS):
            kind, first, works, modules = self.kinds[index % len(self.kinds)]
            names = [*works, *modules]
            chosen = draw.choices(names, k=draw.randint(self.LENGTH // 2, self.LENGTH))
            parts = [works[n] if n in works else modules[n]().cuda() for n in chosen]
            times = dict(
                zip(("no_grad", "recorded", "backward"), self._times(first, parts), strict=True)
            )
            found.append({"kind": kind, "parts": dict(Counter(chosen)), **times})
        return found

    def _times(self, first: torch.Tensor, parts: list) -> list[float]:
        """Return the microseconds of a program without gradients, with gradients, and backward."""
        found: list[list[float]] = []
        ones = torch.ones_like(first)
        leaves = [p for part in parts if isinstance(part, nn.Module) for p in part.parameters()]
        leaf = first.detach().clone().requires_grad_()
        for _ in range(7):
            torch.cuda.synchronize()
            with torch.no_grad():
                start = time.perf_counter()
                y = leaf
                for part in parts:
                    y = part(y)
                without = time.perf_counter() - start
            torch.cuda.synchronize()
            start = time.perf_counter()
            y = leaf
            for part in parts:
                y = part(y)
            recorded = time.perf_counter() - start
            torch.cuda.synchronize()
            start = time.perf_counter()
            y.backward(ones)
            backward = time.perf_counter() - start
            for parameter in (leaf, *leaves):
                parameter.grad = None
            found.append([1e6 * without, 1e6 * recorded, 1e6 * backward])
        return [statistics.median(column) for column in zip(*found[1:], strict=True)]


class Trainings(Programs):
    """Long random networks whose parts are timed during training.

    Each step uses the memory and the code of all parts of the network. A part therefore finds less
    of its own in the processor's caches than a function that is called repeatedly. "blocks" repeats
    a few functions, as most networks do. "random" draws each one anew.
    """

    LENGTH, PROGRAMS, STEPS = 300, 24, 6

    def measure(self) -> list[dict]:
        """Return each network's contents, and the median microseconds of each part of its step."""
        draw = random.Random(1)
        found = []
        for index in range(self.PROGRAMS):
            kind, first, works, modules = self.kinds[index % len(self.kinds)]
            names = [*works, *modules, *modules]
            length = draw.randint(self.LENGTH // 3, self.LENGTH)
            if index // len(self.kinds) % 2:
                style, chosen = "random", draw.choices(names, k=length)
            else:
                block = draw.choices(names, k=draw.randint(4, 12))
                style, chosen = "blocks", (block * length)[:length]
            parts = [works[n] if n in works else modules[n]().cuda() for n in chosen]
            leaves = [p for part in parts if isinstance(part, nn.Module) for p in part.parameters()]
            held = {
                "kind": kind,
                "style": style,
                "parts": dict(Counter(chosen)),
                "parameters": len(leaves),
            }
            found.append(held | self._parts_of_a_step(first, parts, leaves))
        return found

    def _parts_of_a_step(self, first: torch.Tensor, parts: list, leaves: list) -> dict[str, float]:
        found: dict[str, list[float]] = {}
        ones = torch.ones_like(first)
        leaf = first.detach().clone().requires_grad_()
        kept: list[torch.Tensor] = []

        def forward() -> None:
            y = leaf
            for part in parts:
                y = part(y)
            kept.append(y)

        def backward() -> None:
            kept.pop().backward(ones)

        def timed(name: str, work: Work) -> None:
            torch.cuda.synchronize()
            start = time.perf_counter()
            work()
            found.setdefault(name, []).append(1e6 * (time.perf_counter() - start))

        for name in ("SGD, momentum", "AdamW"):
            optimizer = OPTIMIZERS[name]([leaf, *leaves])
            for _ in range(self.STEPS):
                timed("recorded", forward)
                timed("backward", backward)
                timed(name, optimizer.step)
                timed("zero_grad", optimizer.zero_grad)
        with torch.no_grad():
            for _ in range(self.STEPS):
                timed("no_grad", forward)
                kept.clear()
        return {name: statistics.median(times[1:]) for name, times in found.items()}


def measure_turns() -> dict[str, dict[str, float]]:
    """Return how the microseconds of a call grow with the work between it and its repetition.

    "operators" calls a number of operators in turn, given as a multiple of their own times one by
    one. A module's name calls that number of modules of one kind in turn, each with its own
    parameters and input.
    """
    with torch.no_grad():
        works = list(Operators().all().values())
        own = [
            microseconds(lambda first=first, work=work: work(first), 50) for first, work in works
        ]
        operators = {}
        for count in (1, 2, 4, 8, 16, 32, len(works)):
            ratios = []
            for start in range(0, len(works) - count + 1, count):
                chosen = works[start : start + count]

                def in_turn(chosen=chosen) -> None:
                    for first, work in chosen:
                        work(first)

                calls = max(5, 100 // count)
                ratios.append(microseconds(in_turn, calls) / sum(own[start : start + count]))
            operators[str(count)] = statistics.median(ratios)
        found = {"operators": operators}
        kinds: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
            "nn.Linear": (lambda: nn.Linear(16, 16), (16, 16)),
            "nn.LayerNorm": (lambda: nn.LayerNorm(16), (16, 16)),
            "nn.Conv2d": (lambda: nn.Conv2d(16, 16, 3, padding=1), (2, 16, 8, 8)),
            "nn.ReLU": (nn.ReLU, (16, 16)),
        }
        for name, (make, shape) in kinds.items():
            found[name] = {}
            for count in (1, 8, 64, 512):
                pairs = [(make().cuda(), torch.randn(shape, device="cuda")) for _ in range(count)]

                def each(pairs=pairs) -> None:
                    for module, x in pairs:
                        module(x)

                found[name][str(count)] = microseconds(each, max(1, 100 // count)) / count
    return found


def measure_mixed() -> dict[str, float]:
    """Return the time of all operators in turn, and the sum of their own times."""
    works = [
        (first.detach().clone().requires_grad_(), work)
        for first, work in Operators().all().values()
    ]
    own = sum(microseconds(lambda leaf=leaf, work=work: work(leaf), 50) for leaf, work in works)

    def in_turn() -> None:
        for leaf, work in works:
            work(leaf)

    return {"one by one": own, "in turn": microseconds(in_turn, 5)}


def main(path: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    runs = []
    for _ in range(int(os.environ.get("RUNS", "2"))):
        start = time.perf_counter()
        runs.append(
            {
                "operators": measure_operators(),
                "functions": measure_functions(),
                "optimizers": measure_optimizers(),
                "foreach": measure_foreach(),
                "mixed": measure_mixed(),
                "programs": Programs().measure(),
                "trainings": Trainings().measure(),
                "turns": measure_turns(),
            }
        )
        print(f"one run took {time.perf_counter() - start:.0f} s", flush=True)
    cpu = "unknown"
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as lines:
            names = [line.split(":")[1].strip() for line in lines if "model name" in line]
        if names:
            cpu = names[0]
    machine = {
        "gpu": torch.cuda.get_device_name(0),
        "cpu": cpu,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }
    with open(path, "w") as file:
        json.dump({"machine": machine, "runs": runs}, file, indent=1)
        file.write("\n")


if __name__ == "__main__":
    main(sys.argv[1])
