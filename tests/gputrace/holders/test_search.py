"""What keeps a tensor alive is called by its name: one planted leak of each kind."""

import asyncio
import collections
import functools
import gc
import queue
import sys
import threading
import types
import weakref

import numpy
import pytest
import torch
from torch import nn

import labkit
from gputrace.holders.autograd import TELLS_SAVED
from gputrace.holders.references import Snapshot
from gputrace.holders.search import UNSEEN, holders, search
from gputrace.holders.tensors import alive

SHAPE = 256, 256
tells_saved = pytest.mark.skipif(not TELLS_SAVED, reason="this version of PyTorch does not tell what an autograd graph has saved")
kept = None  # a global of this module
MODULE = __name__


@pytest.fixture(scope="module", autouse=True)
def small_heap():
    """The objects of pytest and torch are left out of the search, which makes it quick; the modules' globals are in it."""
    with labkit.use(gpus=1, like="H200", virtual=True, quiet=True):
        gc.collect()
        gc.freeze()
        yield
        gc.unfreeze()


@pytest.fixture(autouse=True)
def forget():
    yield
    keep(None)


def keep(thing):
    global kept
    kept = thing


def tensor():
    return torch.ones(SHAPE, device="cuda")


def holders_at(address):
    """Who holds what lies at this address."""
    snapshot = Snapshot.take()
    living = alive(snapshot.objects)
    return search(snapshot, living, [living.storages[0, address]])[0]


def planted(plant, *arguments):
    """Plant a tensor with `plant`, which gives its address on the GPU, and list who holds it."""
    return holders_at(plant(*arguments))


def only(found):
    assert len(found) == 1, found
    return found[0]


def test_a_global():
    def plant():
        keep(tensor())
        return kept.data_ptr()

    holder = only(planted(plant))
    assert (holder.kind, holder.name) == ("global", "kept")
    assert holder.text == f"global `kept` of {MODULE}" == str(holder)


def test_a_local_of_a_function_under_way():
    activations = tensor()
    holder = only(holders(activations))
    assert (holder.kind, holder.name) == ("local", "activations")
    line = sys._getframe().f_lineno - 2
    assert holder.text == f"local `activations` of `test_a_local_of_a_function_under_way` (test_search.py:{line})"


def test_an_argument_of_the_caller():
    def inner(address):
        return holders_at(address)

    def outer(batch):
        return inner(batch.data_ptr())

    assert only(outer(tensor())).text.startswith("local `batch` of `outer` (test_search.py:")


@pytest.mark.parametrize(
    ("wrap", "name"),
    [
        (lambda x: [0, x], "kept[1]"),
        (lambda x: [{}, {"loss": (1, x)}], "kept[1]['loss'][1]"),
        (lambda x: {("a", 1): x}, "kept['a', 1]"),
        (lambda x: {torch.float32: x}, "kept[…]"),
        (lambda x: {x}, "kept{…}"),
        (lambda x: collections.deque([x], maxlen=3), "kept[0]"),
        (lambda x: collections.OrderedDict(a=x), "kept['a']"),
        (lambda x: collections.namedtuple("Batch", "inputs labels")(x, 1), "kept.inputs"),
        (lambda x: types.SimpleNamespace(state=types.SimpleNamespace(last=x)), "kept.state.last"),
        (lambda x: functools.partial(print, 1, x), "kept.args[1]"),
        (lambda x: functools.partial(print, end=x), "kept.keywords['end']"),
        (lambda x: x.sum, "kept.__self__"),
        (lambda x: iter([x]), "kept[…][0]"),
        (lambda x: ValueError(x), "kept.args[0]"),
        (lambda x: x.untyped_storage(), "kept"),
    ],
)
def test_inside_of_something_global(wrap, name):
    def plant():
        x = tensor()
        keep(wrap(x))
        return x.data_ptr()

    holder = only(planted(plant))
    assert (holder.kind, holder.name) == ("global", name)


def test_inside_of_a_queue():
    def plant():
        keep(queue.Queue())
        x = tensor()
        kept.put(("batch", x))
        return x.data_ptr()

    assert only(planted(plant)).name == "kept.queue[0][1]"


def test_an_attribute_in_a_slot():
    class Node:
        __slots__ = ("value",)

    def plant():
        keep(Node())
        kept.value = tensor()
        return kept.value.data_ptr()

    assert only(planted(plant)).name == "kept.value"


def test_a_key_of_a_dictionary():
    def plant():
        x = tensor()
        keep({x: 1})
        return x.data_ptr()

    assert only(planted(plant)).text == f"a key of global `kept` of {MODULE}"


