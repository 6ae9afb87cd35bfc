"""Steps by hand on a virtual GPU: what each does to segments and blocks."""

import pytest
import torch

import labkit
from labkit.experiments import AllocatorByHand
from labkit.experiments.allocator_by_hand import HandBlock, HandSegment, unused_stream

MIB = 1 << 20


@pytest.fixture
def hand():
    with labkit.use(gpus=2, memory="2GiB", virtual=True, quiet=True):
        yield AllocatorByHand()


def test_requests_share_a_segment_and_leave_holes(hand):
    assert [hand.allocate(5 * MIB), hand.allocate(5 * MIB)] == ["A", "B"]
    hand.free("A")
    assert hand.segments() == [HandSegment(0, 20 * MIB, (hole(0, 5), block("B", 5, 5), hole(10, 10)))]
    assert hand.requests == {"B": 5 * MIB}
    assert (hand.allocated, hand.reserved) == (5 * MIB, 20 * MIB)
    assert hand.allocate(MIB // 2) == "A"  # the letter is free again; a small request has a segment of its own
    assert [segment.size // MIB for segment in hand.segments()] == [20, 2]


def hole(offset, size):
    return block("", offset, size)


def block(name, offset, size):
    return HandBlock(offset * MIB, size * MIB, name)


def test_steps_say_what_they_took_and_gave_back(hand):
    hand.allocate(12 * MIB, stream=2)
    hand.free("A")
    hand.allocate(12 * MIB, stream=1)
    hand.empty_cache()
    assert [(step.did, step.grown // MIB) for step in hand.steps] == [
        ("allocate A", 12),
        ("free A", 0),
        ("allocate A", 12),
        ("empty the cache", -12),
    ]
    assert [segment.stream for segment in hand.segments()] == [1]


def test_what_others_hold_and_leave_is_not_seen(hand):
    for stream in (torch.cuda.default_stream(), unused_stream()):
        with torch.cuda.stream(stream):
            other = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
            torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
        del other
    assert hand.reserved == 0
    hand.allocate(3 * MIB)
    assert hand.reserved == 20 * MIB


def test_a_request_that_fails_changes_nothing(hand):
    torch.cuda.set_per_process_memory_fraction(0.01)
    with pytest.raises(torch.OutOfMemoryError):
        hand.allocate(100 * MIB)
    assert (hand.requests, hand.steps, hand.reserved) == ({}, [], 0)


def test_a_reset_gives_everything_back(hand):
    for stream in (0, 1, 2):
        hand.allocate(MIB, stream)
    hand.reset()
    assert (hand.requests, hand.steps, torch.cuda.memory_reserved()) == ({}, [], 0)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda hand: hand.allocate(0), "0 bytes cannot be asked for here: choose 1 byte to 1024 MiB"),
        (lambda hand: hand.allocate(1, stream=3), "there is no stream 3 here: choose 0 to 2"),
        (lambda hand: hand.free("Z"), "there is no block 'Z' to free; there are none"),
        (lambda hand: [hand.allocate(1) for _ in range(27)], "26 requests are alive"),
    ],
)
def test_mistakes_are_named(hand, step, message):
    with pytest.raises(ValueError, match=message):
        step(hand)


def test_a_stream_is_unused_as_long_as_there_is_one(hand):
    tensors = []
    for _ in range(32):
        with torch.cuda.stream(unused_stream()):
            tensors.append(torch.empty(1, device="cuda"))
    with pytest.raises(RuntimeError, match="alive on all 32 streams"):
        unused_stream()


def test_without_a_gpu_it_says_so():
    with pytest.raises(RuntimeError, match="no GPU is in use"):
        AllocatorByHand()
