"""How the segments of an allocator are laid out in lines, like words on a page."""

from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from gputrace.replay import RecordedSegment

NARROW = 1 / 120  # of a line: blocks that are narrower are hard to see
SPACE = 1 / 200  # of a line, between two segments
GAP = 0.35  # of a line's height, between two groups
SHORT = 1 / 128  # of a line: segments that are shorter are hard to see


@dataclass(frozen=True)
class Piece:
    """The part of a segment in one line: its bytes from `begin` to `end`, drawn `x` bytes from the line's start."""

    segment: RecordedSegment
    begin: int
    end: int
    x: int


Line = list[Piece]


@dataclass
class Page:
    """Lines of `width` bytes for each group of segments, and the segments for which there was no room."""

    width: int
    groups: list[list[Line]]
    left_out: list[RecordedSegment] = field(default_factory=list)

    @property
    def height(self) -> float:
        """In lines, with the gaps between the groups."""
        shown = [len(lines) for lines in self.groups if lines]
        return sum(shown) + GAP * (len(shown) - 1)


def lay_out(groups: list[list[RecordedSegment]], most: float) -> Page:
    """Lay groups of segments, one or more, out in at most `most` lines with their gaps, as many bytes long as the segments need.

    Each segment has a line of its own if there are lines enough; one whose blocks would be too narrow to see goes on in the next
    lines. Else several share a line. If that is still too much, the smallest segments are left out.
    """
    groups = [sorted(group, key=lambda segment: (-segment.size, segment.address)) for group in groups]
    segments = [segment for group in groups for segment in group]
    width = max(segment.size for segment in segments)
    page = _page(groups, width, False)
    if page.height <= most:
        usual = _usual_block(segments)
        while usual < NARROW * page.width and (finer := _page(groups, page.width // 2, False)).height <= most:
            page = finer
        return page
    longest = max(width, int(np.median([segment.size for segment in segments]) / SHORT))
    width = min(max(width, sum(segment.size for segment in segments) // max(int(most), 1)), longest)  # less could not be enough
    while (page := _page(groups, width, True)).height > most and width < longest:
        width = min(int(1.1 * width) + 1, longest)
    if page.height > most:
        page = _without_smallest(groups, width, most)
    page.width = max(line[-1].x + line[-1].end - line[-1].begin for lines in page.groups for line in lines)
    return page


def _page(groups: list[list[RecordedSegment]], width: int, shared: bool) -> Page:
    return Page(width, [_lines(group, width, shared) for group in groups])


def _lines(segments: list[RecordedSegment], width: int, shared: bool) -> list[Line]:
    lines: list[Line] = []
    x = width  # where the last line ends
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
    """The size of the block in which the middle byte lies, when blocks are sorted by size."""
    sizes = sorted(block.size for segment in segments for block in segment.blocks)
    sums = list(accumulate(sizes))
    return sizes[int(np.searchsorted(sums, sums[-1] / 2))]


def _without_smallest(groups: list[list[RecordedSegment]], width: int, most: float) -> Page:
    """The page with as many of the largest segments as fit: first one of each group, then the others."""
    first = [group[0] for group in groups]
    others = [segment for group in groups for segment in group[1:]]
    order = [segment for part in (first, others) for segment in sorted(part, key=lambda segment: -segment.size)]
    kept = len(order)
    while (page := _only(groups, order[:kept], width)).height > most and kept > 1:
        kept = max(1, min(kept - 1, int(kept * most / page.height)))
    page.left_out = order[kept:]
    return page


def _only(groups: list[list[RecordedSegment]], chosen: list[RecordedSegment], width: int) -> Page:
    kept = {id(segment) for segment in chosen}
    return _page([[segment for segment in group if id(segment) in kept] for group in groups], width, True)
