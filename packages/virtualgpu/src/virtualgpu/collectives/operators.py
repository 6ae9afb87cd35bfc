"""The operators of torch.distributed (`c10d::`) on virtual GPUs, through which C++ comes too: DDP's reducer, functional collectives.

Values are exactly those of gloo. A mean is gloo's sum, divided (NCCL divides first, for floating-point dtypes, and rounds otherwise).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import _DisableTorchDispatch
from torch._C import _distributed_c10d as c10d
from torch.distributed import ProcessGroup, ReduceOp

from virtualgpu.collectives.group import ProcessGroupNCCL, Transfer, read_by
from virtualgpu.collectives.nccl_errors import UNSUPPORTED_FLOAT8, check_reduction, check_tensors
from virtualgpu.collectives.profiled import record
from virtualgpu.collectives.through_host import through_host
from virtualgpu.errors import unsupported
from virtualgpu.ops.call import Call, bytes_of, different_devices, made_on
from virtualgpu.ops.without_values import all_known
from virtualgpu.tensor import VirtualTensor

Tensor = torch.Tensor
Values = list[tuple[Tensor, Tensor]]
Change = Callable[[Tensor], Tensor]
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
_OPERATORS: dict[str, Callable[[Call, ProcessGroupNCCL], Transfer]] = {}


def run(call: Call) -> Any:
    """Any operator of the namespace. Raises NotImplementedError by name for one that is missing."""
    name = call.op.name.removeprefix("c10d::")
    group, backend = _group(call)
    if name not in _OPERATORS:
        raise unsupported(f"torch.distributed's {name.strip('_')} between virtual GPUs")
    if any(type(x) is not VirtualTensor for x in call.tensors()):
        raise RuntimeError("Tensors must be CUDA and dense")
    if not call.is_on_one_gpu():
        raise different_devices(call.args, call.kwargs)
    if isinstance(backend, ProcessGroupNCCL):
        check_tensors(name, call)
    with torch.no_grad():
        transfer = _OPERATORS[name](call, backend)
        if isinstance(backend, ProcessGroupNCCL):
            if torch.autograd._profiler_enabled():
                record(name, transfer)
            is_async = call.argument("async_op")
            work = backend.run(call.gpu, transfer, is_async=is_async is None or bool(is_async))
        else:
            work = through_host(group, backend, call.gpu, transfer)
        boxed = work.boxed()
    return (call.args[0], boxed) if len(call.op.func._schema.returns) == 2 else boxed


def functional(call: Call) -> Any:
    """`_c10d_functional::`: PyTorch's own C++ (Functional.cpp), which comes back by the operators above."""
    given = call.args[0]
    with (
        made_on(call.gpu),
        call.gpu.machine.host_operators,
        read_by(len(given) if isinstance(given, list) else 1),
    ):
        return call.func.redispatch(
            torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA), *call.args, **call.kwargs
        )


def _group(call: Call) -> tuple[ProcessGroup, Any]:
    """The group, and what moves its tensors on GPUs: the virtual NCCL, or gloo itself."""
    found = call.argument("process_group")
    group = ProcessGroup.unbox(found) if isinstance(found, torch.ScriptObject) else found
    backend = group._get_backend(torch.device("cuda"))
    # With TORCH_DISTRIBUTED_DEBUG=DETAIL a wrapper compares what ranks call, as `Rendezvous` does.
    backend = getattr(backend, "wrapped_pg", backend)
    if not isinstance(backend, ProcessGroupNCCL | c10d.ProcessGroupGloo):
        raise unsupported(f"torch.distributed's backend {backend.name()} for CUDA tensors")
    return group, backend


def _operator(*names: str) -> Callable[[Any], Any]:
    def register(function: Any) -> Any:
        _OPERATORS.update(dict.fromkeys(names, function))
        return function

    return register


def private(xs: Sequence[Tensor], group: Any, raw: bool = False) -> list[Tensor]:
    """Return contiguous copies of the tensors. With `raw`, copy the memory in the order in which NCCL reads it.

    If values are not kept, the copies have the shapes alone: gloo starts at once and sends whatever they hold.
    """
    home, whole = "meta" if isinstance(group, ProcessGroupNCCL) else "cpu", torch.contiguous_format
    found = []
    with _DisableTorchDispatch():
        for x in xs:
            if all_known(x):
                found.append(
                    (_memory(x, group) if raw else x).clone(memory_format=whole).view(x.shape)
                )
            else:
                found.append(torch.empty(x.shape, dtype=x.dtype, device=home))
    return found


