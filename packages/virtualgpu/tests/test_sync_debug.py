"""Warnings and errors of `torch.cuda.set_sync_debug_mode` are those of PyTorch on CUDA.

The table is that of PyTorch's own test of this mode, with additions.
"""

import io
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from virtualgpu import errors
from virtualgpu.sync_debug import PROTOTYPE, WAITS, SyncDebug


@pytest.fixture(autouse=True)
def used(machine) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", PROTOTYPE)
        torch.cuda.set_sync_debug_mode("default")
    yield
    torch.cuda.set_sync_debug_mode("default")


def warned(work: Callable[[], object]) -> list[warnings.WarningMessage]:
    """Return the warnings of synchronization during some work."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert {str(w.message) for w in caught} <= {WAITS} and {w.category for w in caught} <= {
        UserWarning
    }
    return caught


def on_gpu() -> dict[str, torch.Tensor]:
    x = torch.arange(4.0, device="cuda")
    ind, mask = torch.tensor([0, 3, 1], device="cuda"), x > 1
    found = {
        "x": x,
        "y": x[1].clone(),
        "ind": ind,
        "mask": mask,
        "ind_cpu": ind.cpu(),
        "mask_cpu": mask.cpu(),
    }
    found |= {
        "repeats": torch.full((1,), 2, device="cuda"),
        "host": torch.ones(4),
        "locked": torch.ones(4).pin_memory(),
    }
    found["parameter"] = torch.ones(4, device="cuda", requires_grad=True)
    return found


def put(x: torch.Tensor, index: torch.Tensor, value: object) -> None:
    x[index] = value


SILENT = {
    "fill under a mask": lambda x, mask, **_: put(x, mask, 1.0),
    "put on the GPU": lambda x, ind, y, **_: put(x, ind, y),
    "index on the GPU": lambda x, ind, **_: x[ind],
    "one_hot of known classes": lambda ind, **_: nn.functional.one_hot(ind, num_classes=4),
    "randperm": lambda **_: torch.randperm(20000, device="cuda"),
    "repeat a number of times": lambda x, **_: torch.repeat_interleave(x, 2, output_size=8),
    "repeat to a known size": lambda x, repeats, **_: torch.repeat_interleave(
        x, repeats, output_size=8
    ),
    "any": lambda y, **_: torch.any(y),
    "full": lambda **_: torch.full((), 3.14, device="cuda"),
    "operators": lambda x, **_: (x * 2).sum() + 1,
    "from pinned memory, not blocking": lambda locked, **_: locked.to("cuda", non_blocking=True),
    "from pageable memory, not blocking": lambda host, **_: host.to("cuda", non_blocking=True),
    "to the host, not blocking": lambda x, **_: x.to("cpu", non_blocking=True),
    "to another GPU": lambda x, **_: x.to("cuda:1"),
    "torch.cuda.synchronize": lambda **_: torch.cuda.synchronize(),
    "torch.accelerator.synchronize": lambda **_: torch.accelerator.synchronize(),
    "Event.synchronize": lambda **_: torch.cuda.current_stream().record_event().synchronize(),
    "wait_stream": lambda **_: torch.cuda.Stream().wait_stream(torch.cuda.current_stream()),
    "query": lambda **_: torch.cuda.current_stream().query(),
    "backward": lambda parameter, **_: (parameter * 2).sum().backward(),
}
WAITING = {
    "put under a mask": lambda x, mask, y, **_: put(x, mask, y),
    "put at the host's positions": lambda x, ind_cpu, y, **_: put(x, ind_cpu, y),
    "index by a mask": lambda x, mask, **_: x[mask],
    "index by the host's positions": lambda x, ind_cpu, **_: x[ind_cpu],
    "nonzero": lambda x, **_: x.nonzero(),
    "truth": lambda y, **_: bool(y),
    "one_hot": lambda ind, **_: nn.functional.one_hot(ind),
    "repeat": lambda x, repeats, **_: torch.repeat_interleave(x, repeats),
    "item": lambda y, **_: y.item(),
    "int": lambda y, **_: int(y),
    "float": lambda y, **_: float(y),
    "cpu": lambda x, **_: x.cpu(),
    "cpu, recorded": lambda parameter, **_: parameter.cpu(),
    "tolist": lambda x, **_: x.tolist(),
    "repr": lambda x, **_: repr(x),
    "format": lambda y, **_: f"{y:.1f}",
    "to the GPU": lambda host, **_: host.cuda(),
    "from pinned memory": lambda locked, **_: locked.cuda(),
    "torch.tensor": lambda **_: torch.tensor(3.14, device="cuda"),
    "copy_ from the host": lambda x, host, **_: x.copy_(host),
    "copy_ to the host": lambda x, host, **_: host.copy_(x),
    "masked_select": lambda x, mask, **_: x.masked_select(mask),
    "unique": lambda x, **_: x.unique(),
    "unique_consecutive": lambda x, **_: x.unique_consecutive(),
    "bincount": lambda ind, **_: torch.bincount(ind),
    "gradient of prod": lambda parameter, **_: parameter.prod(-1).sum().backward(),
    "gradient of cumprod": lambda parameter, **_: parameter.cumprod(-1).sum().backward(),
    "equal": lambda x, **_: torch.equal(x, x + 0),
    "allclose": lambda x, **_: torch.allclose(x, x),
    "Stream.synchronize": lambda **_: torch.cuda.current_stream().synchronize(),
}
(SILENT if errors.VERSION >= (2, 9) else WAITING).update(
    {
        "index by the host's mask": lambda x, mask_cpu, **_: x[mask_cpu],
        "put under the host's mask": lambda x, mask_cpu, y, **_: put(x, mask_cpu, y),
    }
)
# PyTorch fills from then on, and passes the number with the kernel
(SILENT if errors.VERSION >= (2, 15) else WAITING).update(
    {"put the host's number": lambda x, ind, **_: put(x, ind, 1.0)}
)


@pytest.mark.parametrize("name", SILENT)
def test_nothing_is_said_of(name):
    given = on_gpu()
    assert not warned(lambda: SILENT[name](**given))
    torch.cuda.set_sync_debug_mode("error")
    SILENT[name](**given)


@pytest.mark.parametrize("name", WAITING)
def test_the_host_waits_for(name):
    given = on_gpu()
    assert warned(lambda: WAITING[name](**given))
    torch.cuda.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError) as told:
        WAITING[name](**given)
    assert str(told.value) == WAITS
    torch.cuda.set_sync_debug_mode("default")
    WAITING[name](**given)


def test_the_warning_names_the_line_that_called():
    x = torch.ones(3, device="cuda", requires_grad=True)

    def wait_four_times():
        x.sum().item()
        x.cpu()
        x.detach().nonzero()
        torch.cuda.current_stream().synchronize()

    lines = warned(wait_four_times)
    here = wait_four_times.__code__
    assert {w.filename for w in lines} == {here.co_filename}
    assert [w.lineno - here.co_firstlineno for w in lines] == [1, 2, 3, 4]


def test_a_line_is_named_once():
    x = torch.ones((), device="cuda")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        torch.cuda.set_sync_debug_mode("warn")
        for _ in range(3):
            x.item()
    assert [str(w.message) for w in caught] == [WAITS]


def test_what_raises_changes_nothing():
    x, host = torch.ones(3, device="cuda"), torch.zeros(3)
    torch.cuda.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match=WAITS):
        host.copy_(x)
    with pytest.raises(RuntimeError, match=WAITS):
        x.copy_(host)
    torch.cuda.set_sync_debug_mode("default")
    assert host.tolist() == [0.0] * 3 and x.tolist() == [1.0] * 3


def test_the_mode_is_that_of_all_threads():
    x = torch.ones((), device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match=WAITS):
        pool.submit(x.item).result()


@pytest.mark.parametrize(
    ("mode", "number"), [("default", 0), ("warn", 1), ("error", 2), (0, 0), (1, 1), (2, 2)]
)
def test_modes(mode, number):
    torch.cuda.set_sync_debug_mode(mode)
    assert torch.cuda.get_sync_debug_mode() == number


@pytest.mark.parametrize("mode", [3, -1, "loud", True, None])
def test_modes_that_are_none(mode):
    torch.cuda.set_sync_debug_mode("warn")
    with pytest.raises(RuntimeError, match="invalid (value|argument)"):
        torch.cuda.set_sync_debug_mode(mode)
    assert torch.cuda.get_sync_debug_mode() == 1


def test_the_first_use_warns_that_the_mode_is_a_prototype():
    mode = SyncDebug()
    with pytest.warns(UserWarning, match=PROTOTYPE) as caught:
        mode.set(1)
    assert caught[0].filename == __file__
    mode.set(0)


def _in_old_format(x: torch.Tensor) -> None:
    torch.save(x, io.BytesIO(), _use_new_zipfile_serialization=False)


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.untyped_storage().cpu(),
        lambda x: x.untyped_storage()[0],
        lambda x: x.untyped_storage().tolist(),
        lambda x: list(x.untyped_storage()),
        lambda x: x.untyped_storage().to(device="cpu"),
        lambda x: torch.UntypedStorage(x.nbytes).copy_(x.untyped_storage()),
        lambda x: torch.save(x, io.BytesIO()),
        _in_old_format,
    ],
)
def test_the_host_waits_for_the_bytes_of_a_storage(read):
    x = torch.ones(4, device="cuda")
    assert len(warned(lambda: read(x))) == 1


def test_work_with_a_storage_takes_the_time_of_its_operators():
    x = torch.ones(1 << 23, device="cuda")
    content, storage = x.view(torch.uint8), x.untyped_storage()
    other = torch.empty_like(x, device="cuda:1").untyped_storage()
    for by_storage, by_tensor in [
        (lambda: storage.fill_(0), lambda: content.fill_(0)),
        (lambda: storage.clone(), lambda: content.clone()),
        (lambda: other.copy_(storage), lambda: content.to("cuda:1")),
        (lambda: storage.cpu(), lambda: content.cpu()),
    ]:
        times = []
        for work in (by_tensor, by_storage):
            work()  # allocates memory from the driver, which takes time
            torch.cuda.synchronize()
            torch.cuda.synchronize(1)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            work()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        assert times[1] > 0.8 * times[0]
    storage[3] = 7
    assert storage[3] == 7 and storage[:4].tolist() == [0, 0, 0, 7]
