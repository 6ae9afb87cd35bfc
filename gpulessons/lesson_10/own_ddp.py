"""Check of exercise 10.5: the learner's own DDP.

Three ranks, each with a virtual GPU, train with the learner's DDP and then with PyTorch's.
"""

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gputrace import record, units
from labkit.checks.checking import Check, Plain, Verdict, not_yet, right
from labkit.checks.in_ranks import in_ranks
from labkit.machine import host_time

RANKS = 3  # The lesson never has three, so an answer that divides by two is wrong.
LIKE = "T4"  # Its links are slow, so that overlap shows.
PER_BUCKET = 4  # layers that fill a bucket exactly
NARROW = 8  # layers of half the bytes, so that buckets of four layers are too small
LAYERS = 11  # in units of a whole layer's bytes, so that three are left over
KEPT = 1.6  # times the memory of PyTorch's DDP that an answer may take
CLOSE = 1e-3  # allowed error, as a share of the largest gradient
LONGEST_WAIT = 50e-6  # seconds: a kernel's launch takes some 33 microseconds
GRADIENT, MESSAGE = "gradient", "message"


def draw(generator: random.Random) -> Plain:
    """Draw the width of the layers, and a seed for each rank's rows and weights.

    Four layers fill a bucket.
    """
    width = 8 * generator.randint(48, 60)
    return {
        "width": width,
        "layers": LAYERS,
        "seed": generator.randrange(1 << 20),
        "bucket_bytes": PER_BUCKET * 4 * width**2,
    }


