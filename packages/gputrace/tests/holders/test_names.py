"""The names of what keeps a tensor alive, from a global on: one planted leak of each kind."""

import collections
import functools
import queue
import types
import weakref

import numpy
import pytest
import torch
from torch import nn

from gputrace.holders.search import UNSEEN

SHAPE = 256, 256
kept = None  # a global of this module
MODULE = __name__
pytestmark = pytest.mark.usefixtures("small_heap")


@pytest.fixture(autouse=True)
def forget():
    yield
    keep(None)


def keep(thing):
    global kept
    kept = thing


def tensor():
    return torch.ones(SHAPE, device="cuda")


def only(found):
    assert len(found) == 1, found
    return found[0]


def in_queue(x):
    found = queue.Queue()
    found.put(("batch", x))
    return found


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


def in_closure(x):
    saved = [0, x]
    return lambda: saved


def in_results(x):
    held = [x]
    cached = functools.lru_cache(maxsize=4)(lambda: held.pop())
    cached()
    return cached


def in_arguments(x):
    cached = functools.cache(lambda argument: None)
    cached(x)
    return cached


def in_array(x):
    found = numpy.empty(1, dtype=object)
    found[0] = x
    return found


def in_generator(x):
    def batches(batch):
        yield
        yield batch

    found = batches(x)
    next(found)
    return found


def weight():
    return torch.ones(SHAPE, device="cuda", requires_grad=True)


@pytest.mark.parametrize(
    ("wrap", "text"),
    [
        (lambda x: x, "global `kept` of {}"),
        (lambda x: [0, x], "global `kept[1]` of {}"),
        (lambda x: [{}, {"loss": (1, x)}], "global `kept[1]['loss'][1]` of {}"),
        (lambda x: {("a", 1): x}, "global `kept['a', 1]` of {}"),
        (lambda x: {torch.float32: x}, "global `kept[…]` of {}"),
        (lambda x: {x: 1}, "a key of global `kept` of {}"),
        (lambda x: {x}, "global `kept{{…}}` of {}"),
        (lambda x: collections.deque([x], maxlen=3), "global `kept[0]` of {}"),
        (lambda x: collections.OrderedDict(a=x), "global `kept['a']` of {}"),
        (
            lambda x: collections.namedtuple("Batch", "inputs labels")(x, 1),
            "global `kept.inputs` of {}",
        ),
        (
            lambda x: types.SimpleNamespace(state=types.SimpleNamespace(last=x)),
            "global `kept.state.last` of {}",
        ),
        (lambda x: functools.partial(print, 1, x), "global `kept.args[1]` of {}"),
        (lambda x: functools.partial(print, end=x), "global `kept.keywords['end']` of {}"),
        (lambda x: x.sum, "global `kept.__self__` of {}"),
        (lambda x: iter([x]), "global `kept[…][0]` of {}"),
        (lambda x: ValueError(x), "global `kept.args[0]` of {}"),
        (lambda x: x.untyped_storage(), "global `kept` of {}"),
        (lambda x: x[:1, :1], "global `kept` of {}, a view of 4 B that keeps all 256 KiB"),
        (in_queue, "global `kept.queue[0][1]` of {}"),
        (Slotted, "global `kept.value` of {}"),
        (in_closure, "closure variable `saved[1]` of global `kept` of {}"),
        (
            lambda x: weakref.ref(keep, lambda gone: x),
            "closure variable `x` of global `kept.__callback__` of {}",
        ),
        (in_results, "the lru_cache of global `kept` of {}"),
        (in_arguments, "the lru_cache of global `kept` of {}"),
        (
            lambda x: type("Labels", (), {"table": {"mask": x}}),
            "class attribute `Labels.table['mask']` of {}",
        ),
        (
            in_generator,
            f"local `batch` of the suspended generator `batches` "
            f"(test_names.py:{in_generator.__code__.co_firstlineno + 2}), "
            "held by global `kept` of {}",
        ),
        (
            lambda x: [(weight() * x).sum()],
            "the autograd graph of global `kept[0]` of {} (saved by MulBackward0)",
        ),
        (lambda x: (x.requires_grad_() + 1).sum(), "the autograd graph of global `kept` of {}"),
        (lambda x: (x.requires_grad_() + 1).grad_fn, "the autograd graph of global `kept` of {}"),
        (in_array, UNSEEN.text),
    ],
)
def test_what_a_global_leads_to(wrap, text, planted):
    def plant():
        x = tensor()
        keep(wrap(x))
        return x.data_ptr()

    holder = only(planted(plant))
    assert holder.text == str(holder) == text.format(MODULE)
    assert (f"{holder.kind} `{holder.name}`" if holder.name else holder.kind) in holder.text


def test_default_arguments(planted):
    def plant():
        x = tensor()

        def remember(step, memory=(1, x), *, scale=x):
            return memory, scale

        keep(remember)
        return x.data_ptr()

    found = planted(plant)
    assert {(holder.kind, holder.name) for holder in found} == {
        ("default argument", "memory[1]"),
        ("default argument", "scale"),
    }


