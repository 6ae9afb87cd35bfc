"""The lab of streams: a program of copies, kernels and waits, built line by line; predict whether it is in order, then see it run."""

import ipywidgets as widgets

from labkit import plots
from labkit.experiments.stream_program import (
    COPY_IN,
    COPY_OUT,
    HOST_WAIT,
    KERNEL,
    ORDERED,
    RACE,
    STALE,
    STREAMS,
    VERDICTS,
    WAIT,
    Outcome,
    Step,
    check_program,
    code_of,
    run_program,
)
from labkit.widgets.base import WRAP, Panel

_STYLE = {"description_width": "initial"}
ROWS = 8  # of the program that are seen at once
FIRST = (Step(COPY_IN, "a"), Step(KERNEL, "b"), Step(COPY_OUT, "b"))
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
    STALE: "stale value: the host reads a wrong one",
}


class StreamsLab(Panel):
    """Put together a program for three streams, predict "ordered", "race" or "stale value", and run it on the virtual GPU in use.

    There is no Stop button: a program has twelve lines at most and ends within a second or two, as a single point of an experiment does.
    """

    def __init__(self) -> None:
        self.steps: list[Step] = list(FIRST)
        self.outcome: Outcome | None = None
        self.right = self.runs = 0
        narrow = {"width": "9em"}  # not a Layout, which two dropdowns would share: hiding one would hide both
        self.action = widgets.Dropdown(options=list(ACTIONS.items()), value=WAIT, description="New line:", style=_STYLE)
        self.stream = widgets.Dropdown(options=STREAMS, value="b", description="stream:", style=_STYLE, layout=narrow)
        self.other = widgets.Dropdown(options=STREAMS, description="waits for:", style=_STYLE, layout=narrow)
        self.program = widgets.Select(description="Program:", rows=ROWS, layout=widgets.Layout(width="44em"))
        self.add_button = widgets.Button(description="Insert", icon="plus", tooltip="Put the new line before the line that is selected")
        self.remove_button = widgets.Button(description="Remove", icon="minus", tooltip="Take the selected line out")
        self.reset_button = widgets.Button(description="Reset", icon="undo", tooltip="Go back to the first program")
        self.answer = widgets.Dropdown(
            options=[(NOT_YET, ""), *((MEANS[verdict], verdict) for verdict in VERDICTS)],
            description="You predict:",
            style=_STYLE,
            layout=widgets.Layout(width="28em"),
        )
        self.run_button = widgets.Button(description="Run", icon="play", tooltip="Run the program on a virtual GPU")
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
        question = (
            "x, y and the results are zeros; batch 0 is full of ones, batch 1 of twos; a kernel makes y = 2 x. What will the host read?"
        )
        super().__init__(
            [
                widgets.HTML(f"<p><b>{question}</b></p>"),
                widgets.HBox([self.action, self.stream, self.other, self.add_button, self.remove_button, self.reset_button], layout=WRAP),
                self.program,
                widgets.HBox([self.answer, self.run_button], layout=WRAP),
                self.message,
                self.picture,
            ]
        )
        self._changed(1)
        self._show_choices()
        self._say("Change the program if you like, predict, and press Run.")

    def figure(self) -> plots.Figure:
        """The timeline of the last run; before the first, that of a run made now. Raises RuntimeError without a virtual GPU."""
        outcome = self.outcome if self.outcome is not None else run_program(self.steps)
        return outcome.trace.plot_timeline()

    # The program

    def _insert(self) -> None:
        """The new line, before the one that is selected; the last line, which reads, stays the last."""
        at = self.program.index
        try:
            step = Step(self.action.value, self.stream.value, self.other.value if self.action.value == WAIT else "")
            steps = [*self.steps[:at], step, *self.steps[at:]]
            check_program(steps)
        except ValueError as error:
            self._say(f"{str(error)[0].upper()}{str(error)[1:]}.", alert=True)
            return
        self.steps = steps
        self._changed(at + 1)
        self._say(f"Line {at + 1} is new. Predict again, and press Run.")

    def _remove(self) -> None:
        at = self.program.index
        if at >= len(self.steps):
            self._say("The last line, in which the host reads, stays: select another.", alert=True)
            return
        del self.steps[at]
        self._changed(at)
        self._say(f"Line {at + 1} is out. Predict again, and press Run.")

    def _reset(self) -> None:
        self.steps, self.outcome, self.right, self.runs = list(FIRST), None, 0, 0
        self._changed(1)
        self.picture.value = ""
        self._say("This is the first program again. Predict, and press Run.")

    def _changed(self, selected: int) -> None:
        """Show the program with one line selected, and ask for a prediction anew."""
        lines = code_of(self.steps).splitlines()
        self.program.options = [f"{number:2}  {line}" for number, line in enumerate(lines, 1)]
        self.program.index = selected
        self.answer.value = ""

    # A run

    def _run(self) -> None:
        if not self.answer.value:
            self._say("First predict: ordered, race, or stale value?", alert=True)
            return
        try:
            self.outcome = run_program(self.steps)
        except Exception as error:  # no virtual GPU, too many copies: the learner must see it, and the lab goes on
            self.picture.value = ""
            self._say(f"{type(error).__name__}: {error}", alert=True)
            return
        self.picture.value = self.outcome.trace.plot_timeline().html
        self._say(self._told(self.outcome, self.answer.value))

    def _told(self, outcome: Outcome, predicted: str) -> str:
        came_true = predicted == outcome.verdict
        self.runs, self.right = self.runs + 1, self.right + came_true
        read, due = (", ".join(f"{value:g}" for value in values) or "nothing" for values in (outcome.read, outcome.due))
        why = ", nor ".join(f"{race.first.line} and {race.second.line}" for race in outcome.trace.races[:2])
        said = {
            ORDERED: f"Ordered: the host reads {read}, and every two lines that share memory are in order.",
            RACE: f"Race: the host reads {read}, which is right this time. But nothing orders {why}.",
            STALE: f"Stale value: the host reads {read}; line after line it would be {due}. Nothing orders {why}.",
        }[outcome.verdict]
        judged = "As you predicted." if came_true else f"You predicted: {predicted}."
        return f"{said} {judged} {self.right} of {self.runs} predictions came true."

    def _show_choices(self) -> None:
        self.other.layout.display = None if self.action.value == WAIT else "none"
