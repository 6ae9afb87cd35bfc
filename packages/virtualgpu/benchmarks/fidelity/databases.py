"""What each of PyTorch's operators asks of the allocator, in the calls that PyTorch's own databases of operators and modules make.

    databases.py OUT.json [PART OF]            record, on a real GPU or under `labkit run`: part 0 of 4, and so on
    databases.py --compare h200/databases.json.gz OUT.json ...

The databases come in torch's wheel (torch.testing._internal, which needs the package expecttest). Every sample is run forward, and backward
from its sum and from its squares. Each operator's allocations and frees are noted between two calls, in the order of time and in bytes;
what a call is known by is the operator with its arguments' types, shapes and strides. Compared are the calls that both have made: other
versions of torch have other samples, and drawn numbers decide some sizes. Sizes count as the allocator's blocks of 512 bytes.
"""

import gc
import gzip
import itertools
import json
import signal
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

SAMPLES = 5
SECONDS = 40  # a case may take
BLOCK = 512
Calls = dict[str, dict[str, list[list[int]]]]  # by operator and arguments: the sequences of sizes that were seen


class Watch(TorchDispatchMode):
    """Notes what every operator asks for."""

    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        torch.cuda.synchronize()
        torch.cuda.memory._record_memory_history(max_entries=3000, context=None)
        sizes = []
        try:
            return func(*args, **(kwargs or {}))
        finally:
            torch.cuda.synchronize()
            trace = torch.cuda.memory._snapshot()["device_traces"][0]
            torch.cuda.memory._record_memory_history(enabled=None)
            signs = {"alloc": 1, "free_completed": -1}
            sizes = [signs[event["action"]] * event["size"] for event in trace if event["action"] in signs]
            seen = self.calls[str(func)].setdefault(json.dumps([form(args), form(list((kwargs or {}).items()))]), [])
            if sizes not in seen:
                seen.append(sizes)


def form(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        strides = list(x.stride()) if x.layout is torch.strided else str(x.layout)
        return [str(x.dtype)[6:], list(x.shape), strides, x.device.type]
    return [form(y) for y in x] if isinstance(x, (list, tuple)) else repr(x)[:60]


def tensors(x: Any) -> Iterator[torch.Tensor]:
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, (list, tuple, dict)):
        for y in x.values() if isinstance(x, dict) else x:
            yield from tensors(y)


def mapped(x: Any, function: Callable) -> Any:
    if isinstance(x, torch.Tensor):
        return function(x)
    if isinstance(x, dict):
        return {key: mapped(y, function) for key, y in x.items()}
    if isinstance(x, (list, tuple)):
        parts = [mapped(y, function) for y in x]
        return type(x)(*parts) if hasattr(x, "_fields") else type(x)(parts)
    return x


def backward(y: Any, squares: bool) -> None:
    parts = [t.abs() if t.is_complex() else t for t in tensors(y) if t.requires_grad and t.numel()]
    sums = [(t.float() * t.float().detach()).sum() if squares else t.sum() for t in parts]
    if sums:
        sum(sums[1:], sums[0]).backward()


def of_operators(part: int, of: int) -> Iterator[tuple[Callable[[], Any], list]]:
    """Functions to run, each with the tensors whose gradients are to be cleared."""
    from torch.testing._internal.common_methods_invocations import op_db

    for op in op_db[part::of]:
        kinds = op.supported_dtypes("cuda")
        first = next((d for d in (torch.float32, torch.int64, torch.bool, torch.complex64) if d in kinds), None)
        for dtype in dict.fromkeys([first, *(d for d in (torch.float16, torch.complex64) if d in kinds)]):
            if dtype is None:
                continue
            grad = op.supports_autograd and dtype.is_floating_point
            samples = op.sample_inputs("cuda", dtype, requires_grad=grad)
            for s, squares in itertools.product(itertools.islice(samples, SAMPLES if dtype is first else 2), (False, True)[: 1 + grad]):

                def run(op: Any = op, s: Any = s, squares: bool = squares, grad: bool = grad) -> Any:
                    torch.manual_seed(0)
                    y = op(s.input, *s.args, **s.kwargs)
                    if grad:
                        backward(y if s.output_process_fn_grad is None else s.output_process_fn_grad(y), squares)
                    return y

                yield run, [s.input, list(s.args), s.kwargs]


