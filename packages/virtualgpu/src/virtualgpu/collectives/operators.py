"""The operators of torch.distributed (`c10d::`) on virtual GPUs.

DDP's reducer and functional collectives, which are in C++, call these operators, too. Values are
exactly those of gloo. A mean is gloo's sum, divided afterwards. (For floating-point dtypes, NCCL
divides first and so rounds differently.)
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch._C import _DisableTorchDispatch
from torch._C import _distributed_c10d as c10d
from torch.distributed import ProcessGroup, ReduceOp

from virtualgpu.collectives.group import ProcessGroupNCCL, Transfer, read_by
from virtualgpu.collectives.nccl_errors import (
    UNSUPPORTED_FLOAT8,
    check_ranks,
    check_reduction,
    check_tensors,
    refuse_sparse,
)
from virtualgpu.collectives.profiled import record
from virtualgpu.collectives.through_host import through_host
from virtualgpu.errors import unsupported
from virtualgpu.ops.call import Call, bytes_of, different_devices, made_on
from virtualgpu.ops.without_values import all_known
from virtualgpu.tensor import VirtualTensor

Tensor = torch.Tensor
Values = list[tuple[Tensor, Tensor]]  # tensors and their new values
Change = Callable[[Tensor], Tensor]
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
# Functions that describe the transfer of an operator, by the operator's name.
_OPERATORS: dict[str, Callable[[Call, ProcessGroupNCCL], Transfer]] = {}


def run(call: Call) -> Any:
    """Run an operator of `c10d::` and return what the operator returns.

    Raises NotImplementedError for an operator that virtual GPUs lack, and the errors of
    ProcessGroupNCCL.
    """
    name = call.op.name.removeprefix("c10d::")
    group, backend = _group(call)
    if name not in _OPERATORS:
        raise unsupported(f"torch.distributed's {name.strip('_')} between virtual GPUs")
    if any(type(x) is not VirtualTensor for x in call.tensors()):
        raise RuntimeError("Tensors must be CUDA and dense")
    if not call.is_on_one_gpu():
        raise different_devices(call.args, call.kwargs)
    if isinstance(backend, ProcessGroupNCCL):
        refuse_sparse(name, call)
        check_ranks(name, call, backend.size())
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
    if len(call.op.func._schema.returns) == 2:
        return call.args[0], boxed
    return boxed


def functional(call: Call) -> Any:
    """Run an operator of `_c10d_functional::`.

    PyTorch's own C++ (Functional.cpp) runs it and calls the operators above.
    """
    given = call.args[0]
    tensors = 1
    if isinstance(given, list):
        tensors = len(given)
    with made_on(call.gpu), call.gpu.machine.host_operators, read_by(tensors):
        return call.func.redispatch(
            torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA), *call.args, **call.kwargs
        )


def _group(call: Call) -> tuple[ProcessGroup, Any]:
    """Return (process group, its backend for tensors on GPUs) of an operator's call.

    The backend is the virtual NCCL or gloo. Raises NotImplementedError for another one.
    """
    found = call.argument("process_group")
    group = found
    if isinstance(found, torch.ScriptObject):
        group = ProcessGroup.unbox(found)
    backend = group._get_backend(torch.device("cuda"))
    # With TORCH_DISTRIBUTED_DEBUG=DETAIL, PyTorch wraps the backend to compare the ranks' calls.
    # `Rendezvous` compares them anyway.
    backend = getattr(backend, "wrapped_pg", backend)
    if not isinstance(backend, ProcessGroupNCCL | c10d.ProcessGroupGloo):
        raise unsupported(f"torch.distributed's backend {backend.name()} for CUDA tensors")
    return group, backend


def _operator(*names: str) -> Callable[[Any], Any]:
    """Return a decorator for the functions that make the transfers of these operators.

    It registers the decorated function under the names.
    """

    def register(function: Any) -> Any:
        _OPERATORS.update(dict.fromkeys(names, function))
        return function

    return register


def private(tensors: Sequence[Tensor], group: Any, raw: bool = False) -> list[Tensor]:
    """Return contiguous copies of the tensors, which gloo can send while the originals change.

    `group` is the backend that sends them. With `raw`, copy the memory in the order in which NCCL
    reads it. For tensors without values, return only their shapes: meta tensors for NCCL, and
    uninitialized CPU tensors for gloo, which starts at once and sends whatever they hold.
    """
    device = "cpu"
    if isinstance(group, ProcessGroupNCCL):
        device = "meta"
    copies = []
    with _DisableTorchDispatch():
        for x in tensors:
            if all_known(x):
                source = x
                if raw:
                    source = _memory(x, group)
                copy = source.clone(memory_format=torch.contiguous_format)
                copies.append(copy.view(x.shape))
            else:
                copies.append(torch.empty(x.shape, dtype=x.dtype, device=device))
    return copies


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
                f"NCCL ignores strides. It would use {x.numel()} consecutive elements, but only "
                f"{elements} remain in this tensor's storage. A real GPU would read or overwrite "
                "the memory after it. Use contiguous tensors."
            )
        return x.as_strided((x.numel(),), (1,))


def _as_bytes(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors, with a view as bytes in place of each float8 tensor.

    Gloo has no float8.
    """
    return [x.view(torch.uint8) if x.dtype in _FLOAT8 else x for x in tensors]


