"""The tensors alive on the GPUs, by storage: those Python knows, and those that only C++ holds."""

import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import virtualgpu
from gputrace.holders.tensors import Census, alive, nbytes, shape_and_dtype

pytestmark = pytest.mark.usefixtures("small_heap")


def at(address, device=0):
    return alive().storages.get((device, address))


def test_storages_by_device_and_address():
    x = torch.ones(10, 10, device="cuda")
    y = torch.ones(3, device="cuda:1")
    view = x[2:]
    storages = alive().storages
    assert set(storages) == {(0, x.data_ptr()), (1, y.data_ptr())}
    one = storages[0, x.data_ptr()]
    assert (one.device, one.address, one.nbytes, one.key) == (
        0,
        x.data_ptr(),
        400,
        (0, x.data_ptr()),
    )
    assert any(t is view for t in one.tensors) and any(t is x for t in one.tensors)
    assert one.largest is x
    assert nbytes(view) == 320 and shape_and_dtype(view) == ((8, 10), "float32")


def test_tensors_on_the_host_are_left_out():
    there = torch.ones(3)
    assert alive().storages == {}
    assert there.device.type == "cpu"


def test_a_storage_without_a_tensor():
    storage = torch.ones(3, device="cuda").untyped_storage()
    found = at(storage.data_ptr())
    assert found.storages[0] is storage and found.largest is None


def test_a_sparse_tensor():
    values = torch.ones(2, 1000, device="cuda")
    address = values.data_ptr()
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[0, 1], [1, 2]], device="cuda"), values, (3, 3, 1000), check_invariants=False
    )
    del values
    assert any(tensor is sparse for tensor in at(address).tensors)


def test_a_tensor_that_is_made_of_others():
    class Pair(torch.Tensor):
        """Tensor subclass without memory of its own."""

        @staticmethod
        def __new__(cls, left, right):
            pair = torch.Tensor._make_wrapper_subclass(
                cls, left.shape, dtype=left.dtype, device="meta"
            )
            pair.parts = left, right
            return pair

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise AssertionError(f"the census ran {func}")

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            raise AssertionError(f"the census called {func}")

    left, right = torch.ones(3, device="cuda"), torch.ones(3, device="cuda")
    pair = Pair(left, right)
    assert set(alive().storages) == {(0, left.data_ptr()), (0, right.data_ptr())}
    del pair


def test_a_mode_that_is_on_hears_nothing():
    class Counting(torch.overrides.TorchFunctionMode):
        calls = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            Counting.calls += 1
            return func(*args, **(kwargs or {}))

    x = torch.ones(3, device="cuda", requires_grad=True)
    with torch.device("cuda"), Counting():
        Counting.calls = 0
        alive()
        Census(alive())
    assert Counting.calls == 0 and x.is_leaf


def test_gradients_and_saved_tensors():
    weight = torch.ones(4, 4, device="cuda", requires_grad=True)
    weight.sum().backward()
    loss = weight.exp().sum()
    saved = loss.grad_fn.next_functions[0][0]._saved_result.data_ptr()
    storages = alive().storages
    assert set(storages) == {
        (0, tensor)
        for tensor in (weight.data_ptr(), weight.grad.data_ptr(), saved, loss.data_ptr())
    }
    loss.backward()
    del weight.grad, storages
    # the graph is freed: nobody raises
    assert set(alive().storages) == {
        (0, weight.data_ptr()),
        (0, loss.data_ptr()),
    }


def test_hooks_on_saved_tensors_are_not_called():
    def unpack(packed):
        raise AssertionError("the census unpacked a saved tensor")

    x = torch.ones(4, device="cuda", requires_grad=True)
    hidden = x * 2
    address = hidden.data_ptr()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: ("packed", tensor), unpack):
        loss = hidden.sin().sum()
    del hidden
    assert at(address) is not None
    assert loss.requires_grad


def test_a_checkpoint_is_not_recomputed():
    calls = []

    def block(x):
        calls.append(x)
        return x.exp().sin()

    x = torch.ones(4, device="cuda", requires_grad=True)
    loss = checkpoint(block, x, use_reentrant=False).sum()
    alive()
    assert len(calls) == 1 and loss.requires_grad


def test_it_warns_of_nothing_and_takes_no_time_on_the_gpu():
    x = torch.ones(4, device="cuda", requires_grad=True)
    y = (x * 2).relu()  # not a leaf: to ask for its gradient would warn
    before = (
        virtualgpu.host_time(),
        torch.cuda.memory_allocated(),
        torch.cuda.max_memory_allocated(),
    )
    alive()
    Census(alive())
    assert before == (
        virtualgpu.host_time(),
        torch.cuda.memory_allocated(),
        torch.cuda.max_memory_allocated(),
    )
    assert y.requires_grad


def test_odd_objects_do_no_harm():
    class Broken:
        @property
        def __class__(self):
            raise RuntimeError("no class")

    odd = [Broken(), weakref.proxy(nn.Linear(1, 1)), torch.autograd.function.FunctionCtx()]
    never_applied = torch.autograd.Function.__new__(type("Never", (torch.autograd.Function,), {}))
    assert alive().storages == {}
    del odd, never_applied


def test_a_census_knows_a_storage_from_its_successor():
    x = torch.ones(1000, device="cuda")
    address = x.data_ptr()
    census = Census(alive())
    assert at(address) in census and census.alive_at((0, address)) is True
    del x
    assert census.alive_at((0, address)) is False
    later = torch.ones(1000, device="cuda")
    assert later.data_ptr() == address
    assert at(address) not in census
    assert census.alive_at((0, 1)) is None


def test_a_census_keeps_nothing_alive(no_collection):
    x = torch.ones(1000, device="cuda", requires_grad=True)
    loss = (x * 2).exp().sum()
    census = Census(alive())
    del x, loss
    assert torch.cuda.memory_allocated() == 0
    assert census.alive_at((0, 1)) is None


def test_a_machine_that_was_taken_away_holds_nothing():
    virtualgpu.use(None)
    with virtualgpu.use(gpus=1):
        left = torch.ones(3, device="cuda")
    with virtualgpu.use(gpus=1):
        x = torch.ones(3, device="cuda")
        assert left.untyped_storage().data_ptr() == x.data_ptr()
        (found,) = alive().storages.values()
        assert found.tensors[0] is x
