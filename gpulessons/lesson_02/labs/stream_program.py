"""The lab of streams: a program of copies, kernels and waits on three streams.

The lab runs the program on a virtual GPU, and shows what the host reads and which lines race.
"""

import itertools
import linecache
import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

import ipywidgets as widgets
import torch

from gputrace import Trace, record
from gputrace.figures.figure import Figure
from labkit import machine
from labkit.labs.experiment import badge
from labkit.labs.panel import PROGRAM, WRAP, Panel
from virtualgpu import RaceWarning

STREAMS = ("a", "b", "c")
COPY_IN, KERNEL, COPY_OUT = "copy in", "kernel", "copy out"
WAIT, HOST_WAIT = "stream waits", "host waits"
VERBS = (COPY_IN, KERNEL, COPY_OUT, WAIT, HOST_WAIT)
BATCHES = 3  # that can be copied in, or out
MOST_STEPS = 12
WIDTH = 1024
ORDERED, RACE, STALE = "ordered", "race", "stale value"
VERDICTS = (ORDERED, RACE, STALE)
# Each program has its own file name, because a race between the same two lines is reported once.
_NUMBERS = itertools.count(1)


@dataclass(frozen=True)
class ProgramLine:
    """A line of a program, on one stream. `other` is the stream that a wait is for."""

    verb: str
    stream: str
    other: str = ""

    def __post_init__(self) -> None:
        if self.verb not in VERBS:
            raise ValueError(f"expected a verb of {', '.join(map(repr, VERBS))}, got {self.verb!r}")
        streams = [self.stream]
        if self.verb == WAIT:
            streams.append(self.other)
        for stream in streams:
            if stream not in STREAMS:
                raise ValueError(
                    f"expected a stream of {', '.join(map(repr, STREAMS))}, got {stream!r}"
                )
        if self.verb == WAIT and self.other == self.stream:
            raise ValueError(
                f"stream {self.stream} is always in order with itself: choose another stream"
            )


@dataclass(frozen=True)
class ProgramOutcome:
    """Result of a program.

    Attributes:
        trace: the recording of the run.
        due: what the host would read if each line waited for the line before it.
        read: what the host read, one number for each copy to the host.
    """

    trace: Trace
    due: list[float]
    read: list[float]

    @property
    def verdict(self) -> str:
        """The result in a word: STALE for a wrong value, RACE for a missing order, or ORDERED."""
        if self.read != self.due:
            return STALE
        if self.trace.races:
            return RACE
        return ORDERED


def code_of(steps: list[ProgramLine]) -> str:
    """Return the program as PyTorch code, one line per step. The last line reads the results."""
    copied_in, copied_out = itertools.count(), itertools.count()
    lines = []
    for step in steps:
        on = f"with torch.cuda.stream({step.stream}): "
        match step.verb:
            case "copy in":
                lines.append(f"{on}x.copy_(batches[{next(copied_in)}], non_blocking=True)")
            case "kernel":
                lines.append(f"{on}torch.mm(x, double, out=y)")
            case "copy out":
                lines.append(f"{on}results[{next(copied_out)}].copy_(y, non_blocking=True)")
            case "stream waits":
                lines.append(f"{step.stream}.wait_stream({step.other})")
            case _:
                lines.append(f"{step.stream}.synchronize()")
    lines.append(f"read = [result[0, 0].item() for result in results[:{next(copied_out)}]]")
    return "\n".join(lines)


def run_program(steps: list[ProgramLine]) -> ProgramOutcome:
    """Run the steps on the virtual GPU in use, and record them.

    Batch 0 is full of ones, batch 1 of twos, and so on. At the start, x, y and the results are
    zeros. A kernel computes y = 2 x.

    Raises the ValueError of `check_program`, and RuntimeError without a virtual GPU.
    """
    check_program(steps)
    badge()  # raises RuntimeError if no GPU is in use
    if not machine.in_use().virtual:
        raise RuntimeError(
            "A real GPU does not report races. "
            "Call labkit.use(None), then labkit.use(gpus=1, virtual=True)."
        )
    streams = {name: torch.cuda.Stream() for name in STREAMS}
    names: dict[str, Any] = {
        "torch": torch,
        **streams,
        "x": torch.zeros(WIDTH, WIDTH, device="cuda"),
        "y": torch.zeros(WIDTH, WIDTH, device="cuda"),
        "double": torch.eye(WIDTH).mul_(2).to("cuda"),
        "batches": [
            torch.full((WIDTH, WIDTH), index + 1.0, pin_memory=True) for index in range(BATCHES)
        ],
        "results": [torch.zeros(WIDTH, WIDTH, pin_memory=True) for _ in range(BATCHES)],
    }
    name, source = f"<string> {next(_NUMBERS)}", code_of(steps)
    # Reports of races quote the lines from this cache.
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    program = compile(source, name, "exec")
    torch.cuda.synchronize()
    for stream in streams.values():
        with torch.cuda.stream(stream), machine.in_use().without_values():
            # The first product on a stream allocates cuBLAS's workspace.
            torch.mm(names["double"], names["double"])
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RaceWarning)  # the outcome lists them
        with record() as trace:
            exec(program, names)
        torch.cuda.synchronize()
    trace.named_streams = {
        stream.stream_id: f"stream {letter}" for letter, stream in streams.items()
    }
    return ProgramOutcome(trace, _due(steps), names["read"])


