"""The caching allocator by hand: allocate, free and empty the cache step by step.

After each step, a figure shows the segments and blocks.
"""

from dataclasses import dataclass
from math import isfinite
from string import ascii_uppercase
from typing import Any

import ipywidgets as widgets
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from gputrace import units
from gputrace.figures.figure import (
    BESIDE,
    BLACK,
    SIZE,
    SKY_BLUE,
    TEXT_POINTS,
    Figure,
    add_title,
    binary_ticks,
    text_width,
)
from labkit import machine
from labkit.checks.checking import plural
from labkit.labs.experiment import badge
from labkit.labs.figures import badged, in_style
from labkit.labs.panel import WRAP, Panel
from labkit.labs.predictions import typed_number

MIB = 1 << 20
STREAMS = 3
MOST_BLOCKS = len(ascii_uppercase)  # in use at once
LARGEST = 1024 * MIB  # bytes of one request
_POOL = 32  # streams per priority and device. torch.cuda.Stream() hands them out in turn.


@dataclass(frozen=True)
class HandBlock:
    """A block of a segment. Offset and size are in bytes.

    `name` is the letter of the request that uses the block. It is empty if the block is free.
    """

    offset: int
    size: int
    name: str


@dataclass(frozen=True)
class HandSegment:
    """A segment: memory that the allocator reserved for one stream. The size is in bytes."""

    stream: int
    size: int
    blocks: tuple[HandBlock, ...]


@dataclass(frozen=True)
class HandStep:
    """Result of one step.

    `reserved` and `allocated` are the bytes of the three streams before and after the step.
    """

    did: str
    reserved: tuple[int, int]
    allocated: tuple[int, int]

    @property
    def grown(self) -> int:
        """The bytes that the step reserved. The number is negative if the step gave memory back."""
        return self.reserved[1] - self.reserved[0]


class AllocatorByHand:
    """Client of PyTorch's allocator on the current GPU, with requests named A, B, C and so on.

    The requests use three new streams, numbered 0 to 2. A segment serves one stream only, so
    nothing else in the process uses the segments seen here. Allocated and reserved bytes are those
    of these streams. `badge` names the GPU.

    Raises RuntimeError if no GPU is in use.
    """

    def __init__(self) -> None:
        self.badge = badge()
        self.machine = machine.current()
        self.device = torch.cuda.current_device()
        self._streams = [unused_stream() for _ in range(STREAMS)]
        # The requested bytes and the tensor, by name.
        self._requests: dict[str, tuple[int, torch.Tensor]] = {}
        self.steps: list[HandStep] = []
        self._letters = ascii_uppercase  # The letter that was used last is at the end.

    # Steps

    def allocate(self, nbytes: int, stream: int = 0) -> str:
        """Request bytes on a stream, and return the request's name.

        Raises ValueError for a size outside 1 byte to 1 GiB, another stream, or a 27th request.
        Raises torch.OutOfMemoryError if the GPU has no memory left.
        """
        if type(nbytes) is not int or not 1 <= nbytes <= LARGEST:
            raise ValueError(
                f"expected a size of 1 byte to {LARGEST // MIB} MiB, got {nbytes!r} bytes"
            )
        if stream not in range(STREAMS):
            raise ValueError(f"expected a stream from 0 to {STREAMS - 1}, got {stream!r}")
        free_names = [letter for letter in self._letters if letter not in self._requests]
        if not free_names:
            raise ValueError(
                f"{MOST_BLOCKS} requests are alive, as many as there are letters: free one first"
            )
        name = free_names[0]
        before = self.reserved, self.allocated
        with torch.cuda.device(self.device), torch.cuda.stream(self._streams[stream]):
            self._requests[name] = nbytes, torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        after = self._letters.index(name) + 1
        self._letters = self._letters[after:] + self._letters[:after]
        self._note(f"allocate {name}", before)
        return name

    def free(self, name: str) -> None:
        """Free a request. Raises ValueError for a name that is not in use."""
        if name not in self._requests:
            raise ValueError(
                f"there is no block {name!r} to free. "
                f"Blocks in use: {', '.join(self._requests) or 'none'}."
            )
        before = self.reserved, self.allocated
        del self._requests[name]
        self._note(f"free {name}", before)

    def empty_cache(self) -> None:
        """Call `torch.cuda.empty_cache()`."""
        before = self.reserved, self.allocated
        torch.cuda.empty_cache()
        self._note("empty the cache", before)

    def reset(self) -> None:
        """Free all requests, give their memory back to the GPU, and forget the steps."""
        self._requests.clear()
        torch.cuda.empty_cache()
        self.steps.clear()
        self._letters = ascii_uppercase

    def _note(self, did: str, before: tuple[int, int]) -> None:
        self.steps.append(HandStep(did, (before[0], self.reserved), (before[1], self.allocated)))

    # What is there

    @property
    def requests(self) -> dict[str, int]:
        """The requested bytes of each request in use, by name."""
        return {name: nbytes for name, (nbytes, _) in self._requests.items()}

    @property
    def reserved(self) -> int:
        """The bytes in all segments."""
        return sum(segment.size for segment in self.segments())

    @property
    def allocated(self) -> int:
        """The bytes in the blocks that requests use."""
        return sum(
            block.size for segment in self.segments() for block in segment.blocks if block.name
        )

    def segments(self) -> list[HandSegment]:
        """Return the segments of the three streams, sorted by stream and then by address."""
        numbers = {stream.cuda_stream: number for number, stream in enumerate(self._streams)}
        names = {tensor.data_ptr(): name for name, (_, tensor) in self._requests.items()}
        found = []
        for segment in torch.cuda.memory_snapshot():
            if segment["device"] == self.device and segment["stream"] in numbers:
                start = segment["address"]
                blocks, at = [], start
                for block in segment["blocks"]:
                    blocks.append(HandBlock(at - start, block["size"], names.get(at, "")))
                    at += block["size"]
                found.append(
                    (
                        numbers[segment["stream"]],
                        start,
                        HandSegment(
                            numbers[segment["stream"]], segment["total_size"], tuple(blocks)
                        ),
                    )
                )
        return [segment for _, _, segment in sorted(found, key=lambda entry: entry[:2])]