def _memory(x: Tensor, group: Any) -> Tensor:
    """Return the memory of a tensor as NCCL sees it: from the first element on, without strides.

    `benchmarks/fidelity/rank_strides.py` recorded on two H100s which collectives ignore strides.
    Raises RuntimeError if the storage is too short for that.
    """
    if not isinstance(group, ProcessGroupNCCL) or x.is_contiguous():
        return x
    with _DisableTorchDispatch():
        elements = x.untyped_storage().nbytes() // x.itemsize - x.storage_offset()
        if elements < x.numel():
            raise RuntimeError(
                f"NCCL ignores strides. It would use {x.numel()} consecutive elements, but only {elements} remain in this tensor's "
                "storage. A real GPU would read or overwrite the memory after it. Use contiguous tensors."
            )
        return x.as_strided((x.numel(),), (1,))


def _as_bytes(xs: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors, float8 ones as bytes: gloo has no float8."""
    return [x.view(torch.uint8) if x.dtype in _FLOAT8 else x for x in xs]


def _said(kind: str, xs: Sequence[Tensor], *more: Any) -> str:
    """What all ranks must call alike, as a reader sees it."""
    shapes = ", ".join(f"{x.numel()} x {str(x.dtype).removeprefix('torch.')}" for x in xs)
    return f"{kind}({', '.join([shapes, *map(str, more)])})"


def _options(kind: type, **values: Any) -> Any:
    options = kind()
    for name, value in values.items():
        setattr(options, name, value)
    return options


def _reduction(call: Call, group: Any) -> tuple[Any, str, Change, Change]:
    """Return the reduction as gloo knows it, its name, and what is done to each summand and to the result."""
    given: Any = call.argument("reduce_op")
    op = given.op() if hasattr(given, "op") else given
    kind = ReduceOp.RedOpType(op) if isinstance(op, int) else op
    name = getattr(kind, "name", str(kind)).rpartition(".")[2]
    dtype = call.tensors()[0].dtype
    if isinstance(group, ProcessGroupNCCL):
        check_reduction(name, dtype)
    if name == "PREMUL_SUM":  # PyTorch does not hand its factor to Python
        raise unsupported("a reduction by PREMUL_SUM")
    known, after = ReduceOp(kind), _unchanged
    if name == "AVG":
        known, ranks = ReduceOp(ReduceOp.SUM), group.size()
        rounding = None if dtype.is_floating_point or dtype.is_complex else "trunc"

        def after(x: Tensor) -> Tensor:
            return x.div_(ranks, rounding_mode=rounding)

    if dtype in UNSUPPORTED_FLOAT8:  # to NCCL these are bytes
        return known, name, lambda x: x.view(torch.uint8), lambda x: x.view(dtype)
    if dtype in _FLOAT8:  # gloo has none: added in float32, and rounded once
        return known, name, Tensor.float, after
    return known, name, _unchanged, after


def _unchanged(x: Tensor) -> Tensor:
    return x


def _all_reduce_values(group: ProcessGroupNCCL, values: list[Tensor], op: Any) -> list[Any]:
    return [
        group.allreduce([value], _options(c10d.AllreduceOptions, reduceOp=op)) for value in values
    ]


@_operator("allreduce_", "allreduce_coalesced_")
def _all_reduce(call: Call, group: ProcessGroupNCCL) -> Transfer:
    given = call.argument("tensors")
    op, name, before, after = _reduction(call, group)
    values = list(map(before, private(given, group)))

    def together() -> Any:  # as one tensor, and so in another order than one by one
        return group.allreduce_coalesced(
            values, _options(c10d.AllreduceCoalescedOptions, reduceOp=op)
        )

    return Transfer(
        "all_reduce",
        _said("all_reduce", given, name),
        sum(map(bytes_of, given)),
        given,
        given,
        start=lambda: (
            [together()]
            if len({x.dtype for x in given}) == 1 < len(given)
            else _all_reduce_values(group, values, op)
        ),
        finish=lambda: [(x, after(value)) for x, value in zip(given, values, strict=True)],
    )


@_operator("reduce_")
def _reduce(call: Call, group: ProcessGroupNCCL) -> Transfer:
    (given,), root = call.argument("tensors"), call.argument("root_rank")
    op, name, before, after = _reduction(call, group)
    values = list(map(before, private([given], group)))
    here = [given] if group.rank() == root else []
    return Transfer(
        "reduce",
        _said("reduce", [given], name, f"dst={root}"),
        bytes_of(given),
        [given],
        here,
        start=lambda: [
            group.reduce(
                values, _options(c10d.ReduceOptions, reduceOp=op, rootRank=root, rootTensor=0)
            )
        ],
        finish=lambda: [(x, after(values[0])) for x in here],
    )


@_operator("broadcast_")
def _broadcast(call: Call, group: ProcessGroupNCCL) -> Transfer:
    given, root = call.argument("tensors"), call.argument("root_rank")
    values, options = (
        private(given, group),
        _options(c10d.BroadcastOptions, rootRank=root, rootTensor=0),
    )
    return Transfer(
        "broadcast",
        _said("broadcast", given, f"src={root}"),
        sum(map(bytes_of, given)),
        given,
        given,
        start=lambda: [group.broadcast([value], options) for value in _as_bytes(values)],
        finish=lambda: list(zip(given, values, strict=True)) if group.rank() != root else [],
        written=given if group.rank() != root else [],
    )


def _one_or_more(call: Call, kind: str) -> list[Tensor]:
    """The tensors that it gets as one argument or as a list of them."""
    return (
        [call.argument(f"{kind}_tensor")]
        if f"{kind}_tensor" in call.op.arguments
        else call.argument(f"{kind}s")
    )


def _gathering(
    group: ProcessGroupNCCL, sources: list[Tensor], parts: list[list[Tensor]]
) -> Transfer:
    """All-gather of each source; `parts[i][r]` gets the i-th one of rank r."""
    values = private(sources, group)
    received = [[torch.empty(part.shape, dtype=part.dtype) for part in each] for each in parts]

    def start() -> list[Any]:
        if all(
            part.numel() == value.numel()
            for value, each in zip(values, received, strict=True)
            for part in each
        ):
            flat = [
                [part.view(value.shape) for part in each]
                for value, each in zip(values, received, strict=True)
            ]
            pairs = zip(_as_bytes(values), map(_as_bytes, flat), strict=True)
            return [
                group.allgather([each], [value], c10d.AllgatherOptions()) for value, each in pairs
            ]
        works = []  # of several sizes: each rank sends its own to all
        for value, each in zip(values, received, strict=True):
            each[group.rank()].copy_(value.view(each[group.rank()].shape))
            options = [
                _options(c10d.BroadcastOptions, rootRank=rank, rootTensor=0)
                for rank in range(group.size())
            ]
            works += [
                group.broadcast([part], option)
                for part, option in zip(_as_bytes(each), options, strict=True)
            ]
        return works

    outs = [x for each in parts for x in each]
    even = len({part.numel() for each in parts[:1] for part in each}) < 2
    return Transfer(
        "all_gather",
        _said("all_gather", sources if even else []),
        sum(map(bytes_of, sources)),
        sources,
        outs,
        start=start,
        finish=lambda: list(zip(outs, (x for each in received for x in each), strict=True)),
    )


@_operator("_allgather_base_", "allgather_into_tensor_coalesced_")
def _all_gather_into(call: Call, group: ProcessGroupNCCL) -> Transfer:
    sources, outputs = _one_or_more(call, "input"), _one_or_more(call, "output")
    if any(output.dtype != source.dtype for source, output in zip(sources, outputs, strict=True)):
        raise TypeError("output tensor must have the same type as input tensor")
    if any(
        output.numel() != source.numel() * group.size()
        for source, output in zip(sources, outputs, strict=True)
    ):
        raise ValueError("output tensor size must be equal to world_size times input tensor size")
    values, received, options = (
        private(sources, group),
        private(outputs, group),
        c10d.AllgatherOptions(),
    )
    return Transfer(
        "all_gather",
        _said("all_gather", sources),
        sum(map(bytes_of, sources)),
        sources,
        outputs,
        start=lambda: [
            group._allgather_base(x.view(-1), y.view(-1), options)
            for x, y in zip(_as_bytes(received), _as_bytes(values), strict=True)
        ],
        finish=lambda: list(zip(outputs, received, strict=True)),
    )


@_operator("allgather_")
def _all_gather(call: Call, group: ProcessGroupNCCL) -> Transfer:
    return _gathering(group, call.argument("input_tensors"), call.argument("output_tensors"))


@_operator("allgather_coalesced_")
def _all_gather_many(call: Call, group: ProcessGroupNCCL) -> Transfer:
    rows = call.argument("output_lists")  # by rank
    return _gathering(
        group, call.argument("input_list"), [list(column) for column in zip(*rows, strict=True)]
    )


@_operator("_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_")
def _reduce_scatter_into(call: Call, group: ProcessGroupNCCL) -> Transfer:
    """Reduce-scatter of whole tensors, which gloo sums in another order than lists of parts."""
    sources, outputs = _one_or_more(call, "input"), _one_or_more(call, "output")
    if any(output.dtype != source.dtype for source, output in zip(sources, outputs, strict=True)):
        raise TypeError("input tensor must be the same type as the output tensor.")
    if any(
        source.numel() != output.numel() * group.size()
        for source, output in zip(sources, outputs, strict=True)
    ):
        raise ValueError("input tensor must be the same size as output size times world size")
    op, name, before, after = _reduction(call, group)
    values, received = (
        list(map(before, private(xs, group, raw=True))) for xs in (sources, outputs)
    )
    options = _options(c10d.ReduceScatterOptions, reduceOp=op)
    return Transfer(
        "reduce_scatter",
        _said("reduce_scatter", outputs, name),
        sum(map(bytes_of, sources)),
        sources,
        outputs,
        start=lambda: [
            group._reduce_scatter_base(x.view(-1), y.view(-1), options)
            for x, y in zip(received, values, strict=True)
        ],
        finish=lambda: [
            (_memory(x, group), after(value)) for x, value in zip(outputs, received, strict=True)
        ],
    )


@_operator("reduce_scatter_")
def _reduce_scatter(call: Call, group: ProcessGroupNCCL) -> Transfer:
    """Each output gets the reduction of all ranks' parts for this rank."""
    sources, outputs = call.argument("input_tensors"), call.argument("output_tensors")
    op, name, before, after = _reduction(call, group)
    values = [list(map(before, private(each, group))) for each in sources]
    mine = group.rank()
    flat = [x for each in sources for x in each]
    return Transfer(
        "reduce_scatter",
        _said("reduce_scatter", outputs if len({x.numel() for x in flat}) < 2 else [], name),
        sum(map(bytes_of, flat)),
        flat,
        outputs,
        start=lambda: [work for each in values for work in _all_reduce_values(group, each, op)],
        finish=lambda: [(x, after(each[mine])) for x, each in zip(outputs, values, strict=True)],
    )


def _check_length(name: str, kind: str, tensors: list[Tensor], is_root: bool, group: Any) -> None:
    if is_root and len(tensors) != group.size():
        raise ValueError(
            f"ProcessGroupNCCL::{name}: Incorrect {kind} list size {len(tensors)}. "
            f"{kind.capitalize()} list size should be {group.size()}, same as size of the process group."
        )


@_operator("scatter_")
def _scatter(call: Call, group: ProcessGroupNCCL) -> Transfer:
    outputs, root = call.argument("output_tensors"), call.argument("root_rank")
    sources = (
        [x for each in call.argument("input_tensors") for x in each] if group.rank() == root else []
    )
    _check_length("scatter", "input", sources, group.rank() == root, group)
    values, received = private(sources, group, raw=True), private(outputs, group)
    own = private(
        sources[root : root + 1], group
    )  # PyTorch copies the root's own part, with its strides
    options = _options(c10d.ScatterOptions, rootRank=root)
    return Transfer(
        "broadcast",
        _said("scatter", outputs, f"src={root}"),
        sum(map(bytes_of, outputs)),
        sources,
        outputs,
        start=lambda: [
            group.scatter(_as_bytes(received), [_as_bytes(values)] if sources else [], options)
        ],
        finish=lambda: (
            list(zip(outputs, own, strict=True))
            if own
            else [(_memory(outputs[0], group), received[0])]
        ),
    )


@_operator("gather_")
def _gather(call: Call, group: ProcessGroupNCCL) -> Transfer:
    sources, root = call.argument("input_tensors"), call.argument("root_rank")
    outputs = (
        [x for each in call.argument("output_tensors") for x in each]
        if group.rank() == root
        else []
    )
    _check_length("gather", "output", outputs, group.rank() == root, group)
    values, received = private(sources, group), private(outputs, group)
    options = _options(c10d.GatherOptions, rootRank=root)
    return Transfer(
        "reduce",
        _said("gather", sources, f"dst={root}"),
        sum(map(bytes_of, sources)),
        sources,
        outputs,
        start=lambda: [
            group.gather([_as_bytes(received)] if outputs else [], _as_bytes(values), options)
        ],
        finish=lambda: [
            (
                x if rank == root else _memory(x, group),
                value,
            )  # PyTorch copies the root's own part, with its strides
            for rank, (x, value) in enumerate(zip(outputs, received, strict=True))
        ],
    )


@_operator("alltoall_base_")
def _all_to_all_single(call: Call, group: ProcessGroupNCCL) -> Transfer:
    output, source = call.argument("output"), call.argument("input")
    splits = list(call.argument("output_split_sizes")), list(call.argument("input_split_sizes"))
    (value,), (received,) = private([source], group), private([output], group)
    return Transfer(
        "all_to_all",
        _said("all_to_all", [] if splits[0] or splits[1] else [source]),
        bytes_of(source),
        [source],
        [output],
        start=lambda: [
            group.alltoall_base(*_as_bytes([received, value]), *splits, c10d.AllToAllOptions())
        ],
        finish=lambda: [(output, received)],
    )


@_operator("alltoall_")
def _all_to_all(call: Call, group: ProcessGroupNCCL) -> Transfer:
    outputs, sources = call.argument("output_tensors"), call.argument("input_tensors")
    sizes = [x.numel() for x in outputs], [x.numel() for x in sources]
    values = private(sources, group)
    received = torch.empty(sum(sizes[0]), dtype=outputs[0].dtype)

    def start() -> list[Any]:
        flat = torch.cat([value.view(-1) for value in values])
        return [group.alltoall_base(*_as_bytes([received, flat]), *sizes, c10d.AllToAllOptions())]

    return Transfer(
        "all_to_all",
        "all_to_all()",
        sum(map(bytes_of, sources)),
        sources,
        outputs,
        start=start,
        finish=lambda: list(zip(outputs, received.split(sizes[0]), strict=True)),
    )


@_operator("send")
def _send(call: Call, group: ProcessGroupNCCL) -> Transfer:
    given, there, tag = call.argument("tensors"), call.argument("dst"), call.argument("tag")
    values = private(given, group)
    itself = (
        group.to_itself if there == group.rank() else None
    )  # as in a batch it may; gloo has no such pair
    if itself is not None:
        itself.append(values)
    return Transfer(
        "send",
        _said("send", given),
        sum(map(bytes_of, given)),
        given,
        [],
        start=lambda: [group.send(_as_bytes(values), there, tag)] if itself is None else [],
        peers=(group.rank(), there),
        tag=tag,
    )


@_operator("recv_")
def _receive(call: Call, group: ProcessGroupNCCL) -> Transfer:
    given, there, tag = call.argument("tensors"), call.argument("src"), call.argument("tag")
    values = private(given, group)
    itself = group.to_itself if there == group.rank() else None

    def received() -> list[Tensor]:
        if itself is not None and not itself:
            raise torch.distributed.DistBackendError(
                f"Rank {there} waits in recv from itself, to which it has sent nothing."
            )
        return values if itself is None else itself.popleft()

    return Transfer(
        "send",
        _said("send", given),
        sum(map(bytes_of, given)),
        [],
        given,
        start=lambda: [group.recv(_as_bytes(values), there, tag)] if itself is None else [],
        finish=lambda: list(zip(given, received(), strict=True)),
        peers=(there, group.rank()),
        tag=tag,
    )


@_operator("recv_any_source_")
def _receive_from_any(call: Call, group: ProcessGroupNCCL) -> Transfer:
    raise NotImplementedError("ProcessGroupNCCL does not support recvAnysource")  # nor does NCCL


@_operator("barrier")
def _barrier(call: Call, group: ProcessGroupNCCL) -> Transfer:
    group.barrier_tensor = call.argument("tensor")
    return Transfer(
        "all_reduce", "barrier()", 4, [], [], start=lambda: [group.barrier(c10d.BarrierOptions())]
    )
