"""What keeps a tensor alive is found and called by its name: variables, errors, threads, cycles."""

import asyncio
import functools
import sys
import threading
import weakref

import pytest
import torch

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


def test_a_local_of_a_function_under_way(holders_at):
    activations = tensor()
    holder = only(holders_at(activations.data_ptr()))
    assert (holder.kind, holder.name) == ("local", "activations")
    line = sys._getframe().f_lineno - 2
    assert (
        holder.text
        == f"local `activations` of `test_a_local_of_a_function_under_way` (test_search.py:{line})"
    )


def test_an_argument_of_the_caller(holders_at):
    def inner(address):
        return holders_at(address)

    def outer(batch):
        return inner(batch.data_ptr())

    assert only(outer(tensor())).text.startswith("local `batch` of `outer` (test_search.py:")


def test_several_names_the_shortest_first(holders_at):
    x = tensor()
    keep([x])
    both = [kept, x]
    found = holders_at(x.data_ptr())
    assert [holder.name for holder in found] == ["x", "kept[0]", "both[1]"]
    assert both[0] is kept


def test_a_list_with_two_names(holders_at):
    def plant():
        x = tensor()
        keep([x])
        return x.data_ptr()

    address = plant()
    history = kept
    assert {holder.name for holder in holders_at(address)} == {"history[0]", "kept[0]"}
    assert history is kept


def test_a_variable_that_a_closure_shares_with_a_function_under_way(holders_at):
    x = tensor()

    def look():
        return x

    assert [holder.text.partition(" of ")[0] for holder in holders_at(x.data_ptr())] == [
        "local `x`",
        "closure variable `x`",
    ]
    assert look() is x


def test_a_hook_that_only_a_graph_holds(planted):
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


def train(x):
    normed = x / 2
    raise ValueError(f"no labels for {normed.shape}")


def failed(x):
    """Return the error of a training run that failed."""
    try:
        train(x)
    except ValueError as error:
        return error


def test_the_traceback_of_the_last_error(monkeypatch, holders_at, planted):
    for name in ("last_exc", "last_value"):
        monkeypatch.setattr(sys, name, None, raising=False)

    def plant():
        x = tensor()
        sys.last_value = sys.last_exc = failed(x)
        return x.data_ptr()

    found = planted(plant)
    line = train.__code__.co_firstlineno + 2
    ending = (
        f"of `train` (test_search.py:{line}), kept by the traceback of the last "
        f"exception, `sys.last_value`"
    )
    assert f"local `x` {ending}" in [holder.text for holder in found]
    assert all(holder.kind == "local" and holder.name == "x" for holder in found)
    normed = sys.last_value.__traceback__.tb_next.tb_frame.f_locals["normed"].data_ptr()
    assert only(holders_at(normed)).text == f"local `normed` {ending}"


def test_the_traceback_of_an_error_kept_by_name_and_the_error_before_it(planted):
    def plant():
        x = tensor()
        error = failed(x)
        keep(RuntimeError("no luck"))
        kept.__context__ = error
        return x.data_ptr()

    found = planted(plant)
    assert any(
        h.text.startswith("local `x` of `train`")
        and h.text.endswith(f"kept by the traceback of global `kept` of {MODULE}")
        for h in found
    )


def test_the_error_that_is_being_handled(holders_at):
    addresses = []

    def note(x):
        addresses.append(x.data_ptr())
        train(x)

    try:
        note(tensor())
    except ValueError:
        found = holders_at(addresses[0])
    assert any(
        holder.text.endswith("kept by the traceback of the exception now being handled")
        for holder in found
    )


def test_a_suspended_coroutine(holders_at):
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

    assert any(
        "local `weights` of the suspended coroutine `serve`" in holder.text
        for holder in asyncio.run(main())
    )


def test_a_thread(holders_at):
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
    assert any(
        holder.text.startswith("local `batch` of `work` (")
        and holder.text.endswith("in thread `loader`")
        for holder in found
    )
    assert "thread._args[0]" in [holder.name for holder in found]


def test_nothing_is_kept_alive_by_the_search(no_collection, holders_at):
    before = torch.cuda.memory_allocated()
    x = tensor()
    keep([x, functools.partial(print, x)])
    assert len(holders_at(x.data_ptr())) == 3
    keep(None)
    del x
    assert torch.cuda.memory_allocated() == before


def test_what_locals_gave_stays_as_it_was(holders_at):
    first = tensor()
    seen = locals()
    holders_at(first.data_ptr())
    assert seen["first"] is first


def test_objects_that_answer_anything_do_no_harm(holders_at):
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
        found = {holder.name for holder in holders_at(x.data_ptr())}
    finally:
        del sys.modules["labkit_test_gone"]
    assert found == {"x", "lazy.x"}
    assert type(gone) is weakref.ProxyType
