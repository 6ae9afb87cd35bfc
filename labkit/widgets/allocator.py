"""The lab of the caching allocator: requests by hand, each with a prediction first, beside the map of the segments."""

from math import isfinite

import ipywidgets as widgets

from gputrace import units
from labkit import plots
from labkit.experiments.allocator_by_hand import LARGEST, MIB, STREAMS, AllocatorByHand, Step
from labkit.widgets.base import WRAP, Panel

_STYLE = {"description_width": "initial"}
MOST_PREDICTED = 100_000.0  # MiB
ALLOCATE, FREE, EMPTY = "allocate", "free", "empty the cache"


class AllocatorLab(Panel):
    """Allocate, free and empty the cache by hand, on one of three streams; predict first how much will be reserved afterwards.

    The requests are real ones to PyTorch's allocator, on the GPU in use. `hand` is what they are made with, from the first step on.
    There is nothing to stop: a step is done at once.
    """

    def __init__(self) -> None:
        self.hand: AllocatorByHand | None = None
        self.right = 0  # predictions that came true
        self.action = widgets.Dropdown(options=[ALLOCATE, FREE, EMPTY], description="Next step:", style=_STYLE)
        self.size = widgets.Text(value="5", description="MiB:", style=_STYLE, layout=widgets.Layout(width="9em"))
        self.stream = widgets.Dropdown(options=range(STREAMS), description="on stream:", style=_STYLE, layout=widgets.Layout(width="9em"))
        self.block = widgets.Dropdown(options=[], description="block:", style=_STYLE, layout=widgets.Layout(width="13em"))
        self.answer = widgets.Text(
            description="Reserved afterwards, you predict:", placeholder="MiB", style=_STYLE, layout=widgets.Layout(width="22em")
        )
        self.run_button = widgets.Button(description="Do it", icon="play", tooltip="Take the prediction, and do the step")
        self.reset_button = widgets.Button(description="Reset", icon="undo", tooltip="Free all blocks, give all memory back, start again")
        self.message = widgets.HTML()
        self.picture = widgets.HTML()
        self.action.observe(lambda _: self._show_choices(), names="value")
        self._when_clicked(self.run_button, self._do)
        self._when_clicked(self.reset_button, self._reset)
        question = "Will the next step need a new segment? How much will these streams have reserved afterwards?"
        super().__init__(
            [
                widgets.HTML(f"<p><b>{question}</b></p>"),
                widgets.HBox([self.action, self.size, self.stream, self.block], layout=WRAP),
                widgets.HBox([self.answer, widgets.Label("MiB"), self.run_button, self.reset_button], layout=WRAP),
                self.message,
                self.picture,
            ]
        )
        self._show_choices()
        self._say("Nothing is reserved yet. Choose a step, type your prediction, and press Do it.")

    def figure(self) -> plots.Figure:
        """The segments as they are now. Raises RuntimeError when no GPU is in use."""
        return plots.allocator_by_hand(self._hand())

    def _hand(self) -> AllocatorByHand:
        if self.hand is None:
            self.hand = AllocatorByHand()
        return self.hand

    def _do(self) -> None:
        try:
            predicted = _mebibytes(self.answer.value, "Your prediction", 0)
            size = _mebibytes(self.size.value, "The size", 1 / MIB) if self.action.value == ALLOCATE else 0
            hand = self._hand()
            self._step(hand, size)
        except ValueError as error:
            self._say(str(error), alert=True)
        except Exception as error:  # out of memory, or no GPU: the learner must see it, and the lab goes on
            self._show()
            self._say(f"{type(error).__name__}: {error}", alert=True)
        else:
            self._show()
            self._say(self._verdict(hand, hand.steps[-1], predicted))

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

    def _verdict(self, hand: AllocatorByHand, step: Step, predicted: int) -> str:
        now = step.reserved[1]
        if step.grown > 0:
            did = f"A new segment of {units.byte_text(step.grown)}: no free block of stream {self.stream.value} was large enough."
        elif step.grown < 0:
            did = f"{units.byte_text(-step.grown)} went back to the device: whole segments that were free."
        elif step.did.startswith("allocate"):
            did = "No new segment: a free block of this stream served the request."
        elif step.did.startswith("free"):
            did = "The block is free for the next request of its stream, and its segment stays."
        else:
            did = "Nothing went back to the device: no segment was wholly free."
        came_true = round(predicted / MIB, 2) == round(now / MIB, 2)
        self.right += came_true
        held = units.byte_text(now) if now else "nothing"
        judged = "as you predicted" if came_true else f"you predicted {units.byte_text(predicted) if predicted else 'nothing'}"
        return f"{did} Now {held} reserved, {judged}. {self.right} of {len(hand.steps)} predictions came true."

    def _reset(self) -> None:
        """Also after the lesson changed machines: the next step begins on the one then in use."""
        hand, self.hand, self.right = self.hand, None, 0
        if hand is not None:
            try:
                hand.reset()
            except Exception as error:
                self._say(f"{type(error).__name__}: {error}", alert=True)
                return
        self.picture.value = ""
        self._show_choices()
        self._say("All blocks are freed, and their memory is given back. Choose a step, type your prediction, and press Do it.")

    def _show(self) -> None:
        self._show_choices()
        if self.hand is not None:
            self.picture.value = plots.allocator_by_hand(self.hand).html

    def _show_choices(self) -> None:
        """What the chosen step needs, and the blocks that can be freed."""
        for box, action in ((self.size, ALLOCATE), (self.stream, ALLOCATE), (self.block, FREE)):
            box.layout.display = None if self.action.value == action else "none"
        alive = self.hand.requests if self.hand is not None else {}
        options = [(f"{name}, {units.byte_text(nbytes)}", name) for name, nbytes in alive.items()]
        if list(self.block.options) != options:
            self.block.options = options


def _mebibytes(text: str, what: str, least: float) -> int:
    """The bytes of a number of MiB that a learner typed. Raises ValueError saying what is allowed."""
    try:
        number = float(text.strip())
    except ValueError:
        number = float("nan")
    most = LARGEST / MIB if least else MOST_PREDICTED
    if not isfinite(number) or not least <= number <= most:
        typed = f"“{text.strip()}” is none" if text.strip() else "nothing is typed yet"
        allowed = f"from 0 to {most:g}" if not least else f"greater than 0 and up to {most:g}"
        raise ValueError(f"{what} is a number of MiB {allowed}, such as 20; {typed}.")
    return round(number * MIB)