def _title(kind: str, tensors: Sequence[Tensor], *more: Any) -> str:
    """Return the text of a collective's call for error messages, such as "broadcast(4 x int64)".

    It must be the same on all ranks. `kind` is the call's name, and `more` are further arguments.
    """
    shapes = ", ".join(f"{x.numel()} x {str(x.dtype).removeprefix('torch.')}" for x in tensors)
    return f"{kind}({', '.join([shapes, *map(str, more)])})"


def _total_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(map(bytes_of, tensors))


def _options(kind: type, **values: Any) -> Any:
    """Return an object of the options class `kind` with these values as its attributes."""
    options = kind()
    for name, value in values.items():
        setattr(options, name, value)
    return options


def _same_sizes(tensors: Iterable[Tensor]) -> bool:
    return len({x.numel() for x in tensors}) < 2


def _reduction(call: Call, group: Any) -> tuple[Any, str, Change, Change]:
    """Return the parts of a reduction with gloo, for the `reduce_op` of a call.

    They are gloo's reduction, its name, the change of each summand before it, and the change of the
    result after it.
    """
    given: Any = call.argument("reduce_op")
    op = given
    if hasattr(given, "op"):
        op = given.op()
    kind = op
    if isinstance(op, int):
        kind = ReduceOp.RedOpType(op)
    name = getattr(kind, "name", str(kind)).rpartition(".")[2]
    dtype = call.tensors()[0].dtype
    if isinstance(group, ProcessGroupNCCL):
        check_reduction(name, dtype)
    if name == "PREMUL_SUM":  # PyTorch does not give its factor to Python
        raise unsupported("a reduction by PREMUL_SUM")
    known, after = ReduceOp(kind), _unchanged
    if name == "AVG":
        known, ranks = ReduceOp(ReduceOp.SUM), group.size()
        rounding = None
        if not (dtype.is_floating_point or dtype.is_complex):
            rounding = "trunc"

        def after(x: Tensor) -> Tensor:
            return x.div_(ranks, rounding_mode=rounding)

    if dtype in UNSUPPORTED_FLOAT8:  # NCCL reduces them as bytes
        return known, name, lambda x: x.view(torch.uint8), lambda x: x.view(dtype)
    if dtype in _FLOAT8:  # gloo has none, so they are added in float32 and rounded once
        return known, name, Tensor.float, after
    return known, name, _unchanged, after


def _unchanged(x: Tensor) -> Tensor:
    return x


def _all_reduce_values(group: ProcessGroupNCCL, values: list[Tensor], op: Any) -> list[Any]:
    """All-reduce each of the tensors `values` with gloo, and return gloo's works.

    `op` is gloo's reduction.
    """
    options = [_options(c10d.AllreduceOptions, reduceOp=op) for _ in values]
    return [group.allreduce([value], option) for value, option in zip(values, options, strict=True)]


@_operator("allreduce_", "allreduce_coalesced_")
def _all_reduce(call: Call, group: ProcessGroupNCCL) -> Transfer:
    """Return the transfer of an all-reduce of each tensor of the call.

    `call` has the arguments of the operator, and `group` is this rank's part of the process group.
    """
    given = call.argument("tensors")
    op, name, before, after = _reduction(call, group)
    values = list(map(before, private(given, group)))

    def start() -> list[Any]:
        if len(given) == 1 or len({x.dtype for x in given}) != 1:
            return _all_reduce_values(group, values, op)
        # Gloo reduces them as one tensor, and so in another order than one by one.
        options = _options(c10d.AllreduceCoalescedOptions, reduceOp=op)
        return [group.allreduce_coalesced(values, options)]

    return Transfer(
        "all_reduce",
        _title("all_reduce", given, name),
        _total_bytes(given),
        given,
        given,
        start=start,
        finish=lambda: [(x, after(value)) for x, value in zip(given, values, strict=True)],
    )


