"""Which modules of a model are its blocks."""

from torch import nn

from gputrace.fit.blocks import repeated


class Block(nn.Module):
    def __init__(self, width: int = 8):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))


class Other(Block):
    pass


def kinds(model: nn.Module) -> list[str]:
    return [type(block).__name__ for block in repeated(model)]


def test_blocks_of_every_stage_count():
    """Check a ResNet, which has blocks in four sequences.

    The last one has the most parameters, and the first one makes the most activations.
    """
    stages = nn.Sequential(*(nn.Sequential(*(Block(width) for _ in range(2))) for width in (8, 16)))
    assert repeated(nn.Sequential(nn.Linear(8, 8), stages)) == [
        block for stage in stages for block in stage
    ]


def test_an_encoder_and_a_decoder_have_blocks_of_two_classes():
    both = nn.ModuleDict(
        {
            "encoder": nn.ModuleList(Block() for _ in range(2)),
            "decoder": nn.ModuleList(Other() for _ in range(2)),
        }
    )
    assert kinds(nn.Sequential(both, nn.Linear(8, 2))) == ["Block", "Block", "Other", "Other"]


def test_a_dictionary_of_layers_is_a_list_too():
    assert kinds(
        nn.Sequential(nn.ModuleDict({"one": Block(), "two": Block()}), nn.Linear(8, 2))
    ) == ["Block", "Block"]


def test_neither_what_is_inside_a_block_nor_a_small_head_is_one():
    experts = nn.Sequential(Block(), nn.ModuleList(Block() for _ in range(9)))
    assert kinds(nn.Sequential(experts, nn.Linear(8, 2))) == ["Block"] * 9
    assert (
        kinds(
            nn.ModuleList(
                [
                    nn.ModuleList(Other(32) for _ in range(4)),
                    nn.Sequential(nn.Linear(32, 8), nn.Linear(8, 2)),
                ]
            )
        )
        == ["Other"] * 4
    )


def test_a_block_that_is_there_twice_is_one():
    block = Block()
    assert repeated(nn.ModuleList([block, other := Block(), block])) == [block, other]