def unused_stream() -> torch.cuda.Stream:
    """Empty the cache, and return a stream of the current GPU that has no segments.

    Free blocks of other streams cannot serve requests on this stream. Raises RuntimeError if all
    streams have segments.
    """
    torch.cuda.empty_cache()
    device = torch.cuda.current_device()
    used = {
        segment["stream"] for segment in torch.cuda.memory_snapshot() if segment["device"] == device
    }
    for _ in range(_POOL):
        stream = torch.cuda.Stream()
        if stream.cuda_stream not in used:
            return stream
    raise RuntimeError(
        f"all {_POOL} streams of this GPU have tensors. Free the tensors of one stream, "
        "and try again."
    )


# The figure


LEFT, RIGHT = 0.24, 0.94  # ends of the axes, as shares of the figure's width
TITLE, AXIS, BADGE, LINE = 0.5, 0.5, 0.3, 0.36  # inches, from the top down; LINE for each segment
MOST = 32  # segments that are drawn, more than a learner makes
FILLED = 0.75  # of a line
LEAST_WIDTH = 20 << 20  # bytes on the axis


@in_style
def plot_allocator_by_hand(hand: AllocatorByHand) -> Figure:
    """Draw the segments in their current state. If there are too many, draw the largest ones."""
    segments = hand.segments()
    shown = sorted(
        sorted(segments, key=lambda segment: -segment.size)[:MOST],
        key=lambda segment: segment.stream,
    )
    lines = max(len(shown), 1)
    height = TITLE + lines * LINE + AXIS + BADGE
    canvas = Canvas(figsize=(SIZE[0], height), facecolor="white")
    add_title(canvas, _finding(hand, segments))
    axes = canvas.add_axes((LEFT, (AXIS + BADGE) / height, RIGHT - LEFT, lines * LINE / height))
    end = max([LEAST_WIDTH, *(segment.size for segment in shown)])
    axes.set(xlim=(0, end), ylim=(lines, 0), yticks=[], xlabel=_caption(segments, shown))
    axes.spines["left"].set_visible(False)
    axes.grid(visible=False)
    binary_ticks(axes, end, most=6)
    for y, segment in enumerate(shown):
        name = f"stream {segment.stream}: {units.byte_text(segment.size)}"
        axes.annotate(
            name, (0, y + FILLED / 2), (-8, 0), **BESIDE, ha="right", fontsize=TEXT_POINTS
        )
        _draw(axes, segment, y, 72 * SIZE[0] * (RIGHT - LEFT) / end)
    return badged(canvas, hand.badge, *map(_told, shown))


def _finding(hand: AllocatorByHand, segments: list[HandSegment]) -> str:
    if not segments:
        return "Nothing is reserved"
    held = sum(segment.size for segment in segments)
    allocated, count = units.byte_text(hand.allocated), plural(len(segments), "segment")
    return f"{allocated} allocated, {units.byte_text(held)} reserved in {count}"