@_operator("reduce_")
def _reduce(call: Call, group: ProcessGroupNCCL) -> Transfer:
    """Return the transfer of a reduction of one tensor to the root rank.

    `call` has the arguments of the operator, and `group` is this rank's part of the process group.
    """
    (given,), root = call.argument("tensors"), call.argument("root_rank")
    op, name, before, after = _reduction(call, group)
    values = list(map(before, private([given], group)))
    outputs = []
    if group.rank() == root:
        outputs = [given]

    def start() -> list[Any]:
        options = _options(c10d.ReduceOptions, reduceOp=op, rootRank=root, rootTensor=0)
        return [group.reduce(values, options)]

    return Transfer(
        "reduce",
        _title("reduce", [given], name, f"dst={root}"),
        bytes_of(given),
        [given],
        outputs,
        start=start,
        finish=lambda: [(x, after(values[0])) for x in outputs],
    )


@_operator("broadcast_")
def _broadcast(call: Call, group: ProcessGroupNCCL) -> Transfer:
    """Return the transfer of a broadcast of each tensor from the root rank.

    `call` has the arguments of the operator, and `group` is this rank's part of the process group.
    """
    given, root = call.argument("tensors"), call.argument("root_rank")
    values = private(given, group)
    options = _options(c10d.BroadcastOptions, rootRank=root, rootTensor=0)
    written = []
    if group.rank() != root:
        written = given

    def finish() -> Values:
        if written:
            return list(zip(given, values, strict=True))
        return []

    return Transfer(
        "broadcast",
        _title("broadcast", given, f"src={root}"),
        _total_bytes(given),
        given,
        given,
        start=lambda: [group.broadcast([value], options) for value in _as_bytes(values)],
        finish=finish,
        written=written,
    )


def _one_or_more(call: Call, kind: str) -> list[Tensor]:
    """Return the tensors of an operator's argument for `kind`, which is "input" or "output".

    The argument is either one tensor or a list of tensors.
    """
    if f"{kind}_tensor" in call.op.arguments:
        return [call.argument(f"{kind}_tensor")]
    tensors: list[Tensor] = call.argument(f"{kind}s")
    return tensors


def _gathering(
    group: ProcessGroupNCCL, sources: list[Tensor], parts: list[list[Tensor]]
) -> Transfer:
    """Return the transfer of an all-gather of each source tensor.

    `parts[i][r]` gets rank r's source number i. Raises RuntimeError unless there is a tensor for
    each rank, and each can hold the source. NCCL does not check this, and would write outside of
    the tensors. Raises ValueError as ProcessGroupNCCL.cpp does if tensors of several sizes do not
    fit.
    """
    for source, row in zip(sources, parts, strict=True):
        if len(row) != group.size():
            raise RuntimeError(
                f"all_gather needs a list of {group.size()} tensors, one for each rank, "
                f"but got {len(row)}. A real GPU would read or write other memory."
            )
        if row[group.rank()].numel() == source.numel():
            continue
        if len({x.numel() for x in row}) > 1:
            raise ValueError(
                "Tensor input and output of _broadcast_oop must have the same number of elements "
            )
        raise RuntimeError(
            f"all_gather got tensors of {row[0].numel()} elements for a source of "
            f"{source.numel()}. A real GPU would read or write other memory."
        )
    values = private(sources, group)
    received = [[torch.empty(x.shape, dtype=x.dtype) for x in row] for row in parts]

    def start() -> list[Any]:
        rows = list(zip(values, received, strict=True))
        if all(x.numel() == value.numel() for value, row in rows for x in row):
            works = []
            for value, row in rows:
                (sent,) = _as_bytes([value])
                targets = _as_bytes(x.view(value.shape) for x in row)
                works.append(group.allgather([targets], [sent], c10d.AllgatherOptions()))
            return works
        # Gloo gathers only equal sizes. With others, each rank broadcasts its own part.
        works = []
        for value, row in rows:
            own = row[group.rank()]
            own.copy_(value.view(own.shape))
            for rank, x in enumerate(_as_bytes(row)):
                options = _options(c10d.BroadcastOptions, rootRank=rank, rootTensor=0)
                works.append(group.broadcast([x], options))
        return works

    outputs = [x for row in parts for x in row]
    # The ranks can compare their inputs only if the parts are equal.
    compared = []
    if not parts or _same_sizes(parts[0]):
        compared = sources
    return Transfer(
        "all_gather",
        _title("all_gather", compared),
        _total_bytes(sources),
        sources,
        outputs,
        start=start,
        finish=lambda: list(zip(outputs, (x for row in received for x in row), strict=True)),
    )