def check_program(steps: list[ProgramLine]) -> None:
    """Raise ValueError if the program is empty or has too many steps or copies."""
    if not 1 <= len(steps) <= MOST_STEPS:
        raise ValueError(f"expected a program of 1 to {MOST_STEPS} steps, got {len(steps)}")
    for verb in (COPY_IN, COPY_OUT):
        if sum(step.verb == verb for step in steps) > BATCHES:
            raise ValueError(
                f'expected at most {BATCHES} steps "{verb}", because there are {BATCHES} batches '
                "and as many results"
            )


def _due(steps: list[ProgramLine]) -> list[float]:
    """Return the numbers that the host would read if the steps ran strictly in order."""
    x = y = 0.0
    batch, results = 0, []
    for step in steps:
        if step.verb == COPY_IN:
            batch += 1
            x = float(batch)
        elif step.verb == KERNEL:
            y = 2 * x
        elif step.verb == COPY_OUT:
            results.append(y)
    return results


# The widget


WIDE = {"description_width": "initial"}
ROWS = 8  # lines of the program that are visible at once
FIRST = (ProgramLine(COPY_IN, "a"), ProgramLine(KERNEL, "b"), ProgramLine(COPY_OUT, "b"))
ACTIONS = {
    "copy a batch to the GPU": COPY_IN,
    "kernel: y = 2 x": KERNEL,
    "copy y to the host": COPY_OUT,
    "stream waits for stream": WAIT,
    "host waits for stream": HOST_WAIT,
}
NOT_YET = "choose …"
MEANS = {
    ORDERED: "ordered: every value is right, on every GPU",
    RACE: "race: the values are right this time",
    STALE: "stale value: the host reads a wrong value",
}