def test_several_names_the_shortest_first():
    x = tensor()
    keep([x])
    both = [kept, x]
    found = holders(x)
    assert [holder.name for holder in found] == ["x", "kept[0]", "both[1]"]
    assert both[0] is kept


def test_a_list_with_two_names():
    def plant():
        x = tensor()
        keep([x])
        return x.data_ptr()

    address = plant()
    history = kept
    assert {holder.name for holder in holders_at(address)} == {"history[0]", "kept[0]"}
    assert history is kept


def test_a_closure():
    def plant():
        x = tensor()
        saved = [0, x]

        def hook():
            return saved

        keep(hook)
        return x.data_ptr()

    holder = only(planted(plant))
    assert (holder.kind, holder.name) == ("closure variable", "saved[1]")
    assert holder.text == f"closure variable `saved[1]` of global `kept` of {MODULE}"


def test_a_variable_that_a_closure_shares_with_a_function_under_way():
    x = tensor()

    def look():
        return x

    assert [holder.text.partition(" of ")[0] for holder in holders(x)] == ["local `x`", "closure variable `x`"]
    assert look() is x


def test_default_arguments():
    def plant():
        x = tensor()

        def remember(step, memory=(1, x), *, scale=x):
            return memory, scale

        keep(remember)
        return x.data_ptr()

    found = planted(plant)
    assert {(holder.kind, holder.name) for holder in found} == {("default argument", "memory[1]"), ("default argument", "scale")}


def test_an_lru_cache():
    @functools.lru_cache(maxsize=4)
    def mask(size):
        return torch.ones(size, device="cuda")

    @functools.cache
    def squared(x):
        return None

    assert only(planted(lambda: mask(SHAPE).data_ptr())).text.startswith("the lru_cache of local `mask` of `test_an_lru_cache`")

    def plant():
        x = tensor()
        squared(x)
        return x.data_ptr()

    assert only(planted(plant)).text.startswith("the lru_cache of local `squared` of")


def test_a_class_attribute():
    class Model:
        table = None

    def plant():
        Model.table = {"mask": tensor()}
        return Model.table["mask"].data_ptr()

    holder = only(planted(plant))
    assert (holder.kind, holder.name) == ("class attribute", "Model.table['mask']")
    assert holder.text.startswith("class attribute `Model.table['mask']` of `test_a_class_attribute` (test_search.py:")

    keep(type("Labels", (), {"table": tensor()}))
    assert holders(kept.table)[0].text == f"class attribute `Labels.table` of {MODULE}"


def test_parameters_buffers_and_attributes_of_a_module():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).cuda()
    model[0].cache = [tensor()]
    assert holders(model[0].weight)[0].text.startswith("local `model[0].weight` of")
    assert holders(model[0].weight)[0].text.endswith("(a parameter)")
    assert holders(model[1].running_mean)[0].text.endswith("(a buffer)")
    assert holders(model[0].cache[0])[0].name == "model[0].cache[0]"


def test_a_gradient():
    model = nn.Linear(8, 8).cuda()
    optimizer = torch.optim.Adam(model.parameters())

    def plant():
        model(torch.ones(2, 8, device="cuda")).sum().backward()
        optimizer.step()  # the parameters are keys of its state
        return model.weight.grad.data_ptr()

    holder = only(planted(plant))
    assert holder.name == "model.weight.grad"
    assert holder.text.endswith("(a gradient)")


def test_the_state_of_an_optimizer():
    model = nn.Linear(8, 8).cuda()
    optimizer = torch.optim.Adam(model.parameters())

    def plant():
        model(torch.ones(2, 8, device="cuda")).sum().backward()
        optimizer.step()
        return optimizer.state[model.bias]["exp_avg"].data_ptr()

    assert only(planted(plant)).name == "optimizer.state[1]['exp_avg']"


@pytest.mark.parametrize(
    ("register", "kind"),
    [
        ("register_forward_hook", "forward hook"),
        ("register_forward_pre_hook", "forward pre-hook"),
        ("register_full_backward_hook", "backward hook"),
        ("register_full_backward_pre_hook", "backward pre-hook"),
    ],
)
def test_a_hook_on_a_module(register, kind):
    model = nn.Sequential(nn.Linear(8, 8))

    def plant():
        seen = [tensor()]

        def look(module, *rest):
            seen.append(rest)

        getattr(model[0], register)(look)
        return seen[0].data_ptr()

    holder = only(planted(plant))
    assert (holder.kind, holder.name) == ("closure variable", "seen[0]")
    assert f" of {kind} `test_a_hook_on_a_module.<locals>.plant.<locals>.look` of local `model[0]` of" in holder.text


