"""Blocks that a model repeats: modules of one class in a list, a sequence or a dictionary."""

from collections.abc import Iterator

from torch import nn

CONTAINERS = nn.ModuleList, nn.Sequential, nn.ModuleDict
LEAST = 0.1  # of the model's parameters. Smaller repeated modules, such as a head, are no blocks.


def repeated(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a model, without blocks inside other blocks.

    They may be of several classes, such as the blocks of an encoder and of a decoder.
    """
    by_class: dict[type, list[nn.Module]] = {}
    for blocks in _lists(model):
        by_class.setdefault(type(blocks[0]), []).extend(blocks)
    least = LEAST * _size([model])
    found: list[nn.Module] = []
    for blocks in by_class.values():
        if _size(blocks) >= least:
            found += blocks
    return list(dict.fromkeys(found))  # each block once


def _lists(module: nn.Module) -> Iterator[list[nn.Module]]:
    """Yield the outermost containers of modules of one class, as lists."""
    children = list(module.children())
    several = isinstance(module, CONTAINERS) and len(children) > 1
    alike = several and len({type(child) for child in children}) == 1
    if alike and not isinstance(children[0], CONTAINERS) and _size(children[:1]):
        yield children
    else:
        for child in children:
            yield from _lists(child)


def _size(modules: list[nn.Module]) -> int:
    """Return the number of elements in the parameters of some modules."""
    return sum(parameter.numel() for module in modules for parameter in module.parameters())
