"""Layout of segments in lines: no block is lost, none overlap, and most can be seen."""

from hypothesis import given
from hypothesis import strategies as st

from gputrace.figures.layout import GAP, lay_out
from gputrace.replay import RecordedBlock, RecordedSegment

MIB = 1 << 20


def segment(size: int, address: int = 0, block: int | None = None) -> RecordedSegment:
    """Return a segment of blocks of one size."""
    block = block or size
    blocks = [
        RecordedBlock(address + at, block, block, "allocated") for at in range(0, size, block)
    ]
    return RecordedSegment(0, address, size, 0, False, False, blocks)


def pieces(page):
    return [piece for lines in page.groups for line in lines for piece in line]


sizes = st.lists(st.integers(1, 300), min_size=1, max_size=60)


@given(st.lists(sizes, min_size=1, max_size=4), st.integers(2, 25))
def test_all_that_is_not_left_out_is_there_once_and_side_by_side(groups, most):
    page = lay_out(
        [[segment(size, 1000 * i) for i, size in enumerate(group)] for group in groups], most
    )
    assert page.height <= max(most, 1)
    shown = sum(piece.end - piece.begin for piece in pieces(page))
    assert shown + sum(segment.size for segment in page.left_out) == sum(map(sum, groups))
    for lines in page.groups:
        for line in lines:
            ends = 0
            for piece in line:
                assert ends <= piece.x
                ends = piece.x + piece.end - piece.begin
            assert ends <= page.width


def test_few_segments_have_a_line_each_the_largest_first():
    page = lay_out([[segment(2 * MIB), segment(20 * MIB, 1), segment(8 * MIB, 2)]], 10)
    assert [[piece.segment.size // MIB for piece in line] for line in page.groups[0]] == [
        [20],
        [8],
        [2],
    ]
    assert page.width == 20 * MIB


def test_groups_have_a_gap_between_them():
    assert lay_out([[segment(MIB)], [segment(MIB)]], 10).height == 2 + GAP


def test_a_long_segment_of_narrow_blocks_goes_on_in_the_next_lines():
    page = lay_out([[segment(4096 * MIB, block=2 * MIB)]], 16)
    assert page.width == 256 * MIB
    assert [(line[0].begin, line[0].end) for line in page.groups[0]][:2] == [
        (0, 256 * MIB),
        (256 * MIB, 512 * MIB),
    ]
    assert len(lay_out([[segment(4096 * MIB)]], 16).groups[0]) == 1


def test_many_segments_share_lines_and_too_many_are_left_out_the_smallest_first():
    hundred = lay_out([[segment(20 * MIB, i) for i in range(100)]], 10)
    assert not hundred.left_out and len(hundred.groups[0]) == 10
    small = [segment(MIB, i) for i in range(5000)]
    page = lay_out([[segment(30 * MIB, 9), *small]], 10)
    assert page.left_out and {segment.size for segment in page.left_out} == {MIB}
    assert pieces(page)[0].segment.size == 30 * MIB


def test_every_group_is_seen_while_there_are_lines():
    page = lay_out([[segment(20 * MIB, i) for i in range(5000)], [segment(MIB)]], 6)
    assert all(page.groups)
    crowd = lay_out([[segment(size * MIB)] for size in range(1, 10)], 4)
    assert [bool(lines) for lines in crowd.groups] == [False] * 6 + [True] * 3