@_operator("_allgather_base_", "allgather_into_tensor_coalesced_")
def _all_gather_into(call: Call, group: ProcessGroupNCCL) -> Transfer:
    """Return the transfer of an all-gather of each input into one output tensor.

    `call` has the arguments of the operator, and `group` is this rank's part of the process group.
    """
    sources, outputs = _one_or_more(call, "input"), _one_or_more(call, "output")
    pairs = list(zip(sources, outputs, strict=True))
    if any(output.dtype != source.dtype for source, output in pairs):
        raise TypeError("output tensor must have the same type as input tensor")
    if any(output.numel() != source.numel() * group.size() for source, output in pairs):
        raise ValueError("output tensor size must be equal to world_size times input tensor size")
    values, received = private(sources, group), private(outputs, group)
    options = c10d.AllgatherOptions()

    def start() -> list[Any]:
        moved = zip(_as_bytes(received), _as_bytes(values), strict=True)
        return [group._allgather_base(x.view(-1), y.view(-1), options) for x, y in moved]

    return Transfer(
        "all_gather",
        _title("all_gather", sources),
        _total_bytes(sources),
        sources,
        outputs,
        start=start,
        finish=lambda: list(zip(outputs, received, strict=True)),
    )


@_operator("allgather_")
def _all_gather(call: Call, group: ProcessGroupNCCL) -> Transfer:
    """Return the transfer of an all-gather into lists of tensors, with a list for each input.

    `call` has the arguments of the operator, and `group` is this rank's part of the process group.
    """
    return _gathering(group, call.argument("input_tensors"), call.argument("output_tensors"))


@_operator("allgather_coalesced_")
def _all_gather_many(call: Call, group: ProcessGroupNCCL) -> Transfer:
    """Return the transfer of an all-gather into lists of tensors, with a list for each rank.

    `call` has the arguments of the operator, and `group` is this rank's part of the process group.
    """
    by_rank = call.argument("output_lists")
    by_input = [list(parts) for parts in zip(*by_rank, strict=True)]
    return _gathering(group, call.argument("input_list"), by_input)


@_operator("_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_")
def _reduce_scatter_into(call: Call, group: ProcessGroupNCCL) -> Transfer:
    """Return the transfer of a reduce-scatter of whole tensors.

    Gloo adds their parts in another order than those of lists.

    `call` has the arguments of the operator, and `group` is this rank's part of the process group.
    """
    sources, outputs = _one_or_more(call, "input"), _one_or_more(call, "output")
    pairs = list(zip(sources, outputs, strict=True))
    if any(output.dtype != source.dtype for source, output in pairs):
        raise TypeError("input tensor must be the same type as the output tensor.")
    if any(source.numel() != output.numel() * group.size() for source, output in pairs):
        raise ValueError("input tensor must be the same size as output size times world size")
    op, name, before, after = _reduction(call, group)
    values = list(map(before, private(sources, group, raw=True)))
    received = list(map(before, private(outputs, group, raw=True)))
    options = _options(c10d.ReduceScatterOptions, reduceOp=op)

    def start() -> list[Any]:
        moved = zip(received, values, strict=True)
        return [group._reduce_scatter_base(x.view(-1), y.view(-1), options) for x, y in moved]

    def finish() -> Values:
        results = zip(outputs, received, strict=True)
        return [(_memory(x, group), after(value)) for x, value in results]

    return Transfer(
        "reduce_scatter",
        _title("reduce_scatter", outputs, name),
        _total_bytes(sources),
        sources,
        outputs,
        start=start,
        finish=finish,
    )