def test_a_class_attribute(planted, holders_at):
    class Model:
        table = None

    def plant():
        Model.table = {"mask": tensor()}
        return Model.table["mask"].data_ptr()

    holder = only(planted(plant))
    assert (holder.kind, holder.name) == ("class attribute", "Model.table['mask']")
    assert holder.text.startswith(
        "class attribute `Model.table['mask']` of `test_a_class_attribute` (test_names.py:"
    )

    keep(type("Labels", (), {"table": tensor()}))
    assert (
        holders_at(kept.table.data_ptr())[0].text == f"class attribute `Labels.table` of {MODULE}"
    )


def test_parameters_buffers_and_attributes_of_a_module(holders_at):
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).cuda()
    model[0].cache = [tensor()]
    assert holders_at(model[0].weight.data_ptr())[0].text.startswith("local `model[0].weight` of")
    assert holders_at(model[0].weight.data_ptr())[0].text.endswith("(a parameter)")
    assert holders_at(model[1].running_mean.data_ptr())[0].text.endswith("(a buffer)")
    assert holders_at(model[0].cache[0].data_ptr())[0].name == "model[0].cache[0]"


@pytest.mark.parametrize(
    ("trained", "name", "remark"),
    [
        (lambda model, optimizer: model.weight.grad, "model.weight.grad", "(a gradient)"),
        (
            lambda model, optimizer: optimizer.state[model.bias]["exp_avg"],
            "optimizer.state[1]['exp_avg']",
            "",
        ),
    ],
)
def test_a_gradient_and_the_state_of_an_optimizer(trained, name, remark, planted):
    model = nn.Linear(8, 8).cuda()
    optimizer = torch.optim.Adam(model.parameters())

    def plant():
        model(torch.ones(2, 8, device="cuda")).sum().backward()
        optimizer.step()  # the parameters are keys of its state
        return trained(model, optimizer).data_ptr()

    holder = only(planted(plant))
    assert holder.name == name and holder.text.endswith(remark)


@pytest.mark.parametrize(
    ("register", "kind"),
    [
        ("register_forward_hook", "forward hook"),
        ("register_forward_pre_hook", "forward pre-hook"),
        ("register_full_backward_hook", "backward hook"),
        ("register_full_backward_pre_hook", "backward pre-hook"),
    ],
)
def test_a_hook_on_a_module(register, kind, planted):
    model = nn.Sequential(nn.Linear(8, 8))

    def plant():
        seen = [tensor()]

        def look(module, *rest):
            seen.append(rest)

        getattr(model[0], register)(look)
        return seen[0].data_ptr()

    holder = only(planted(plant))
    assert (holder.kind, holder.name) == ("closure variable", "seen[0]")
    assert (
        f" of {kind} `test_a_hook_on_a_module.<locals>.plant.<locals>.look` of local `model[0]` of"
        in holder.text
    )


@pytest.mark.parametrize("leaf", [True, False])
def test_a_hook_on_a_tensor(leaf, planted):
    def plant():
        scale = tensor()
        x = torch.ones(4, device="cuda", requires_grad=True)
        keep(x if leaf else x * 2)
        kept.register_hook(lambda gradient: gradient * scale.mean())
        return scale.data_ptr()

    found = planted(plant)
    assert found[0].name == "scale"
    assert found[0].text.startswith(
        "closure variable `scale` of tensor hook "
        "`test_a_hook_on_a_tensor.<locals>.plant.<locals>.<lambda>` of"
    )
    assert found[0].text.endswith(f"global `kept` of {MODULE}")


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x * 3)
        ctx.scale = {"factor": x * 5}
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def test_what_a_function_of_ones_own_saves(planted):
    def plant(saved):
        x = torch.ones(SHAPE, device="cuda", requires_grad=True)
        keep(Doubled.apply(x))
        node = kept.grad_fn
        return (node.saved_tensors[0] if saved else node.scale["factor"]).data_ptr()

    assert (
        only(planted(plant, True)).text
        == f"the autograd graph of global `kept` of {MODULE} (saved by DoubledBackward)"
    )
    holder = only(planted(plant, False))
    assert (holder.kind, holder.name) == ("attribute", "ctx.scale['factor']")
    assert holder.text.endswith(
        f" of DoubledBackward in the autograd graph of global `kept` of {MODULE}"
    )


def cycle_of_objects():
    first, second = Slotted(None), Slotted(tensor())
    first.value = [first, second]
    return second.value.data_ptr()


def cycle_through_a_graph():
    doubled = Doubled.apply(weight())
    doubled.grad_fn.result = doubled
    return doubled.data_ptr()


@pytest.mark.parametrize(
    ("plant", "start", "end"),
    [
        (
            cycle_of_objects,
            "a reference cycle of Slotted,",
            "not yet collected: gc.collect() frees it",
        ),
        (
            cycle_through_a_graph,
            "a reference cycle of DoubledBackward and Tensor",
            "an autograd graph, which gc.collect() may not see",
        ),
    ],
)
def test_a_reference_cycle(no_collection, plant, start, end, planted):
    holder = only(planted(plant))
    assert (
        holder.kind == "reference cycle"
        and holder.text.startswith(start)
        and holder.text.endswith(end)
    )
