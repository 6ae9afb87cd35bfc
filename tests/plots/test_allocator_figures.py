"""The figures of the allocator by hand and of fragmentation: findings, words, and what is drawn."""

from dataclasses import replace

import pytest

from labkit import plots
from labkit.experiments.allocator_by_hand import HandBlock, HandSegment
from labkit.experiments.fragmentation import COLUMNS
from labkit.experiments.result import Result

MIB = 1 << 20


class Hand:
    """What the figure asks of `AllocatorByHand`."""

    badge = "measured on paper"

    def __init__(self, *segments):
        self._segments = list(segments)
        self.allocated = sum(block.size for segment in segments for block in segment.blocks if block.name)

    def segments(self):
        return self._segments


def segment(stream, *blocks):
    """From (name, MiB) pairs; "" is free."""
    offset, made = 0, []
    for name, size in blocks:
        made.append(HandBlock(int(offset * MIB), int(size * MIB), name))
        offset += size
    return HandSegment(stream, int(offset * MIB), tuple(made))


def test_blocks_are_named_where_there_is_room(drawn):
    figure = plots.allocator_by_hand(Hand(segment(0, ("A", 5), ("", 15)), segment(1, ("B", 0.25), ("", 1.75))))
    assert figure.title == "5.25 MiB allocated, 22 MiB reserved in 2 segments"
    assert "Segment of stream 0, 20 MiB: A 5 MiB, free 15 MiB. Segment of stream 1, 2 MiB: B 256 KiB, free 1.75 MiB." in figure.alt
    written = [text.get_text() for text in drawn[0].axes[0].texts]
    assert {"A  5 MiB", "free  15 MiB", "stream 1: 2 MiB"} <= set(written)
    assert "B  256 KiB" not in written


def test_nothing_and_too_much(drawn):
    assert plots.allocator_by_hand(Hand()).title == "Nothing is reserved"
    plots.allocator_by_hand(Hand(*[segment(0, ("A", size)) for size in range(10, 30)]))
    axes = drawn[1].axes[0]
    assert axes.get_xlabel() == "bytes of a segment; and 13 smaller segments"
    assert drawn[1].get_figheight() <= 4.0


def fragmented(kept="every second", **largest):
    """A result of blocks of 4 and 32 MiB with 160 MiB free, from setting=(MiB, MiB)."""
    rows = [
        {"block": block * MIB, "setting": setting, "largest": found * MIB, "free": 160 * MIB, "allocated": 160 * MIB, "reserved": 320 * MIB}
        for setting, both in largest.items()
        for block, found in zip((4, 32), both, strict=True)
    ]
    parameters = {"blocks": [4 * MIB, 32 * MIB], "kept": kept, "memory": 320 * MIB, "settings": dict.fromkeys(largest, "")}
    return Result("fragmentation", parameters, COLUMNS, rows, "measured on paper")


def test_the_worst_case_is_the_finding(drawn):
    figure = plots.fragmentation(fragmented(default=(4, 32), expandable=(4, 120)))
    assert figure.title == "160 MiB are free, and a request for more than 4 MiB fails"
    assert "Between blocks of 32 MiB the largest request that succeeds is 32 MiB with default (20% of what is free), 120 MiB" in figure.alt
    assert drawn[0].axes[0].get_xlabel() == "size of the blocks, of which every second one stays"
    assert {text.get_text() for text in drawn[0].axes[0].texts} >= {"default", "expandable", "free"}


def test_no_fragmentation_is_a_finding_too():
    assert plots.fragmentation(fragmented("the first half", default=(160, 160))).title == "All 160 MiB that are free serve one request"


def test_a_recording_is_dashed(drawn):
    result = fragmented(default=(4, 32))
    figure = plots.fragmentation(result, replace(result, badge="recorded on a GPU", origin={"machine": "a GPU"}))
    assert [line.get_linestyle() for line in drawn[0].axes[0].lines] == ["--", "-", ":"]
    assert "Recorded on a GPU: between blocks of 32 MiB" in figure.alt


@pytest.mark.parametrize("rows", [0, 1])
def test_a_run_that_was_stopped_is_drawn(rows):
    result = fragmented(default=(4, 32), other=(4, 32))
    figure = plots.fragmentation(replace(result, rows=result.rows[:rows]))
    assert figure.title == (
        "160 MiB are free, and a request for more than 4 MiB fails" if rows else "Not measured yet: the largest request that succeeds"
    )
