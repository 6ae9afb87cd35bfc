"""What C++ keeps alive for tensors: gradients and autograd graphs. No GPU is needed to see it."""

import torch

from gputrace.holders.autograd import is_node, isinstance_of, nodes, walk


def kinds(links):
    return sorted((how, type(held).__name__) for _, held, how in links)


def test_a_gradient_and_a_graph():
    x = torch.ones(3, requires_grad=True)
    x.sum().backward()
    y = (x * 2).exp()
    found, links = walk([y], [])
    saved = [("saved", "Tensor")] * 2  # of `exp` its result, of `* 2` nothing but the number
    told = kinds(links)
    assert [link for link in told if link[0] != "saved"] == [
        ("grad", "Tensor"),
        ("graph", "ExpBackward0"),
        ("next", "AccumulateGrad"),
        ("next", "MulBackward0"),
        ("variable", "Tensor"),
    ]
    assert set(told) - {link for link in told if link[0] != "saved"} == set(saved)
    assert any(tensor is x for tensor in found) and any(tensor is x.grad for tensor in found)


def test_a_freed_graph_does_not_raise():
    x = torch.ones(3, requires_grad=True)
    y = x.exp().sum()
    y.backward()
    assert ("graph", "SumBackward0") in kinds(walk([y], [])[1])


def test_a_deep_graph():
    x = y = torch.ones(1, requires_grad=True)
    for _ in range(5000):
        y = y + 1
    assert sum(how == "next" for _, _, how in walk([y], [])[1]) == 5000
    assert x.is_leaf


def test_hooks_are_seen_and_not_called():
    def unpack(packed):
        raise AssertionError("unpacked")

    x = torch.ones(3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: ("packed", tensor), unpack):
        y = x.exp()
    links = walk([y], [])[1]
    assert any(how == "saved" and type(held) is tuple for _, held, how in links)
    assert any(how == "hook" and held is unpack for _, held, how in links)


def test_hooks_on_a_node():
    x = torch.ones(3, requires_grad=True)
    node = x.exp().grad_fn

    def look(*gradients):
        return None

    node.register_hook(look)
    assert any(
        how == "hook" and look in held.values()
        for _, held, how in walk([], [node])[1]
        if isinstance(held, dict)
    )


def test_nodes_are_known_by_their_class():
    y = torch.ones(3, requires_grad=True).exp()

    class Impostor:
        next_functions = ()

    assert is_node(type(y.grad_fn)) and not is_node(Impostor) and not is_node(torch.Tensor)
    assert nodes([y, y.grad_fn, Impostor()]) == [y.grad_fn]


def test_a_class_is_told_without_asking_the_object():
    class Liar:
        __class__ = torch.Tensor

    assert isinstance(Liar(), torch.Tensor) and not isinstance_of(Liar(), torch.Tensor)
    assert isinstance_of(torch.nn.Parameter(torch.ones(1)), torch.Tensor)