def _caption(segments: list[HandSegment], shown: list[HandSegment]) -> str:
    hidden = len(segments) - len(shown)
    if not hidden:
        return "memory of a segment"
    return f"memory of a segment; and {plural(hidden, 'more segment')}"


def _told(segment: HandSegment) -> str:
    blocks = ", ".join(
        f"{block.name or 'free'} {units.byte_text(block.size)}" for block in segment.blocks
    )
    return f"Segment of stream {segment.stream}, {units.byte_text(segment.size)}: {blocks}"


def _draw(axes: Axes, segment: HandSegment, y: int, points: float) -> None:
    """Draw the blocks of a segment in a row at the height `y`.

    Used blocks are coloured and have a letter. Free blocks are white. `points` is the number of
    points per byte.
    """
    for block in segment.blocks:
        colour = SKY_BLUE if block.name else "white"
        style: Any = {"facecolor": colour, "edgecolor": BLACK, "linewidth": 0.7}
        axes.broken_barh([(block.offset, block.size)], (y, FILLED), **style)
        size = units.byte_text(block.size)
        if block.name:
            texts = [f"{block.name}  {size}", block.name]
        else:
            texts = [f"free  {size}", size, ""]
        text = next((text for text in texts if text_width(text) + 6 <= block.size * points), "")
        middle = block.offset + block.size / 2
        axes.text(
            middle,
            y + FILLED / 2,
            text,
            ha="center",
            va="center_baseline",
            fontsize=TEXT_POINTS,
            color=BLACK,
        )


# The widget


WIDE = {"description_width": "initial"}
MOST_PREDICTED = 100_000.0  # MiB
ALLOCATE, FREE, EMPTY = "allocate", "free", "empty the cache"


