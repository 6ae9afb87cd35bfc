"""The blocks that a model repeats: modules of one class in a list, a sequence or a dictionary."""

from collections.abc import Iterator

from torch import nn

CONTAINERS = nn.ModuleList, nn.Sequential, nn.ModuleDict
LEAST = 0.1  # of a model's parameters, which a class of blocks has: a head of two layers has no blocks


def repeated(model: nn.Module) -> list[nn.Module]:
    """The blocks of all such lists that are in no other block: of an encoder and a decoder, of each stage of a convolutional network."""
    by_class: dict[type, list[nn.Module]] = {}
    for blocks in _lists(model):
        by_class.setdefault(type(blocks[0]), []).extend(blocks)
    least = LEAST * _size([model])
    found = (block for blocks in by_class.values() if _size(blocks) >= least for block in blocks)
    return list(dict.fromkeys(found))  # one may be there twice


def _lists(module: nn.Module) -> Iterator[list[nn.Module]]:
    children = list(module.children())
    alike = isinstance(module, CONTAINERS) and len(children) > 1 and len({type(child) for child in children}) == 1
    if alike and not isinstance(children[0], CONTAINERS) and _size(children[:1]):
        yield children
    else:
        for child in children:
            yield from _lists(child)


def _size(modules: list[nn.Module]) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())