@pytest.mark.parametrize("leaf", [True, False])
def test_a_hook_on_a_tensor(leaf):
    def plant():
        scale = tensor()
        x = torch.ones(4, device="cuda", requires_grad=True)
        keep(x if leaf else x * 2)
        kept.register_hook(lambda gradient: gradient * scale.mean())
        return scale.data_ptr()

    found = planted(plant)
    assert found[0].name == "scale"
    assert found[0].text.startswith("closure variable `scale` of tensor hook `test_a_hook_on_a_tensor.<locals>.plant.<locals>.<lambda>` of")
    assert found[0].text.endswith(f"global `kept` of {MODULE}")


def test_a_hook_that_only_a_graph_holds():
    def plant():
        scale = tensor()
        x = torch.ones(4, device="cuda", requires_grad=True)
        doubled = x * 2
        doubled.register_hook(lambda gradient: gradient * scale.mean())
        keep(doubled.sum())
        return scale.data_ptr()

    holder = only(planted(plant))
    assert holder.kind == "C++"
    assert holder.text.endswith("that C++ holds, a hook of an autograd graph perhaps")


@tells_saved
def test_an_autograd_graph():
    def plant():
        weight = torch.ones(SHAPE, device="cuda", requires_grad=True)
        activation = weight.exp()
        keep([activation.sum()])
        return activation.data_ptr()

    holder = only(planted(plant))
    assert holder.kind == "autograd graph"
    assert holder.text == f"the autograd graph of global `kept[0]` of {MODULE} (saved by ExpBackward0)"


def test_a_leaf_that_only_a_graph_holds():
    def plant():
        weight = torch.ones(SHAPE, device="cuda", requires_grad=True)
        keep((weight + 1).sum())
        return weight.data_ptr()

    assert only(planted(plant)).text == f"the autograd graph of global `kept` of {MODULE}"


def test_a_graph_that_only_a_node_holds():
    def plant():
        weight = torch.ones(SHAPE, device="cuda", requires_grad=True)
        keep((weight + 1).grad_fn)
        return weight.data_ptr()

    assert only(planted(plant)).text == f"the autograd graph of global `kept` of {MODULE}"


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x * 3)
        ctx.scale = {"factor": x * 5}
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


@tells_saved
def test_what_a_function_of_ones_own_saves():
    def plant(saved):
        x = torch.ones(SHAPE, device="cuda", requires_grad=True)
        keep(Doubled.apply(x))
        node = kept.grad_fn
        return (node.saved_tensors[0] if saved else node.scale["factor"]).data_ptr()

    assert only(planted(plant, True)).text == f"the autograd graph of global `kept` of {MODULE} (saved by DoubledBackward)"
    holder = only(planted(plant, False))
    assert (holder.kind, holder.name) == ("attribute", "ctx.scale['factor']")
    assert holder.text.endswith(f" of DoubledBackward in the autograd graph of global `kept` of {MODULE}")


def test_a_small_view_keeps_a_large_tensor():
    def plant():
        large = torch.ones(1000, 1000, device="cuda")
        keep(large[:1, :1])
        return large.data_ptr()

    assert only(planted(plant)).text == f"global `kept` of {MODULE}, a view of 4 B that keeps all 3.815 MiB"


def train(x):
    normed = x / 2
    raise ValueError(f"no labels for {normed.shape}")


def failed(x):
    """The error of a training run that failed."""
    try:
        train(x)
    except ValueError as error:
        return error


def test_the_traceback_of_the_last_error(monkeypatch):
    for name in ("last_exc", "last_value"):
        monkeypatch.setattr(sys, name, None, raising=False)

    def plant():
        x = tensor()
        sys.last_value = sys.last_exc = failed(x)
        return x.data_ptr()

    found = planted(plant)
    line = train.__code__.co_firstlineno + 2
    ending = f"of `train` (test_search.py:{line}), kept by the traceback of the last exception, `sys.last_value`"
    assert f"local `x` {ending}" in [holder.text for holder in found]
    assert all(holder.kind == "local" and holder.name == "x" for holder in found)
    normed = sys.last_value.__traceback__.tb_next.tb_frame.f_locals["normed"].data_ptr()
    assert only(holders_at(normed)).text == f"local `normed` {ending}"


def test_the_traceback_of_an_error_kept_by_name_and_the_error_before_it():
    def plant():
        x = tensor()
        error = failed(x)
        keep(RuntimeError("no luck"))
        kept.__context__ = error
        return x.data_ptr()

    found = planted(plant)
    assert any(
        h.text.startswith("local `x` of `train`") and h.text.endswith(f"kept by the traceback of global `kept` of {MODULE}") for h in found
    )