def of_modules(part: int, of: int) -> Iterator[tuple[Callable[[], Any], list]]:
    from torch.testing._internal.common_modules import module_db

    for info, dtype, train in itertools.product(module_db[part::of], (torch.float32, torch.float16, torch.bfloat16), (True, False)):
        try:
            samples = list(itertools.islice(info.module_inputs_func(info, "cpu", dtype, True, train), SAMPLES))
        except Exception:  # a type that the module's samples do not know
            continue
        for given in samples:
            made, called = given.constructor_input, given.forward_input
            torch.manual_seed(0)
            settings = mapped(made.args, torch.Tensor.cuda), mapped(made.kwargs, torch.Tensor.cuda)
            try:
                net = info.module_cls(*settings[0], **settings[1]).to("cuda", dtype).train(train)
            except Exception:
                continue
            args, kwargs = (mapped(x, lambda t: t.detach().cuda().requires_grad_(t.requires_grad)) for x in (called.args, called.kwargs))

            def run(net: Any = net, args: Any = args, kwargs: Any = kwargs) -> Any:
                y = net(*args, **kwargs)
                backward(y, False)
                return y

            yield run, [list(net.parameters()), args, kwargs]


def _clear(inputs: Any) -> None:
    for t in tensors(inputs):
        t.grad = None


def record(part: int, of: int) -> Calls:
    calls: Calls = defaultdict(dict)

    def slow(*_: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, slow)
    gc.disable()  # nothing is to be freed in the middle of another's call
    for run, inputs in itertools.chain(of_operators(part, of), of_modules(part, of)):
        signal.alarm(SECONDS)
        try:
            run()  # once before: libraries and workspaces
            _clear(inputs)
            with Watch(calls):
                run()
        except Exception:  # what is refused here is counted elsewhere
            pass
        signal.alarm(0)
        _clear(inputs)
    return calls


def blocks(sizes: list[int]) -> tuple[int, ...]:
    return tuple((-1 if size < 0 else 1) * -(-abs(size) // BLOCK) for size in sizes if size)


def peak(sizes: tuple[int, ...]) -> int:
    return max(itertools.accumulate(sizes, initial=0))


def compare(recording: Calls, mine: Calls) -> Iterator[str]:
    """A line for each operator that differs, then a summary."""
    total = same = peaks = 0
    for name, calls in sorted(recording.items()):
        both = [(calls[key], mine[name][key]) for key in calls if key in mine.get(name, {})]
        equal = [{*map(blocks, a)} & {*map(blocks, b)} != set() for a, b in both]
        alike = [{*map(peak, map(blocks, a))} & {*map(peak, map(blocks, b))} != set() for a, b in both]
        total, same, peaks = total + len(both), same + sum(equal), peaks + sum(alike)
        if not all(equal):
            yield f"{name} | {len(both) - sum(equal)} of {len(both)}, peaks {len(both) - sum(alike)}"
    yield f"{total} calls: same sequence {same} = {100 * same / total:.1f}%, same peak {peaks} = {100 * peaks / total:.1f}%"


def content(path: Path) -> bytes:
    return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()


def main() -> None:
    warnings.simplefilter("ignore")
    if sys.argv[1] == "--compare":
        recording, *found = (json.loads(content(Path(path)))["calls"] for path in sys.argv[2:])
        mine: Calls = defaultdict(dict)
        for calls in found:
            for name, by_arguments in calls.items():
                mine[name] |= by_arguments
        print("\n".join(compare(recording, mine)))
        return
    out, part, of = sys.argv[1], *(map(int, sys.argv[2:4]) if len(sys.argv) > 3 else (0, 1))
    torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")
    calls = record(part, of)
    Path(out).write_text(json.dumps({"torch": torch.__version__, "device": torch.cuda.get_device_name(), "calls": calls}), encoding="utf-8")


if __name__ == "__main__":
    main()
