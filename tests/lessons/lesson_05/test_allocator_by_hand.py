"""The allocator by hand: the requests, the figure of the segments, and the lab."""

import pytest
import torch

import labkit
from gpulessons.lesson_05.labs import AllocatorByHand, AllocatorLab, plot_allocator_by_hand
from gpulessons.lesson_05.labs.allocator_by_hand import HandBlock, HandSegment, unused_stream
from labkit import progress_file

MIB = 1 << 20


@pytest.fixture
def hand():
    with labkit.use(gpus=2, memory="2GiB", virtual=True, quiet=True):
        yield AllocatorByHand()


def test_requests_share_a_segment_and_leave_holes(hand):
    assert [hand.allocate(5 * MIB), hand.allocate(5 * MIB)] == ["A", "B"]
    hand.free("A")
    assert hand.segments() == [
        HandSegment(0, 20 * MIB, (hole(0, 5), block("B", 5, 5), hole(10, 10)))
    ]
    assert hand.requests == {"B": 5 * MIB}
    assert (hand.allocated, hand.reserved) == (5 * MIB, 20 * MIB)
    # the letter A is not used again at once; a small request has a segment of its own
    assert hand.allocate(MIB // 2) == "C"
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
        ("allocate B", 12),
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
        (lambda hand: hand.allocate(0), "expected a size of 1 byte to 1024 MiB, got 0 bytes"),
        (lambda hand: hand.allocate(1, stream=3), "expected a stream from 0 to 2, got 3"),
        (lambda hand: hand.free("Z"), "there is no block 'Z' to free. Blocks in use: none."),
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
    with pytest.raises(RuntimeError, match="all 32 streams of this GPU have tensors"):
        unused_stream()


def test_without_a_gpu_it_says_so():
    with pytest.raises(RuntimeError, match="no GPU is in use"):
        AllocatorByHand()


class Hand:
    """Replacement of `AllocatorByHand`, with the attributes that the figure needs."""

    badge = "measured on paper"

    def __init__(self, *segments):
        self._segments = list(segments)
        self.allocated = sum(
            block.size for segment in segments for block in segment.blocks if block.name
        )

    def segments(self):
        return self._segments


def segment(stream, *blocks):
    """Return a segment from (name, MiB) pairs. The name "" means a free block."""
    offset, made = 0, []
    for name, size in blocks:
        made.append(HandBlock(int(offset * MIB), int(size * MIB), name))
        offset += size
    return HandSegment(stream, int(offset * MIB), tuple(made))


def test_blocks_are_named_where_there_is_room(drawn):
    figure = plot_allocator_by_hand(
        Hand(segment(0, ("A", 5), ("", 15)), segment(1, ("B", 0.25), ("", 1.75)))
    )
    assert figure.title == "5.25 MiB allocated, 22 MiB reserved in 2 segments"
    assert "Segment of stream 0, 20 MiB: A 5 MiB, free 15 MiB." in figure.alt
    assert "Segment of stream 1, 2 MiB: B 256 KiB, free 1.75 MiB." in figure.alt
    written = [text.get_text() for text in drawn[0].axes[0].texts]
    assert {"A  5 MiB", "free  15 MiB", "stream 1: 2 MiB"} <= set(written)
    assert "B  256 KiB" not in written


def test_nothing_and_too_much(drawn):
    assert plot_allocator_by_hand(Hand()).title == "Nothing is reserved"
    plot_allocator_by_hand(Hand(*[segment(0, ("A", size)) for size in range(10, 50)]))
    assert drawn[1].axes[0].get_xlabel() == "memory of a segment; and 8 more segments"


@pytest.fixture
def lab():
    with labkit.use(memory="2GiB", virtual=True, quiet=True):
        yield AllocatorLab()


def do(lab, action, predicted, **choices) -> str:
    lab.action.value = action
    lab.answer.value = predicted
    for name, value in choices.items():
        getattr(lab, name).value = value
    lab.run_button.click()
    return lab.message.value


def test_each_step_is_predicted_and_judged(lab):
    said = do(lab, "allocate", "5", size="5")
    assert "A new segment of 20 MiB: no free block of stream 0 was large enough." in said
    assert "Now 20 MiB reserved, you predicted 5 MiB." in said
    said = do(lab, "allocate", "20", size="15")
    assert "No new segment: a free block of this stream served the request." in said
    assert "Now 20 MiB reserved, as you predicted." in said
    assert "1 of 2 predictions came true." in said
    assert len(progress_file.tries["AllocatorLab"]) >= 2
    assert "A 5 MiB, B 15 MiB" in lab.picture.value
    assert "its segment stays. Now 20 MiB reserved" in do(lab, "free", "0", block="B")
    assert "no segment was wholly free. Now 20 MiB reserved, as you predicted." in do(
        lab, "empty the cache", " 20.0 "
    )
    assert "A new segment of 12 MiB: no free block of stream 2" in do(
        lab, "allocate", "32", size="12", stream=2
    )
    do(lab, "free", "32", block="A")
    assert (
        "20 MiB went back to the device: whole segments that were free. Now 12 MiB reserved"
        in do(lab, "empty the cache", "12")
    )


@pytest.mark.parametrize(
    ("answer", "size", "message"),
    [
        ("", "5", "number of MiB from 0 to 100000, such as 20; nothing is typed yet."),
        ("many", "5", "“many” is none."),
        ("-1", "5", "“-1” is none."),
        (
            "5",
            "0",
            "The size is a number of MiB greater than 0 and up to 1024, such as 20; “0” is none.",
        ),
        ("5", "nan", "“nan” is none."),
        ("5", "1e9", "“1e9” is none."),
    ],
)
def test_silly_input_gets_one_clear_message(lab, answer, size, message):
    said = do(lab, "allocate", answer, size=size)
    assert 'role="alert"' in said and message in said
    assert torch.cuda.memory_reserved() == 0


def test_there_must_be_a_block_to_free(lab):
    assert "There is no block to free yet: allocate one first." in do(lab, "free", "0")
    assert lab.block.disabled  # an empty menu


def test_a_block_is_chosen_as_soon_as_there_is_one_and_stays_chosen(lab):
    do(lab, "allocate", "20", size="5")
    assert lab.block.value == "A"
    do(lab, "allocate", "20", size="5")
    lab.block.value = "B"
    do(lab, "allocate", "20", size="5")
    assert lab.block.value == "B"
    assert "its segment stays" in do(lab, "free", "20")
    assert lab.block.value == "A"


def test_only_what_the_step_needs_is_shown(lab):
    assert (lab.size.layout.display, lab.block.layout.display) == (None, "none")
    do(lab, "allocate", "20", size="5")
    lab.action.value = "free"
    assert (lab.size.layout.display, lab.stream.layout.display, lab.block.layout.display) == (
        "none",
        "none",
        None,
    )


def test_out_of_memory_is_shown_and_the_lab_goes_on(lab):
    torch.cuda.set_per_process_memory_fraction(0.02)
    assert "OutOfMemoryError: CUDA out of memory. Tried to allocate 500.00 MiB" in do(
        lab, "allocate", "500", size="500"
    )
    assert "A new segment of 20 MiB" in do(lab, "allocate", "20", size="5")


def test_a_reset_gives_the_memory_back(lab):
    do(lab, "allocate", "20", size="5")
    lab.reset_button.click()
    assert (torch.cuda.memory_reserved(), lab.picture.value, list(lab.block.options)) == (0, "", [])
    assert "1 of 1 predictions came true." in do(lab, "allocate", "20", size="5")
    assert lab.figure().title == "5 MiB allocated, 20 MiB reserved in 1 segment"


def test_it_says_when_there_is_no_gpu():
    lab = AllocatorLab()
    assert "RuntimeError: no GPU is in use" in do(lab, "allocate", "20", size="5")


def test_after_a_change_of_machines_a_reset_starts_anew(lab):
    do(lab, "allocate", "20", size="5")
    labkit.use(None)
    with labkit.use(like="H200", virtual=True, quiet=True):
        lab.reset_button.click()
        do(lab, "allocate", "20", size="5")
        assert "H200" in lab.picture.value