def test_the_error_that_is_being_handled():
    addresses = []

    def note(x):
        addresses.append(x.data_ptr())
        train(x)

    try:
        note(tensor())
    except ValueError:
        found = holders_at(addresses[0])
    assert any(holder.text.endswith("kept by the traceback of the exception now being handled") for holder in found)


def test_a_suspended_generator():
    def batches():
        batch = tensor()
        yield batch.data_ptr()
        yield batch

    loader = batches()
    holder = only(holders_at(next(loader)))
    assert (holder.kind, holder.name) == ("local", "batch")
    assert " of the suspended generator `batches` (test_search.py:" in holder.text
    assert "held by local `loader` of `test_a_suspended_generator`" in holder.text


def test_a_suspended_coroutine():
    addresses = []

    async def serve():
        weights = tensor()
        addresses.append(weights.data_ptr())
        await asyncio.sleep(60)
        return weights

    async def main():
        task = asyncio.create_task(serve())
        await asyncio.sleep(0)
        found = holders_at(addresses[0])
        task.cancel()
        return found

    assert any("local `weights` of the suspended coroutine `serve`" in holder.text for holder in asyncio.run(main()))


def test_a_thread():
    started, ended = threading.Event(), threading.Event()

    def work(batch):
        started.set()
        ended.wait()

    thread = threading.Thread(target=work, args=(tensor(),), name="loader")
    address = thread._args[0].data_ptr()
    thread.start()
    started.wait()
    found = holders_at(address)
    ended.set()
    thread.join()
    assert any(holder.text.startswith("local `batch` of `work` (") and holder.text.endswith("in thread `loader`") for holder in found)
    assert "thread._args[0]" in [holder.name for holder in found]


def test_the_callback_of_a_weak_reference():
    class Node:
        pass

    node = Node()

    def plant():
        x = tensor()
        keep(weakref.ref(node, lambda gone: x))
        return x.data_ptr()

    assert only(planted(plant)).text == f"closure variable `x` of global `kept.__callback__` of {MODULE}"


def test_a_reference_cycle():
    class Tree:
        pass

    def plant():
        tree = Tree()
        tree.root, tree.value = tree, tensor()
        return tree.value.data_ptr()

    gc.disable()
    try:
        holder = only(planted(plant))
    finally:
        gc.enable()
    assert holder.kind == "reference cycle"
    assert holder.text == "a reference cycle of test_a_reference_cycle.<locals>.Tree, not yet collected: gc.collect() frees it"


def test_a_cycle_through_an_autograd_graph():
    def plant():
        x = torch.ones(SHAPE, device="cuda", requires_grad=True)
        doubled = Doubled.apply(x)
        doubled.grad_fn.result = doubled
        return doubled.data_ptr()

    gc.disable()
    try:
        holder = only(planted(plant))
    finally:
        gc.enable()
    assert holder.text.startswith("a reference cycle of DoubledBackward and Tensor")
    assert holder.text.endswith("through an autograd graph, which gc.collect() may not see")


def test_a_container_that_the_collector_does_not_see():
    def plant():
        keep(numpy.empty(1, dtype=object))
        kept[0] = tensor()
        return kept[0].data_ptr()

    assert only(planted(plant)) == UNSEEN


def test_nothing_is_kept_alive_by_the_search():
    gc.collect()
    gc.disable()
    try:
        before = torch.cuda.memory_allocated()
        x = tensor()
        keep([x, functools.partial(print, x)])
        assert len(holders(x)) == 3
        keep(None)
        del x
        assert torch.cuda.memory_allocated() == before
    finally:
        gc.enable()


def test_what_locals_gave_stays_as_it_was():
    first = tensor()
    seen = locals()
    holders(first)
    assert seen["first"] is first


def test_objects_that_answer_anything_do_no_harm():
    class Lazy:
        @property
        def __class__(self):
            raise RuntimeError("not loaded")

        def __getattr__(self, name):
            raise RuntimeError("not loaded")

        def __eq__(self, other):
            raise RuntimeError("not loaded")

        __hash__ = None

    lazy, gone = Lazy(), weakref.proxy(Lazy())
    object.__getattribute__(lazy, "__dict__")["x"] = x = tensor()
    sys.modules["labkit_test_gone"] = None
    try:
        found = {holder.name for holder in holders(x)}
    finally:
        del sys.modules["labkit_test_gone"]
    assert found == {"x", "lazy.x"}
    assert type(gone) is weakref.ProxyType


def test_a_tensor_without_memory_on_a_gpu_is_refused():
    with pytest.raises(ValueError, match="give one on a CUDA device"):
        holders(torch.ones(3))