class AllocatorLab(Panel):
    """Lab in which learners allocate, free and empty the cache by hand, on one of three streams.

    Before each step, learners predict how much will be reserved afterwards. The requests go to
    PyTorch's real allocator on the GPU in use. `hand` is the AllocatorByHand, from the first step
    on. There is no Stop button, because a step ends at once.
    """

    question = (
        "Will the next step need a new segment? "
        "How much will these streams have reserved afterwards?"
    )

    def __init__(self) -> None:
        self.hand: AllocatorByHand | None = None
        self.right = 0  # predictions that came true
        self.action = widgets.Dropdown(
            options=[ALLOCATE, FREE, EMPTY], description="Next step:", style=WIDE
        )
        self.size = widgets.Text(
            value="5", description="MiB:", style=WIDE, layout=widgets.Layout(width="9em")
        )
        self.stream = widgets.Dropdown(
            options=range(STREAMS),
            description="on stream:",
            style=WIDE,
            layout=widgets.Layout(width="9em"),
        )
        self.block = widgets.Dropdown(
            options=[], description="block:", style=WIDE, layout=widgets.Layout(width="13em")
        )
        self.answer = widgets.Text(
            description="Reserved afterwards, you predict:",
            placeholder="MiB",
            style=WIDE,
            layout=widgets.Layout(width="22em"),
        )
        self.run_button = widgets.Button(
            description="Do it", icon="play", tooltip="Take the prediction, and do the step"
        )
        self.reset_button = widgets.Button(
            description="Reset",
            icon="undo",
            tooltip="Free all blocks, give all memory back, start again",
        )
        self.message = widgets.HTML()
        self.picture = widgets.HTML()
        self.action.observe(lambda _: self._show_choices(), names="value")
        self._when_clicked(self.run_button, self._do)
        self._when_clicked(self.reset_button, self._reset)
        self._when_entered(self.answer, self._do)
        super().__init__(
            [
                widgets.HTML(f"<p><b>{self.question}</b></p>"),
                widgets.HBox([self.action, self.size, self.stream, self.block], layout=WRAP),
                widgets.HBox(
                    [self.answer, widgets.Label("MiB"), self.run_button, self.reset_button],
                    layout=WRAP,
                ),
                self.message,
                self.picture,
            ]
        )
        self._say("Nothing is reserved yet. Choose a step, type your prediction, and press Do it.")
        before = self._used_before()
        if (
            before is not None
            and before.hand is not None
            and before.hand.machine is machine.current()
        ):
            self._take_over(
                before, "hand", "right", "action", "size", "stream", "answer", "message", "picture"
            )
        self._show_choices()

    def figure(self) -> Figure:
        """Return the figure of the segments. Raises RuntimeError when no GPU is in use."""
        return plot_allocator_by_hand(self._hand())

    def _hand(self) -> AllocatorByHand:
        if self.hand is None:
            self.hand = AllocatorByHand()
        return self.hand

    def _do(self) -> None:
        try:
            predicted = _mebibytes(self.answer.value, "Your prediction", 0)
            size = 0
            if self.action.value == ALLOCATE:
                size = _mebibytes(self.size.value, "The size", 1 / MIB)
            hand = self._hand()
            self._step(hand, size)
        except ValueError as error:
            self._say(str(error), alert=True)
        except (
            Exception
        ) as error:  # out of memory, or no GPU: the learner must see it, and the lab goes on
            self._show()
            self._say(f"{type(error).__name__}: {error}", alert=True)
        else:
            self._show()
            self._say(self._verdict(hand, hand.steps[-1], predicted))
            self._prediction_tested()

    def _step(self, hand: AllocatorByHand, size: int) -> None:
        match self.action.value:
            case "allocate":
                hand.allocate(size, self.stream.value)
            case "free":
                if self.block.value is None:
                    raise ValueError("There is no block to free yet: allocate one first.")
                hand.free(self.block.value)
            case _:
                hand.empty_cache()

    def _verdict(self, hand: AllocatorByHand, step: HandStep, predicted: int) -> str:
        now = step.reserved[1]
        if step.grown > 0:
            did = (
                f"A new segment of {units.byte_text(step.grown)}: no free block of stream "
                f"{self.stream.value} was large enough."
            )
        elif step.grown < 0:
            given_back = units.byte_text(-step.grown)
            did = f"{given_back} went back to the device: whole segments that were free."
        elif step.did.startswith("allocate"):
            did = "No new segment: a free block of this stream served the request."
        elif step.did.startswith("free"):
            did = "The block is free for the next request of its stream, and its segment stays."
        else:
            did = "Nothing went back to the device: no segment was wholly free."
        came_true = round(predicted / MIB, 2) == round(now / MIB, 2)
        self.right += came_true
        held = "nothing"
        if now:
            held = units.byte_text(now)
        judged = "as you predicted"
        if not came_true:
            judged = "you predicted 0"
            if predicted:
                judged = f"you predicted {units.byte_text(predicted)}"
        count = f"{self.right} of {len(hand.steps)} predictions came true."
        return f"{did} Now {held} reserved, {judged}. {count}"

    def _reset(self) -> None:
        """Free all blocks of the learner, and start again on the GPU that is in use now."""
        hand, self.hand, self.right = self.hand, None, 0
        if hand is not None:
            try:
                hand.reset()
            except Exception as error:
                self._say(f"{type(error).__name__}: {error}", alert=True)
                return
        self.picture.value = ""
        self._show_choices()
        self._say(
            "All blocks are freed, and their memory is given back. "
            "Choose a step, type your prediction, and press Do it."
        )

    def _show(self) -> None:
        self._show_choices()
        if self.hand is not None:
            self.picture.value = plot_allocator_by_hand(self.hand).html

    def _show_choices(self) -> None:
        """Show only the fields that the chosen step needs.

        The list for freeing offers the blocks that are in use.
        """
        for box, action in ((self.size, ALLOCATE), (self.stream, ALLOCATE), (self.block, FREE)):
            box.layout.display = None if self.action.value == action else "none"
        alive = {}
        if self.hand is not None:
            alive = self.hand.requests
        self.block.disabled = not alive
        options = [(f"{name}, {units.byte_text(nbytes)}", name) for name, nbytes in alive.items()]
        if list(self.block.options) != options:
            chosen = self.block.value
            self.block.options = options
            if chosen not in alive:
                chosen = next(iter(alive), None)
            self._assign(self.block, "value", chosen)


def _mebibytes(text: str, what: str, least: float) -> int:
    """Convert a number of MiB that a learner has typed to bytes.

    Raises ValueError for a number below `least` or too large, and for other text. `what` says in
    the message what the number is for.
    """
    number = typed_number(text)
    most = MOST_PREDICTED
    if least:
        most = LARGEST / MIB
    if not isfinite(number) or not least <= number <= most:
        typed = "nothing is typed yet"
        if text.strip():
            typed = f"“{text.strip()}” is none"
        if least:
            allowed = f"greater than 0 and up to {most:g}"
        else:
            allowed = f"from 0 to {most:g}"
        raise ValueError(f"{what} is a number of MiB {allowed}, such as 20; {typed}.")
    return round(number * MIB)