class _Network(nn.Module):
    """Layers without biases, an unused parameter, a frozen parameter, and two buffers.

    The first layers are pairs of narrow ones, and a pair has the bytes of one whole layer.
    """

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        sizes = [(width, width // 2), (width // 2, width)] * (NARROW // 2) + [(width, width)] * (
            layers - NARROW // 2
        )
        self.layers = nn.ModuleList(nn.Linear(*size, bias=False) for size in sizes)
        self.unused = nn.Parameter(torch.randn(width))
        self.frozen = nn.Parameter(torch.randn(width), requires_grad=False)
        self.register_buffer("mean", torch.randn(width))
        self.register_buffer("seen", torch.randint(1 << 20, ()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.frozen + self.get_buffer("mean")
        for layer in self.layers:
            x = layer(x)
        return x


def _network(inputs: Plain, rank: int) -> _Network:
    """Return the network with the weights of this rank, which differ from those of other ranks."""
    torch.manual_seed(inputs["seed"] + rank)
    return _Network(inputs["width"], inputs["layers"])


def _rows(inputs: Plain, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(inputs["seed"] + 10 * step + rank)
    return torch.randn(32, inputs["width"], generator=generator) + rank


class _Collectives(TorchDispatchMode):
    """Mode that notes the bytes and the dtype of each collective of floating-point numbers."""

    def __init__(self, events: list[list], types: set[str]) -> None:
        super().__init__()
        self._events = events
        self._types = types

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function.namespace == "c10d":
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            sent = {id(tensor): tensor for tensor in tensors if tensor.is_floating_point()}
            if sent:
                nbytes = sum(tensor.nbytes for tensor in sent.values())
                self._events.append([MESSAGE, nbytes])
                self._types |= {str(tensor.dtype) for tensor in sent.values()}
        return function(*args, **(kwargs or {}))


STEPS = 3
ADDED = 2  # the index of the step whose gradients are added to those of the step before
UNTRAINED = 2  # parameters: one unused and one frozen


def trained(distribute: Any, inputs: Plain) -> Plain:
    """Train in a rank for three steps with the answer.

    Return what the answer did, and the seconds and bytes of a step with the answer and with
    PyTorch's DDP.
    """
    rank = dist.get_rank()
    # cuBLAS allocates its workspaces before the measurement.
    nn.Linear(8, 8, device="cuda")(torch.ones(8, 8, device="cuda")).sum().backward()
    base = torch.cuda.memory_allocated()
    model = _network(inputs, rank).cuda()
    events: list[list] = []
    types: set[str] = set()
    for weight in model.layers.parameters():
        weight.register_post_accumulate_grad_hook(
            lambda weight: events.append([GRADIENT, weight.nbytes])
        )
    finish = distribute(model, inputs["bucket_bytes"])
    if not callable(finish):
        return {"returned": type(finish).__name__}
    start = [tensor.detach().cpu() for tensor in model.state_dict().values()]
    events.clear()
    gradients, happened, races, overlapped, waited, stopped = [], [], [], 0.0, 0.0, None
    for step in range(STEPS):
        if step != ADDED:
            model.zero_grad()
        x = _rows(inputs, rank, step).cuda()
        torch.cuda.synchronize()
        part = "backward pass"
        try:
            with record() as trace, _Collectives(events, types):
                began = host_time()
                model(x).square().mean().backward()
                backward_seconds = host_time() - began
                part = "`finish()`"
                finish()
                gradients.append(
                    [None if p.grad is None else p.grad.cpu() for p in model.parameters()]
                )
        except (AttributeError, TypeError) as error:
            if "NoneType" not in str(error):
                raise
            stopped = [step + 1, part]
            break
        happened.append(list(events))
        events.clear()
        overlapped += trace.collectives(rank)[1]
        waited = max(waited, trace.waited_for_collectives(rank, backward_seconds))
        races += [[race.first.name, race.second.name] for race in trace.races]
    told = {
        "start": _furthest(
            start, [tensor.detach() for tensor in _network(inputs, 0).state_dict().values()]
        ),
        "gradients": [
            _compared(found, mean) for found, mean in zip(gradients, _due(inputs), strict=False)
        ],
        "events": happened,
        "types": sorted(types),
    }
    if stopped:
        return told | {"stopped": stopped}
    told |= {"overlapped": overlapped, "waited": waited, "races": races}
    return told | {"own": _measured(model, finish, inputs, base), "torch": _pytorchs(inputs)}


def _due(inputs: Plain) -> list[list[torch.Tensor | None]]:
    """Return the expected gradients of each step, which are the mean over all ranks.

    They are computed on the CPU with rank 0's weights.
    """
    model, due = _network(inputs, 0), []
    for step in range(STEPS):
        if step != ADDED:
            model.zero_grad()
        for rank in range(RANKS):
            (model(_rows(inputs, rank, step)).square().mean() / RANKS).backward()
        due.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
    return due


def _furthest(found: list[torch.Tensor], due: list[torch.Tensor]) -> float:
    return max((one - other).abs().max().item() for one, other in zip(found, due, strict=True))


def _compared(found: list[torch.Tensor | None], due: list[torch.Tensor | None]) -> Plain:
    """Return the relative error of each parameter's gradient.

    "none" means a missing gradient, and "one" a gradient that should not exist.
    """
    told: Plain = []
    for one, mean in zip(found, due, strict=True):
        if one is None or mean is None:
            wrong = "none" if one is None else "one"
            told.append(0.0 if one is mean else wrong)
        else:
            told.append((one - mean).abs().max().item() / mean.abs().max().item())
    return told


def _pytorchs(inputs: Plain) -> list[float]:
    base = torch.cuda.memory_allocated()
    model = _network(inputs, 0)
    model.unused.requires_grad_(False)  # Otherwise DDP needs find_unused_parameters.
    wrapped = DistributedDataParallel(
        model.cuda(), bucket_cap_mb=inputs["bucket_bytes"] / (1 << 20)
    )
    return _measured(wrapped, lambda: None, inputs, base)


def _measured(model: nn.Module, finish: Callable[[], Any], inputs: Plain, base: int) -> list[float]:
    """Return the seconds of the third step, and the bytes at its peak above `base`.

    The bytes include those of the model.
    """
    x = _rows(inputs, dist.get_rank(), 0).cuda()
    for _ in range(3):  # PyTorch's DDP rebuilds its buckets after the first step.
        model.zero_grad()
        torch.cuda.synchronize()
        dist.all_reduce(torch.zeros(1, device="cuda"))  # Let all ranks begin together.
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = host_time()
        model(x).square().mean().backward()
        finish()
        torch.cuda.synchronize()
        taken = [host_time() - start, float(torch.cuda.max_memory_allocated() - base)]
    return taken


def observe(distribute: Any, inputs: Plain) -> Plain:
    return in_ranks(trained, distribute, [inputs] * RANKS, like=LIKE)


def judge(told: Plain, inputs: Plain) -> Verdict:
    for observed in told:
        if "returned" in observed:
            return not_yet(
                f"your function returned {observed['returned']}. Expected the function `finish`."
            )
    for rank, observed in enumerate(told):
        if not observed["start"] <= CLOSE:
            return not_yet(
                f"rank {rank} does not begin with rank 0's parameters and buffers, but "
                f"{observed['start']:.2g} away from them."
            )
    for rank, observed in enumerate(told):
        verdict = _judge_values(rank, observed, inputs)
        if verdict is None:
            verdict = _judge_messages(observed["events"], inputs)
        if verdict is not None:
            return verdict
        stopped = observed.get("stopped")
        if stopped:
            return not_yet(
                f"in the {stopped[1]} of step {stopped[0]}, rank {rank} read a gradient that was "
                "None. Is a hook called before its parameter's gradient is accumulated, or after? "
                "What is in the bucket when a step begins? Which parameter is used on no rank?"
            )
        if not observed["overlapped"] > 0:
            return not_yet(
                "no kernel ran while a message was being sent, because your code waits right after "
                "it starts a message. What is `async_op`?"
            )
        if observed["waited"] > LONGEST_WAIT:
            return not_yet(
                f"on rank {rank} the backward pass stood still for "
                f"{units.time_text(observed['waited'])}, until a message had arrived. "
                "Nothing in the backward pass needs the means. Where is the right place to wait?"
            )
        if observed["races"]:
            first, second = observed["races"][0]
            return not_yet(
                f"the values are right, but on rank {rank} nothing orders `{second}` after "
                f"`{first}`, which touched the same memory on "
                "another stream. Which stream has to wait for which?"
            )
    (own, held), (theirs, theirs_held) = told[0]["own"], told[0]["torch"]
    if not held < KEPT * theirs_held:
        most = f"{units.byte_text(int(held))} where PyTorch's DDP holds "
        most += units.byte_text(int(theirs_held))
        return not_yet(
            f"after some steps a rank holds {most}. What is kept of earlier steps? "
            "A message keeps its bucket for a while if nobody calls its `wait()`, even after "
            "`torch.cuda.synchronize()`."
        )
    return right(
        f"On {RANKS} virtual {LIKE}s, your forward and backward passes take "
        f"{units.time_text(own)} and hold at most {units.byte_text(int(held))}. With PyTorch's DDP "
        f"they take {units.time_text(theirs)} and hold {units.byte_text(int(theirs_held))}."
    )


def _judge_values(rank: int, observed: Plain, inputs: Plain) -> Verdict | None:
    size = 4 * inputs["layers"] * inputs["width"] ** 2  # bytes of the gradients
    others = [name for name in observed["types"] if name != "torch.float32"]
    for step, (gradients, events) in enumerate(
        zip(observed["gradients"], observed["events"], strict=True), start=1
    ):
        if "one" in gradients:
            return not_yet(
                f"in step {step}, rank {rank} has a gradient for a parameter that the forward pass "
                "did not use. The gradient should be None."
            )
        if "none" in gradients:
            return not_yet(
                f"in step {step}, rank {rank} has lost the gradient of a parameter. "
                "Expected the mean over all ranks."
            )
        wrong = [number for number, far in enumerate(gradients) if not far <= CLOSE]
        sent = sum(nbytes for kind, nbytes in events if kind == MESSAGE)
        if wrong and others:
            return not_yet(
                f"the gradients are float32, but rank {rank} sent numbers of {others[0]}. "
                "So the means are rounded."
            )
        if wrong and sent < size:
            of = f"in step {step}, {sent:,} of {size:,} bytes of gradients were sent on rank {rank}"
            if sent:
                return not_yet(
                    f"{of}. What sends a bucket that is not full when the backward pass is over?"
                )
            return not_yet(
                f"{of}. Is a gradient there when its hook is called? Is a bucket ever full? "
                "What sends the last bucket?"
            )
        if wrong:
            of = "all gradients are"
            if len(wrong) != len(gradients) - UNTRAINED:
                of = f"the gradients of {len(wrong)} of {len(gradients)} parameters are"
            return not_yet(
                f"after `finish()` in step {step}, {of} not the mean of all ranks' "
                f"gradients on rank {rank}. In each step, is every gradient complete when it is "
                "sent? Is it divided, and does your code wait for it before it reads it?"
            )
    return None


def _judge_messages(steps: Plain, inputs: Plain) -> Verdict | None:
    layer = 4 * inputs["width"] ** 2
    full = inputs["bucket_bytes"] // layer
    for step, events in enumerate(steps, start=1):
        sizes = [size for kind, size in events if kind == MESSAGE and size >= layer // 4]
        if max(sizes, default=0) > (full + 1) * layer:
            return not_yet(
                f"in step {step}, one message took {max(sizes):,} bytes. A bucket is full at "
                f"{inputs['bucket_bytes']:,} bytes."
            )
        if len(sizes) > inputs["layers"] // full + 1:
            return not_yet(
                f"in step {step}, {len(sizes)} messages took {layer * inputs['layers']:,} bytes "
                f"of gradients. A bucket is full at {inputs['bucket_bytes']:,} bytes, so fewer "
                "messages are enough."
            )
        waiting = 0
        for kind, size in events:
            # One more than fills it may be there when it is sent.
            if kind == GRADIENT and waiting > inputs["bucket_bytes"]:
                return not_yet(
                    f"in step {step}, {waiting:,} bytes of complete gradients had not been sent "
                    "when another gradient was complete. "
                    f"A bucket is full at {inputs['bucket_bytes']:,} bytes. "
                    "Send a full bucket at once."
                )
            waiting += size if kind == GRADIENT else -size
    return None


CHECK = Check("10.5", draw, observe, judge, children=True, section="Sending while computing")