@_operator("reduce_scatter_")
def _reduce_scatter(call: Call, group: ProcessGroupNCCL) -> Transfer:
    """Return the transfer of a reduce-scatter of lists of tensors.

    Each output gets the reduction of the tensors that all ranks have for this rank.

    `call` has the arguments of the operator, and `group` is this rank's part of the process group.
    """
    sources, outputs = call.argument("input_tensors"), call.argument("output_tensors")
    op, name, before, after = _reduction(call, group)
    values = [list(map(before, private(parts, group))) for parts in sources]
    mine = group.rank()
    flat = [x for parts in sources for x in parts]
    compared = []
    if _same_sizes(flat):
        compared = outputs
    return Transfer(
        "reduce_scatter",
        _title("reduce_scatter", compared, name),
        _total_bytes(flat),
        flat,
        outputs,
        start=lambda: [work for parts in values for work in _all_reduce_values(group, parts, op)],
        finish=lambda: [(x, after(parts[mine])) for x, parts in zip(outputs, values, strict=True)],
    )


def _check_length(name: str, kind: str, tensors: list[Tensor], is_root: bool, group: Any) -> None:
    """Raise ProcessGroupNCCL's ValueError unless the root has one tensor for each rank.

    `name` and `kind` are the operator and its argument, for the message. Ranks other than the root
    are not checked.
    """
    if is_root and len(tensors) != group.size():
        raise ValueError(
            f"ProcessGroupNCCL::{name}: Incorrect {kind} list size {len(tensors)}. "
            f"{kind.capitalize()} list size should be {group.size()}, same as size of the process "
            "group."
        )


@_operator("scatter_")
def _scatter(call: Call, group: ProcessGroupNCCL) -> Transfer:
    """Return the transfer of a scatter of the root's tensors, one to each rank.

    `call` has the arguments of the operator, and `group` is this rank's part of the process group.
    """
    outputs, root = call.argument("output_tensors"), call.argument("root_rank")
    is_root = group.rank() == root
    sources = []
    if is_root:
        sources = [x for row in call.argument("input_tensors") for x in row]
    _check_length("scatter", "input", sources, is_root, group)
    values, received = private(sources, group, raw=True), private(outputs, group)
    # PyTorch copies the root's own part, and heeds its strides.
    own = private(sources[root : root + 1], group)
    options = _options(c10d.ScatterOptions, rootRank=root)

    def start() -> list[Any]:
        sent = []
        if sources:
            sent = [_as_bytes(values)]
        return [group.scatter(_as_bytes(received), sent, options)]

    def finish() -> Values:
        if own:
            return list(zip(outputs, own, strict=True))
        return [(_memory(outputs[0], group), received[0])]

    return Transfer(
        "broadcast",
        _title("scatter", outputs, f"src={root}"),
        _total_bytes(outputs),
        sources,
        outputs,
        start=start,
        finish=finish,
    )


@_operator("gather_")
def _gather(call: Call, group: ProcessGroupNCCL) -> Transfer:
    """Return the transfer of a gather of one tensor of each rank at the root.

    `call` has the arguments of the operator, and `group` is this rank's part of the process group.
    """
    sources, root = call.argument("input_tensors"), call.argument("root_rank")
    is_root = group.rank() == root
    outputs = []
    if is_root:
        outputs = [x for row in call.argument("output_tensors") for x in row]
    _check_length("gather", "output", outputs, is_root, group)
    values, received = private(sources, group), private(outputs, group)
    options = _options(c10d.GatherOptions, rootRank=root)

    def start() -> list[Any]:
        targets = []
        if outputs:
            targets = [_as_bytes(received)]
        return [group.gather(targets, _as_bytes(values), options)]

    def finish() -> Values:
        results = []
        for rank, (x, value) in enumerate(zip(outputs, received, strict=True)):
            # PyTorch copies the root's own part, and heeds its strides.
            target = x
            if rank != root:
                target = _memory(x, group)
            results.append((target, value))
        return results

    return Transfer(
        "reduce",
        _title("gather", sources, f"dst={root}"),
        _total_bytes(sources),
        sources,
        outputs,
        start=start,
        finish=finish,
    )