class StreamsLab(Panel):
    """Lab in which learners build a program for three streams, predict its result, and run it.

    The program runs on the virtual GPU in use. There is no Stop button, because a program has at
    most twelve lines and ends within two seconds.
    """

    question = (
        "At the start, x, y and the results are zeros. Batch 0 is full of ones, batch 1 of twos. "
        "A kernel computes y = 2 x. What will the host read?"
    )

    def __init__(self) -> None:
        self.steps: list[ProgramLine] = list(FIRST)
        self.outcome: ProgramOutcome | None = None
        self.right = self.runs = 0
        narrow = {"width": "9em"}  # a dict, because two dropdowns would share a Layout
        self.action = widgets.Dropdown(
            options=list(ACTIONS.items()), value=WAIT, description="New line:", style=WIDE
        )
        self.stream = widgets.Dropdown(
            options=STREAMS, value="b", description="stream:", style=WIDE, layout=narrow
        )
        self.other = widgets.Dropdown(
            options=STREAMS, description="waits for:", style=WIDE, layout=narrow
        )
        self.program = widgets.Select(
            description="Program:", rows=ROWS, layout=widgets.Layout(width="54em", flex="none")
        )
        self.program.add_class(PROGRAM)
        self.add_button = widgets.Button(
            description="Insert",
            icon="plus",
            tooltip="Insert the new line before the selected line",
        )
        self.remove_button = widgets.Button(
            description="Remove", icon="minus", tooltip="Remove the selected line"
        )
        self.reset_button = widgets.Button(
            description="Reset", icon="undo", tooltip="Go back to the first program"
        )
        self.answer = widgets.Dropdown(
            options=[(NOT_YET, ""), *((MEANS[verdict], verdict) for verdict in VERDICTS)],
            description="You predict:",
            style=WIDE,
            layout=widgets.Layout(width="32em", max_width="100%"),
        )
        self.run_button = widgets.Button(
            description="Run", icon="play", tooltip="Run the program on a virtual GPU"
        )
        self.message = widgets.HTML()
        self.picture = widgets.HTML()
        self.action.observe(lambda _: self._show_choices(), names="value")
        for button, action in (
            (self.add_button, self._insert),
            (self.remove_button, self._remove),
            (self.reset_button, self._reset),
            (self.run_button, self._run),
        ):
            self._when_clicked(button, action)
        line = [self.action, self.stream, self.other]
        edit = [self.add_button, self.remove_button, self.reset_button]
        super().__init__(
            [
                widgets.HTML(f"<p><b>{self.question}</b></p>"),
                widgets.HBox([*line, *edit], layout=WRAP),
                # On a narrow page the code scrolls.
                widgets.Box([self.program], layout=widgets.Layout(overflow="auto")),
                widgets.HBox([self.answer, self.run_button], layout=WRAP),
                self.message,
                self.picture,
            ]
        )
        self._show_choices()
        before = self._used_before()
        if before is not None:
            self._take_over(before, "steps", "outcome", "right", "runs")
        self._changed(1, "Change the program if you like, predict, and press Run.")
        if before is not None:
            self._take_over(before, "answer", "message", "picture")

    def figure(self) -> Figure:
        """Return the timeline of the last run. Run the program first if there was no run.

        Raises RuntimeError without a virtual GPU.
        """
        if self.outcome is not None:
            outcome = self.outcome
        else:
            outcome = run_program(self.steps)
        return outcome.trace.plot_timeline()

    # The program

    def _insert(self) -> None:
        """Insert the new line before the selected one. The line that reads results stays last."""
        at, action = self.program.index, self.action.value
        other = ""
        if action == WAIT:
            other = self.other.value
        try:
            step = ProgramLine(action, self.stream.value, other)
            steps = [*self.steps[:at], step, *self.steps[at:]]
            check_program(steps)
        except ValueError as error:
            self._say(f"{str(error)[0].upper()}{str(error)[1:]}.", alert=True)
            return
        self.steps = steps
        self._changed(at + 1, f"Line {at + 1} is new. Predict again, and press Run.")

    def _remove(self) -> None:
        at = self.program.index
        if at >= len(self.steps):
            self._say("The last line, in which the host reads, stays. Select another.", alert=True)
            return
        del self.steps[at]
        self._changed(at, f"Line {at + 1} is out. Predict again, and press Run.")

    def _reset(self) -> None:
        self.steps, self.outcome, self.right, self.runs = list(FIRST), None, 0, 0
        self._changed(1, "This is the first program again. Predict, and press Run.")
        self.picture.value = ""

    def _changed(self, selected: int, text: str) -> None:
        """Show the changed program with the line `selected`, and ask for a new prediction.

        `text` appears after the page has taken the new values.
        """
        lines = code_of(self.steps).splitlines()
        numbered = [f"{number:2}  {line}" for number, line in enumerate(lines, 1)]
        self._offer(self.program, numbered, "index", selected)
        self._assign(self.answer, "value", "", lock=True)
        self._round_trip.then(partial(self._say, text))

    # A run

    def _run(self) -> None:
        if not self.answer.value:
            self._say("First predict: ordered, race, or stale value?", alert=True)
            return
        try:
            self.outcome = run_program(self.steps)
        except Exception as error:  # For example, there is no virtual GPU.
            self.picture.value = ""
            self._say(f"{type(error).__name__}: {error}", alert=True)
            return
        self.picture.value = self.outcome.trace.plot_timeline().html
        self._say(self._told(self.outcome, self.answer.value))
        self._prediction_tested()

    def _told(self, outcome: ProgramOutcome, predicted: str) -> str:
        came_true = predicted == outcome.verdict
        self.runs += 1
        self.right += came_true
        read = ", ".join(f"{value:g}" for value in outcome.read) or "nothing"
        expected = ", ".join(f"{value:g}" for value in outcome.due) or "nothing"
        races = [f"{race.first.line} and {race.second.line}" for race in outcome.trace.races[:2]]
        why = f"nothing orders {', nor '.join(races)}."
        said = {
            ORDERED: f"Ordered: the host reads {read}. All lines that share memory are in order.",
            RACE: f"Race: the host reads {read}, which is right this time. But {why}",
            STALE: f"Stale value: the host reads {read}. Line by line, it would read {expected}. "
            f"But {why}",
        }[outcome.verdict]
        judged = "As you predicted."
        if not came_true:
            judged = f"You predicted: {predicted}."
        return f"{said} {judged} {self.right} of {self.runs} predictions came true."

    def _show_choices(self) -> None:
        self.other.layout.display = None if self.action.value == WAIT else "none"
