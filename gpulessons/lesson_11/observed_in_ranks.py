"""Run answers to the exercises of lesson 11 in ranks.

Ranks import no other file of the lesson.
"""

import gc
import itertools
import random
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import nn

from gpulessons.watched_collectives import LateValues, SentBytes
from labkit.checks.checking import Plain, describe


def mean_of_ranks(averaged: Any, cases: Plain) -> Plain:
    """Let the answer average each case's tensor over the ranks.

    Return the results, the bytes of each collective, and whether the answer changed the tensor.
    """
    found = []
    for case in cases:
        x = torch.tensor(case["values"][dist.get_rank()], dtype=torch.float32).reshape(
            case["shape"]
        )
        given = x.clone()
        with LateValues(), SentBytes() as sent:
            answer = averaged(x)
        calls = [[name, nbytes] for name, _, nbytes in sent.calls]
        found.append(
            {"answer": describe(answer), "changed": not torch.equal(x, given), "calls": calls}
        )
    return found


def cut_layers(two_layers: Any, case: Plain) -> Plain:
    """Return the answer for this rank's rows of the first layer and columns of the second.

    Also return the tensors that the answer changed, and the bytes that it sent.
    """
    tensors = {
        name: torch.tensor(case[name], dtype=torch.float32)
        for name in ("x", "first", "first_bias", "second", "second_bias")
    }
    own = len(case["first"]) // case["ranks"]
    mine = slice(own * case["rank"], own * (case["rank"] + 1))
    tensors |= {
        "first": tensors["first"][mine],
        "first_bias": tensors["first_bias"][mine],
        "second": tensors["second"][:, mine],
    }
    given = {name: tensor.clone() for name, tensor in tensors.items()}
    with torch.no_grad(), LateValues(), SentBytes() as sent:
        answer = two_layers(**given)
    changed = [name for name, tensor in tensors.items() if not torch.equal(tensor, given[name])]
    return describe(answer) | {"changed": changed, "sent": sent.total}


RIGHT = "right"
PICKLED = 2048  # bytes that a pickled share may have beside its numbers