@_operator("alltoall_base_")
def _all_to_all_single(call: Call, group: ProcessGroupNCCL) -> Transfer:
    """Return the transfer of an all-to-all of one tensor, whose rows are split among the ranks.

    Raises RuntimeError for sizes that do not fit (`checkSplitSizes` of c10d's Utils.hpp).

    `call` has the arguments of the operator, and `group` is this rank's part of the process group.
    """
    output, source = call.argument("output"), call.argument("input")
    splits = list(call.argument("output_split_sizes")), list(call.argument("input_split_sizes"))
    for sizes, x in zip((splits[1], splits[0]), (source, output), strict=True):
        if not sizes and x.shape[0] % group.size():
            raise RuntimeError("Tensor's dim 0 does not divide equally across group size")
        if sizes and len(sizes) != group.size():
            raise RuntimeError("Number of tensor splits not equal to group size")
        if sizes and sum(sizes) != x.shape[0]:
            raise RuntimeError("Split sizes doesn't match total dim 0 size")
    (value,), (received,) = private([source], group), private([output], group)
    compared = [] if splits[0] or splits[1] else [source]

    def start() -> list[Any]:
        options = c10d.AllToAllOptions()
        return [group.alltoall_base(*_as_bytes([received, value]), *splits, options)]

    return Transfer(
        "all_to_all",
        _title("all_to_all", compared),
        bytes_of(source),
        [source],
        [output],
        start=start,
        finish=lambda: [(output, received)],
    )


@_operator("alltoall_")
def _all_to_all(call: Call, group: ProcessGroupNCCL) -> Transfer:
    """Return the transfer of an all-to-all of lists, which have a tensor for each rank.

    `call` has the arguments of the operator, and `group` is this rank's part of the process group.
    """
    outputs, sources = call.argument("output_tensors"), call.argument("input_tensors")
    output_sizes, source_sizes = [x.numel() for x in outputs], [x.numel() for x in sources]
    values = private(sources, group)
    received = torch.empty(sum(output_sizes), dtype=outputs[0].dtype)

    def start() -> list[Any]:
        target, sent = _as_bytes([received, torch.cat([value.view(-1) for value in values])])
        options = c10d.AllToAllOptions()
        return [group.alltoall_base(target, sent, output_sizes, source_sizes, options)]

    return Transfer(
        "all_to_all",
        "all_to_all()",
        _total_bytes(sources),
        sources,
        outputs,
        start=start,
        finish=lambda: list(zip(outputs, received.split(output_sizes), strict=True)),
    )


@_operator("send")
def _send(call: Call, group: ProcessGroupNCCL) -> Transfer:
    """Return the transfer of a send to another rank.

    In a batch, a rank may also send to itself. Gloo cannot do this, so the group keeps the values.

    `call` has the arguments of the operator, and `group` is this rank's part of the process group.
    """
    given, target, tag = call.argument("tensors"), call.argument("dst"), call.argument("tag")
    values = private(given, group)
    to_itself = target == group.rank()
    if to_itself:
        group.to_itself.append(values)

    def start() -> list[Any]:
        if to_itself:
            return []
        return [group.send(_as_bytes(values), target, tag)]

    return Transfer(
        "send",
        _title("send", given),
        _total_bytes(given),
        given,
        [],
        start=start,
        peers=(group.rank(), target),
        tag=tag,
    )


@_operator("recv_")
def _receive(call: Call, group: ProcessGroupNCCL) -> Transfer:
    """Return the transfer of receiving a tensor from another rank.

    `call` has the arguments of the operator, and `group` is this rank's part of the process group.
    """
    given, source, tag = call.argument("tensors"), call.argument("src"), call.argument("tag")
    values = private(given, group)
    from_itself = source == group.rank()

    def start() -> list[Any]:
        if from_itself:
            return []
        return [group.recv(_as_bytes(values), source, tag)]

    def finish() -> Values:
        received = values
        if from_itself:
            if not group.to_itself:
                raise torch.distributed.DistBackendError(
                    f"Rank {source} waits in recv from itself, to which it has sent nothing."
                )
            received = group.to_itself.popleft()
        return list(zip(given, received, strict=True))

    return Transfer(
        "send",
        _title("send", given),
        _total_bytes(given),
        [],
        given,
        start=start,
        finish=finish,
        peers=(source, group.rank()),
        tag=tag,
    )


@_operator("recv_any_source_")
def _receive_from_any(call: Call, group: ProcessGroupNCCL) -> Transfer:
    """Raise ProcessGroupNCCL's error, because NCCL cannot receive from any rank."""
    raise NotImplementedError("ProcessGroupNCCL does not support recvAnysource")


@_operator("barrier")
def _barrier(call: Call, group: ProcessGroupNCCL) -> Transfer:
    """Return the transfer of a barrier, which in NCCL is an all-reduce of 4 bytes.

    `call` has the arguments of the operator, and `group` is this rank's part of the process group.
    """
    group.barrier_tensor = call.argument("tensor")
    return Transfer(
        "all_reduce", "barrier()", 4, [], [], start=lambda: [group.barrier(c10d.BarrierOptions())]
    )
