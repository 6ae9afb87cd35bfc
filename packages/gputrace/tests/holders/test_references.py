"""References between objects: who holds whom, the paths from names, and cycles."""

import _asyncio
import gc

import pytest

from gputrace.holders.references import Ancestors, References, Snapshot, referents, without

pytestmark = pytest.mark.usefixtures("small_heap")


class Node:
    def __init__(self, *held):
        self.held = held


def never(thing):
    return False


def test_a_path_from_a_root_and_its_length():
    leaf = Node()
    root = [0, {"leaf": leaf}]
    ancestors = Ancestors(References(Snapshot.take(), []), [leaf], never)
    (path,) = ancestors.paths([("root", root)])[id(leaf)]
    assert [thing for thing, _ in path.steps()] == [root, root[1], leaf]
    assert path.length == 2


def test_the_shortest_path_comes_first_and_each_holder_has_one():
    leaf = Node()
    near, far = [leaf], [[[leaf]]]
    ancestors = Ancestors(References(Snapshot.take(), []), [leaf], never)
    assert [path.root for path in ancestors.paths([("far", far), ("near", near)])[id(leaf)]] == [
        "near",
        "far",
    ]


def test_links_of_cplusplus_count():
    leaf, holder = Node(), Node()
    ancestors = Ancestors(References(Snapshot.take(), [(holder, leaf, "saved")]), [leaf], never)
    (path,) = ancestors.paths([("holder", holder)])[id(leaf)]
    assert path.steps() == [(holder, ""), (leaf, "saved")]


def test_the_search_ends_where_it_is_told_to():
    leaf = Node()
    middle = [leaf]
    root = [middle]
    ancestors = Ancestors(References(Snapshot.take(), []), [leaf], lambda thing: thing is middle)
    assert id(root) not in ancestors.objects and id(middle) in ancestors.objects


def test_cycles_are_told_from_what_hangs_on_them():
    first, second = Node(), Node()
    leaf = Node()
    first.other, second.other, second.leaf = second, first, leaf
    ancestors = Ancestors(References(Snapshot.take(), []), [leaf], never)
    cycle = ancestors.cycles(ancestors.above([leaf]))
    assert {id(thing) for thing in cycle if isinstance(thing, Node)} == {id(first), id(second)}
    assert ancestors.outside(cycle)  # by the variables of this test
    assert ancestors.cycles([leaf]) == []


def test_a_snapshot_leaves_nothing_behind(no_collection):
    References(Snapshot.take(), [])
    assert gc.collect() == 0


def test_without_compares_by_identity():
    one, same = [1], [1]
    assert without([one], [one, same]) == [same]


def test_freed_iterators_of_asyncio_are_not_brought_back(monkeypatch):
    """Check a bug of Python before 3.12.6, with which the next garbage collection never ends.

    `gc.get_referents(_asyncio)` triggers it.
    """
    asked = []
    real = gc.get_referents
    monkeypatch.setattr(gc, "get_referents", lambda *things: asked.extend(things) or real(*things))
    References(Snapshot([_asyncio, [1]], [1, 1]), [])
    assert not any(thing is _asyncio for thing in asked)
    assert [1] in asked
    assert referents(_asyncio) == [vars(_asyncio)]