def layer_backward(backward: Any, case: Plain) -> Plain:
    """Run the answer on this rank's rows of a weight, and name its gradients.

    The names say which known values the gradients are. `peak` is the most memory above that of the
    arguments, in whole weights.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(case["seed"])

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randint(-3, 4, shape, generator=generator).float().cuda()

    weight = drawn(case["outputs"], case["inputs"])
    xs, upstreams = (
        [drawn(case["rows"], width) for _ in range(ranks)]
        for width in (case["inputs"], case["outputs"])
    )
    shard, x, upstream = weight.chunk(ranks)[rank].clone(), xs[rank], upstreams[rank]
    given = [tensor.clone() for tensor in (x, shard, upstream)]
    dist.all_reduce(upstream.T @ x)  # cuBLAS takes its workspace, and keeps it
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    with torch.no_grad(), SentBytes() as sent:
        answer = backward(x, shard, upstream)
        torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - base) / weight.nbytes
    changed = [
        not torch.equal(now, before)
        for now, before in zip((x, shard, upstream), given, strict=True)
    ]
    names = [name for name, other in zip(("x", "share", "upstream"), changed, strict=True) if other]
    if not isinstance(answer, tuple | list) or [
        isinstance(part, torch.Tensor) for part in answer
    ] != [True, True]:
        return {"returned": describe(answer)["type"]}
    xs[rank], _, upstreams[rank] = given
    all_x = torch.stack([upstream @ weight for upstream in upstreams])
    whole = torch.stack([upstream.T @ x for upstream, x in zip(upstreams, xs, strict=True)])
    mean = whole.mean(0)
    parts = {
        RIGHT: mean.chunk(ranks)[rank],
        "the sum over the ranks": whole.sum(0).chunk(ranks)[rank],
        "that of this rank's data alone": whole[rank].chunk(ranks)[rank],
        "the mean, divided once more": mean.chunk(ranks)[rank] / ranks,
        "that of the whole weight": mean,
    }
    for other in set(range(ranks)) - {rank}:
        parts[f"that of rank {other}'s rows of the weight"] = mean.chunk(ranks)[other]
    of_x = {
        RIGHT: all_x[rank],
        "the mean over the ranks": all_x.mean(0),
        "the sum over the ranks": all_x.sum(0),
    }
    found = {"x": _which(answer[0], of_x), "part": _which(answer[1], parts)}
    return found | {
        "peak": peak,
        "to_all": _sends_too_much_to_all(sent, shard.nbytes),
        "changed": names,
    }


def _sends_too_much_to_all(sent: SentBytes, share: int) -> bool:
    """Return whether a rank sent more than its own rows to every rank, such as whole gradients."""
    given = {"allreduce": 0, "allgather": 0, "broadcast": 0}
    for name, _, nbytes in sent.calls:
        for kind in given:
            if kind in name.replace("_", ""):
                given[kind] += nbytes
    # every rank gives a tensor, and one of them is sent
    broadcast = given["broadcast"] / dist.get_world_size()
    return given["allreduce"] > 0 or given["allgather"] + broadcast > share + PICKLED


def _which(found: torch.Tensor, known: dict[str, torch.Tensor]) -> str:
    """Return the name of the known tensor that equals `found`, or a description of `found`."""
    for name, values in known.items():
        if (
            found.shape == values.shape
            and found.device == values.device
            and torch.allclose(found.float(), values, rtol=1e-4, atol=1e-3)
        ):
            return name
    right = known[RIGHT]
    if found.shape == right.shape:
        return "other numbers"
    return f"a tensor of {list(found.shape)} instead of {list(right.shape)}"


def adam_steps(sharded_adam: Any, case: Plain) -> Plain:
    """Run steps of the answer's Adam in a rank with a GPU, and return the counts of each step.

    The counts are: parameters with other values than after Adam, parameters that did not move, and
        gradients that changed. `drew` names the random generators whose state changed. `kept` is
        the bytes that remain, and `whole` the bytes of Adam's whole state. The parameter number
        `idle` has no gradient.
    """
    generator = torch.Generator().manual_seed(case["seed"])
    base = torch.cuda.memory_allocated()
    on_host = host_bytes()

    def drawn() -> list[torch.Tensor]:
        shapes = [(case["width"], case["width"])] * case["layers"] + [(case["width"],)]
        shapes.insert(case["idle"], (case["width"],))
        return [torch.randn(shape, generator=generator).cuda() for shape in shapes]

    model = nn.ParameterList(drawn())
    random_before = _random_states()
    step = sharded_adam(model, case["lr"])
    if not callable(step):
        return {"returned": type(step).__name__}
    trained = [number for number in range(len(model)) if number != case["idle"]]
    start, after, altered = [p.detach().cpu() for p in model], [], []
    gradients: list[list[torch.Tensor]] = []
    for _ in range(case["steps"]):
        gradients.append([gradient.cpu() for gradient in drawn()])
        for number in trained:
            model[number].grad = gradients[-1][number].cuda()
        step()
        after.append([parameter.detach().cpu() for parameter in model])
        same = [
            p.grad is not None and torch.equal(p.grad.cpu(), given)
            for p, given in zip(model, gradients[-1], strict=True)
        ]
        altered.append(
            sum(not same[number] for number in trained) + (model[case["idle"]].grad is not None)
        )
    drew = [name for name, state in _random_states().items() if state != random_before[name]]
    held = sum(tensor.nbytes for p in model for tensor in (p, p.grad) if tensor is not None)
    # those of this function
    own = sum(tensor.nbytes for tensor in itertools.chain(start, *after, *gradients))
    kept = torch.cuda.memory_allocated() - base - held + host_bytes() - on_host - own
    due = nn.ParameterList(tensor.clone() for tensor in start)
    optimizer, wrong, still = torch.optim.Adam(due.parameters(), lr=case["lr"]), [], []
    for before, found, given in zip([start, *after], after, gradients, strict=False):
        for number in trained:
            due[number].grad = given[number]
        optimizer.step()
        far = [
            (one - other.detach()).abs().max().item() for one, other in zip(found, due, strict=True)
        ]
        wrong.append(sum(not distance <= 0.01 * case["lr"] for distance in far))
        still.append(sum(torch.equal(before[number], found[number]) for number in trained))
    return {
        "wrong": wrong,
        "still": still,
        "altered": altered,
        "drew": drew,
        "kept": kept,
        "whole": 2 * sum(model[number].nbytes for number in trained),
    }


def _random_states() -> dict[str, str]:
    """Return the state of the random generators that programs share, as text."""
    of_numpy = numpy.random.get_state(legacy=False)["state"]
    return {
        "torch": repr(torch.get_rng_state().tolist()),
        "random": repr(random.getstate()),
        "NumPy": repr((of_numpy["key"].tolist(), of_numpy["pos"])),
    }


def host_bytes() -> int:
    """Return the bytes of all tensors that are alive in the host's memory."""
    gc.collect()
    alive = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
    return sum(tensor.nbytes for tensor in alive if tensor.device.type == "cpu")


def groups_of(my_groups: Any, meshes: Plain) -> Plain:
    """Return for each mesh this rank's groups, and the ranks that an all_reduce in each reaches.

    The all_reduces run only if all ranks have the expected groups.
    """
    return [_groups_in(my_groups, rows, columns) for rows, columns in meshes]


def _groups_in(my_groups: Any, rows: int, columns: int) -> Plain:
    rank, answer = dist.get_rank(), my_groups(rows, columns)
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        told: Plain = type(answer).__name__
    else:
        told = []
        for group in answer:
            if isinstance(group, dist.ProcessGroup):
                told.append(sorted(dist.get_process_group_ranks(group)))
            else:
                told.append(_no_group(group))
    everywhere: list[Plain] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, told)
    reached = []
    if all(told == due_groups(rank, rows, columns) for rank, told in enumerate(everywhere)):
        for group in answer:
            x = torch.tensor(1 << rank)
            dist.all_reduce(x, group=group)
            reached.append([other for other in range(len(everywhere)) if int(x) >> other & 1])
    return {"groups": told, "reached": reached}


def _no_group(group: Any) -> str:
    """Return a description of an answer that is not a group with this rank.

    For a group without this rank, new_group returns a special value, which is a number.
    """
    if type(group) is int and group == dist.GroupMember.NON_GROUP_MEMBER:
        return "a group of others"
    return type(group).__name__


def due_groups(rank: int, rows: int, columns: int) -> list[list[int]]:
    """Return the expected groups of a rank: the ranks of its row, and those of its column."""
    row, column = divmod(rank, columns)
    return [
        [row * columns + other for other in range(columns)],
        [other * columns + column for other in range(rows)],
    ]
