"""Layout of an allocator's segments in lines, like words on a page."""

from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from gputrace.replay import RecordedSegment

NARROW = 1 / 120  # of a line. Narrower blocks are hard to see.
SPACE = 1 / 200  # of a line, between two segments
GAP = 0.35  # of a line's height, between two groups
SHORT = 1 / 128  # of a line. Shorter segments are hard to see.


@dataclass(frozen=True)
class Piece:
    """Part of a segment in one line.

    It has the bytes from `begin` to `end`, and is drawn `x` bytes from the start of the line.
    """

    segment: RecordedSegment
    begin: int
    end: int
    x: int


Line = list[Piece]


@dataclass
class Page:
    """Lines for each group of segments, and the segments that do not fit.

    Attributes:
        width: the length of a line in bytes.
    """

    width: int
    groups: list[list[Line]]
    left_out: list[RecordedSegment] = field(default_factory=list)

    @property
    def height(self) -> float:
        """The height in lines, with the gaps between the groups."""
        shown = [len(lines) for lines in self.groups if lines]
        return sum(shown) + GAP * (len(shown) - 1)


def lay_out(groups: list[list[RecordedSegment]], most: float) -> Page:
    """Lay out one or more groups of segments in lines, as long as the segments need.

    Each segment has its own line if there are enough lines. If its blocks would be too narrow to
    see, it continues in the next lines. Otherwise several segments share a line. If there are still
    too many, the smallest segments are left out.

    Args:
        most: the highest number of lines, with the gaps between the groups.
    """
    groups = [
        sorted(group, key=lambda segment: (-segment.size, segment.address)) for group in groups
    ]
    segments = [segment for group in groups for segment in group]
    width = max(segment.size for segment in segments)
    page = _page(groups, width, False)
    if page.height <= most:
        usual = _usual_block(segments)
        while usual < NARROW * page.width:
            finer = _page(groups, page.width // 2, False)
            if finer.height > most:
                break
            page = finer
        return page
    sizes = [segment.size for segment in segments]
    longest = max(width, int(np.median(sizes) / SHORT))
    shortest = max(width, sum(sizes) // max(int(most), 1))  # shorter lines cannot be enough
    width = min(shortest, longest)
    page = _page(groups, width, True)
    while page.height > most and width < longest:
        width = min(int(1.1 * width) + 1, longest)
        page = _page(groups, width, True)
    if page.height > most:
        page = _without_smallest(groups, width, most)
    ends = []
    for lines in page.groups:
        for line in lines:
            ends.append(line[-1].x + line[-1].end - line[-1].begin)
    page.width = max(ends)
    return page


def _page(groups: list[list[RecordedSegment]], width: int, shared: bool) -> Page:
    """Lay out all groups in lines of `width` bytes, which segments may share."""
    return Page(width, [_lines(group, width, shared) for group in groups])


def _lines(segments: list[RecordedSegment], width: int, shared: bool) -> list[Line]:
    """Divide one group of segments into lines of `width` bytes.

    `shared` says whether several segments may be in a line.
    """
    lines: list[Line] = []
    x = width  # the end of the last line's content
    for segment in segments:
        if not shared or x + segment.size > width:
            lines.append([])
            x = 0
        for begin in range(0, segment.size, width):
            if begin:
                lines.append([])
                x = 0
            end = min(begin + width, segment.size)
            lines[-1].append(Piece(segment, begin, end, x))
            x += end - begin
        x += round(SPACE * width)
    return lines


def _usual_block(segments: list[RecordedSegment]) -> int:
    """Return the size of the block that contains the middle byte, if blocks are sorted by size."""
    sizes = sorted(block.size for segment in segments for block in segment.blocks)
    sums = list(accumulate(sizes))
    return sizes[int(np.searchsorted(sums, sums[-1] / 2))]


def _without_smallest(groups: list[list[RecordedSegment]], width: int, most: float) -> Page:
    """Lay out as many of the largest segments as fit into `most` lines of `width` bytes.

    The largest segment of each group comes first, and then the others.
    """
    first = [group[0] for group in groups]
    others = [segment for group in groups for segment in group[1:]]
    order = []
    for part in (first, others):
        order += sorted(part, key=lambda segment: -segment.size)
    kept = len(order)
    page = _only(groups, order, width)
    while page.height > most and kept > 1:
        kept = max(1, min(kept - 1, int(kept * most / page.height)))
        page = _only(groups, order[:kept], width)
    page.left_out = order[kept:]
    return page


def _only(groups: list[list[RecordedSegment]], chosen: list[RecordedSegment], width: int) -> Page:
    """Lay out only the chosen segments of the groups, in lines of `width` bytes that they share."""
    kept = {id(segment) for segment in chosen}
    shown = [[segment for segment in group if id(segment) in kept] for group in groups]
    return _page(shown, width, True)
