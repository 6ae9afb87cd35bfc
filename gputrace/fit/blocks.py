"""The blocks that a model repeats: modules of one class in a list or a sequence."""

from torch import nn


def longest_list(model: nn.Module) -> list[nn.Module]:
    """The longest list of modules of one class that have parameters."""
    return max(_lists(model), key=len, default=[])


def most_repeated(model: nn.Module) -> list[nn.Module]:
    """All modules in such lists, of the class of which they hold the most parameters."""
    by_class: dict[type, list[nn.Module]] = {}
    for blocks in _lists(model):
        by_class.setdefault(type(blocks[0]), []).extend(blocks)
    return max(by_class.values(), key=lambda blocks: sum(p.numel() for block in blocks for p in block.parameters()), default=[])


def _lists(model: nn.Module) -> list[list[nn.Module]]:
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList | nn.Sequential)]
    alike = [blocks for blocks in lists if len(blocks) > 1 and len({type(block) for block in blocks}) == 1]
    return [blocks for blocks in alike if any(True for _ in blocks[0].parameters())]
