"""What all labs share: first a prediction, then a run that can be stopped, then both in one figure.

Works with ipywidgets 7.7 and 8. Values are shown by HTML widgets only: Output widgets leave no stable text in a stored notebook.
"""

import asyncio
import re
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from html import escape
from inspect import signature
from typing import Any, ClassVar, Self

import ipywidgets as widgets

from gputrace.figures.figure import BLUE, IN_THE_DARK, Figure
from gputrace.units import number_text
from labkit import progress_file
from labkit.labs.experiment import Result, Run
from labkit.labs.predictions import parse_prediction
from labkit.labs.round_trip import PANEL, RoundTrip, picture_that_runs

WRAP = {
    "flex_flow": "row wrap",
    "align_items": "center",
}  # not a Layout: each box makes one of its own of it

# What a panel brings to the page that shows it, hidden: what ipywidgets leaves unseen is seen, and a list keeps its keys. Seen are links,
# the arrows of lists in a dark theme, and which control has the keyboard's place: ipywidgets' own sign of it is a line of one pixel that
# changes from grey to light blue. JupyterLab takes the arrows and letters that are typed in a list for its own shortcuts, which go to
# another cell or delete this one (https://github.com/jupyter-widgets/ipywidgets/issues/3912), unless the list's element says otherwise. No
# widget can set an element's attribute from Python: an empty picture does when the browser has read it.
PROGRAM = "labkit-program"  # class of a list whose lines are code
_ARROW = "%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 18 18'%3E%3Cpath d='M5 7l4 4 4-4' fill='none' stroke='white'/%3E%3C/svg%3E"
_STYLE = (
    """<style>
.PANEL :is(button, input, select, [tabindex]):focus-visible { outline: 2px solid var(--jp-brand-color1, BLUE); outline-offset: -2px }
.PANEL input[type=checkbox]:focus-visible { outline-offset: 1px }
.PANEL .widget-checkbox { padding-left: 4px }
.PROGRAM select { font-family: var(--jp-code-font-family, monospace) }
.PANEL a { color: var(--jp-content-link-color, BLUE); text-decoration: underline }
[data-jp-theme-light=false] .PANEL img DARK
[data-jp-theme-light=false] .PANEL { --jp-widgets-dropdown-arrow: url("data:image/svg+xml,ARROW") }
</style>""".replace("PANEL", PANEL)
    .replace("PROGRAM", PROGRAM)
    .replace("BLUE", BLUE)
    .replace("DARK", IN_THE_DARK)
    .replace("ARROW", _ARROW)
)
_KEYS = (
    f"this.closest('.{PANEL}')?.addEventListener('focusin', event => {{"
    " if (event.target.matches('select')) event.target.dataset.lmSuppressShortcuts = 'true' })"
)
_HIDDEN = _STYLE + picture_that_runs(_KEYS)


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The event loop of the kernel that runs this cell; None outside a notebook."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


@contextmanager
def interrupted_by(action: Callable[..., Any]) -> Iterator[None]:
    """Let an interrupt of the kernel call `action` with a signal's arguments: between two cells the kernel would ignore it.

    Other threads hear of no signals; there it changes nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, action)
    try:
        yield
    finally:
        if (
            signal.getsignal(signal.SIGINT) == action
        ):  # else a cell has begun meanwhile, which puts its own back
            signal.signal(signal.SIGINT, before)


class Panel(widgets.VBox):
    """A box of widgets whose text in a stored notebook is always the same: its question, and how to bring it up.

    Its buttons' actions run on the kernel's event loop, in the main thread: JupyterLab hands clicks to another thread, and Colab
    drops what other threads draw. Brought up again, it shows what the panel of this class and these arguments showed that was used last:
    the browser forgets the old one when its page is loaded again, or its cell is run again.
    """

    question: str
    message: widgets.HTML  # of a panel that says something
    running = False
    _last_used: ClassVar[dict[tuple[type, str], "Panel"]] = {}

    children: Any  # a tuple of widgets

    def __new__(cls, *arguments: Any, **named: Any) -> Self:
        panel = super().__new__(cls, *arguments, **named)
        bound = signature(cls.__init__).bind(panel, *arguments, **named)
        bound.apply_defaults()
        panel._made_with = cls, repr(list(bound.arguments.values())[1:])
        return panel

    def __init__(self, children: list[widgets.Widget]) -> None:
        self._loop = running_loop()
        self._round_trip = RoundTrip(self._call_on_main_thread)
        self._assignments: dict[tuple[widgets.Widget, str], object] = {}
        hidden = widgets.HTML(_HIDDEN, layout=widgets.Layout(display="none"))
        super().__init__(children=[*children, hidden, *self._round_trip.widgets])
        self.add_class(PANEL)

    def __repr__(self) -> str:
        return f"{type(self).__name__}: {self.question} Run this cell to bring it up."

    if hasattr(
        widgets.Widget, "_repr_mimebundle_"
    ):  # ipywidgets 8, which cuts the text after 110 characters

        def _repr_mimebundle_(self, **options: Any) -> Any:
            return super()._repr_mimebundle_(**options) | {"text/plain": repr(self)}

    def _used_before(self) -> Any:
        """The panel of this class and these arguments that was used last, if there is one. From now on it is this one."""
        before = self._last_used.get(self._made_with)
        if before is None or not before.running:
            self._last_used[self._made_with] = self
        return before

    def _take_over(self, before: "Panel", *names: str) -> None:
        """Attributes of the panel before; of widgets among them, their values."""
        for name in names:
            own, its = getattr(self, name), getattr(before, name)
            if isinstance(own, widgets.Widget):
                own.value = its.value
            else:
                setattr(self, name, its)

    def _when_clicked(
        self, button: widgets.Button, action: Callable[[], None], at_once: bool = False
    ) -> None:
        """Let a click run the action, after all values on the page have arrived.

        `at_once` is for an action that reads no value and must not wait.
        """
        button.on_click(
            lambda _: self._on_main_thread(
                action if at_once else partial(self._round_trip.then, action)
            )
        )

    def _when_entered(self, field: widgets.Text, action: Callable[[], None]) -> None:
        """The Enter key does the same as the button beside the field."""

        def heard(_: widgets.Widget, content: Any, buffers: Any) -> None:
            if isinstance(content, dict) and content.get("event") == "submit":
                self._on_main_thread(partial(self._round_trip.then, action))

        field.on_msg(heard)

    def _assign(self, widget: widgets.Widget, trait: str, value: Any, lock: bool = False) -> None:
        """Set a trait that the learner can set too. The new value also replaces one that is on its way from the page.

        `lock` disables the widget until then, so that nothing the learner chooses meanwhile is replaced, too.
        """
        self._assignments[widget, trait] = assignment = object()
        if lock:
            widget.disabled = True
        setattr(widget, trait, value)

        def assign_again() -> None:
            if self._assignments[widget, trait] is assignment:
                setattr(widget, trait, value)
                if lock:
                    widget.disabled = False

        self._round_trip.after_one(assign_again)

    def _offer(self, select: widgets.Widget, options: list[str], trait: str, value: Any) -> None:
        """Show new options, one of them chosen. The select is disabled from before the page shows them until it has the choice."""
        select.disabled = True
        select.options = options
        self._assign(select, trait, value, lock=True)

    def _on_main_thread(self, action: Callable[[], None]) -> None:
        """Count the panel as used, and run the action on the kernel's event loop."""
        self._last_used[self._made_with] = self
        self._call_on_main_thread(action)

    def _call_on_main_thread(self, action: Callable[[], None]) -> None:
        """Run the action on the kernel's event loop; at once outside a notebook, where no loop runs."""
        if self._loop is None or not self._loop.is_running():
            action()
        else:
            self._loop.call_soon_threadsafe(action)

    def _keyboard_goes_to(self, button: widgets.Button) -> None:
        """Called before the button in use is disabled, which would lose the keyboard's place. Needs ipywidgets 8."""
        if hasattr(button, "focus"):
            button.focus()

    def _prediction_tested(self) -> None:
        """Count a prediction whose outcome is there, among what the learner has done."""
        progress_file.add(type(self).__name__, True)

    def _say(self, text: str, alert: bool = False) -> None:
        """Show a message, which a screen reader reads out, with what stands between backticks in the font of code."""
        told = re.sub(r"`([^`\n]+)`", r"<code>\1</code>", escape(text))
        self.message.value = f'<p role="{"alert" if alert else "status"}">{"⚠ " * alert}{told}</p>'


class ExperimentPanel(Panel):
    """A panel that asks a question, takes a prediction, runs an experiment and shows both.

    `labkit.Lab` is one for any function. Other subclasses give `question`, `unit` and the four
    methods below.
    """

    unit: str
    _begun: ClassVar["ExperimentPanel | None"] = None  # the last that was run
    zero_is_possible = False  # as a prediction

    def experiment(self) -> Run:
        """Return the experiment, not yet begun."""
        raise NotImplementedError

    def point(self, row: dict[str, Any]) -> str:
        """Return the point that was just measured, in a few words."""
        raise NotImplementedError

    def draw(self, result: Result, prediction: float | None) -> Figure:
        """Return a figure of the result, the recording and the prediction."""
        raise NotImplementedError

    def verdict(self, result: Result, prediction: float) -> str:
        """Return a sentence that says how far the prediction was off."""
        raise NotImplementedError

    def __init__(self, *choices: Sequence[widgets.ValueWidget]) -> None:
        """`choices` stand under the question, row by row; they are read by `experiment`, which may refuse them with a ValueError."""
        self._choices = [choice for row in choices for choice in row]
        self.prediction: float | None = None
        self.result: Result | None = None
        self.task: asyncio.Task | None = None
        self._stopping = self._interrupted = self._chosen_meanwhile = False
        self.answer = widgets.Text(
            description="Your prediction:",
            placeholder="a number",
            style={"description_width": "initial"},
            layout=widgets.Layout(width="16em"),
        )
        self.predict_button = widgets.Button(
            description="Predict", icon="check", tooltip="Take the number as your prediction"
        )
        self.run_button = widgets.Button(
            description="Run", icon="play", tooltip="Run the experiment", disabled=True
        )
        self.stop_button = widgets.Button(
            description="Stop", icon="stop", tooltip="Stop the experiment", disabled=True
        )
        self.progress = widgets.IntProgress(min=0, max=1, layout=widgets.Layout(width="16em"))
        self.message = widgets.HTML()
        self.picture = widgets.HTML()
        self._when_clicked(self.predict_button, self._predict)
        self._when_clicked(self.run_button, self._start)
        self._when_clicked(self.stop_button, self._stop, at_once=True)
        self._when_entered(self.answer, self._predict)
        super().__init__(
            [
                widgets.HTML(f"<p><b>{escape(self.question)}</b></p>"),
                *(
                    widgets.HBox(list(row), layout=widgets.Layout(flex_flow="row wrap"))
                    for row in choices
                ),
                widgets.HBox(
                    [self.answer, widgets.Label(self.unit), self.predict_button], layout=WRAP
                ),
                widgets.HBox([self.run_button, self.stop_button, self.progress], layout=WRAP),
                self.message,
                self.picture,
            ]
        )
        self._ask()
        self._bring_back(self._used_before())
        for choice in self._choices:
            # After whatever was entered before: a prediction that is still on its way belongs to the choice before.
            choice.observe(
                lambda _: self._on_main_thread(partial(self._round_trip.then, self._chosen)),
                "value",
            )

    def _bring_back(self, before: "ExperimentPanel | None") -> None:
        """Its choices, prediction and result, if the same can be chosen now: another machine may have fewer GPUs."""
        if before is None or any(
            getattr(own, "options", None) != getattr(its, "options", None)
            for own, its in zip(self._choices, before._choices, strict=True)
        ):
            return
        for own, its in zip(self._choices, before._choices, strict=True):
            own.value = its.value
        self._take_over(before, "answer", "prediction")
        if before.running:
            self._say(
                "An earlier run of this lab goes on. Interrupt the kernel to stop it, and run this cell again to see its result."
            )
        else:
            self.progress.max = before.progress.max
            self._take_over(before, "result", "progress", "message", "picture")
        self._set_buttons(running=False)

    def predicted(self, text: str) -> float:
        """The number that was typed. Raises ValueError, saying what is allowed, for one that is no prediction."""
        return parse_prediction(text, self.zero_is_possible)

    def _ask(self) -> None:
        self.prediction = None
        self._say("First predict, then run.")
        self._set_buttons(running=False)

    def _chosen(self) -> None:
        """Ask for another prediction: a different choice needs one. While an experiment runs, ask after it."""
        if self.running:
            self._chosen_meanwhile = True
        else:
            self._ask()

    def _predict(self) -> None:
        if not self.running and self._read_prediction():
            assert self.prediction is not None  # which was just read
            predicted = number_text(self.prediction, 6)
            self._say(f"You predict: {predicted} {self.unit}. Now press Run.")

    def _read_prediction(self) -> bool:
        """Take the number in the box as the prediction. Return False, and say why, if the text is not a prediction."""
        try:
            self.prediction = self.predicted(self.answer.value)
        except ValueError as error:
            self.prediction = None
            self._say(str(error), alert=True)
        self._set_buttons(running=False)
        return self.prediction is not None

    def _start(self) -> None:
        """Begin the experiment. The prediction is the number that is in the box now."""
        if self.running or self.prediction is None or not self._read_prediction():
            return
        begun = ExperimentPanel._begun
        if (
            begun is not None and begun.running
        ):  # on the same GPUs each would count what the other does
            self._say(
                f"A {type(begun).__name__} runs: wait for its end, or stop it, and press Run again.",
                alert=True,
            )
            return
        ExperimentPanel._begun = self
        self._stopping = self._interrupted = self._chosen_meanwhile = False
        self._assign(self.answer, "value", self.answer.value)
        try:
            run = self.experiment()
        except Exception as error:  # whatever it is, the learner must see it
            self._fail(error)
            return
        self.picture.value = ""
        self.progress.value, self.progress.max = 0, run.total
        self._set_buttons(running=True)
        if self._loop is None or not self._loop.is_running():
            for _ in self._steps(run):
                pass
        else:
            self.task = self._loop.create_task(self._run(run))

    def _stop(self) -> None:
        self._stopping = True
        self._keyboard_goes_to(self.run_button)

    def _interrupt(self, *_: Any) -> None:
        self._stopping = self._interrupted = True

    async def _run(self, run: Run) -> None:
        """Step the experiment on the event loop, which hears of clicks between two points."""
        end = object()
        with closing(self._steps(run)) as steps:
            while True:
                with interrupted_by(
                    self._interrupt
                ):  # for each point anew: cells and clicks in between put their own back
                    if next(steps, end) is end:
                        return
                    await asyncio.sleep(0)

    def _steps(self, run: Run) -> Generator[None, None, None]:
        """Measure point by point, yielding after each, and show what came of it."""
        try:
            with closing(run):
                for row in run:
                    self.progress.value = run.done
                    self._say(f"Point {run.done} of {run.total}: {self.point(row)}")
                    yield
                    if self._stopping:
                        break
            self._show(run)
        except Exception as error:
            if (
                self._interrupted
            ):  # Jupyter interrupts the kernel's processes, too: theirs is no failure
                self._show(run)
            else:
                self._fail(error)
        finally:
            if self._chosen_meanwhile:  # before the page heard that the choices are disabled
                self.prediction = None
            self._set_buttons(running=False)

    def _show(self, run: Run) -> None:
        assert self.prediction is not None  # Run does nothing without one
        self.result = run.result()
        self.progress.max = run.total  # a run may end earlier than it expected
        self.picture.value = self.draw(self.result, self.prediction).html
        stopped = (
            f"Stopped after {run.done} of {run.total} points. " if run.done < run.total else ""
        )
        self._say(stopped + self.verdict(self.result, self.prediction))
        self._prediction_tested()

    def _fail(self, error: Exception) -> None:
        self.picture.value = ""
        refused = self._choices and isinstance(error, ValueError)
        self._say(
            str(error) if refused else f"The experiment failed. {type(error).__name__}: {error}",
            alert=True,
        )

    def _set_buttons(self, running: bool) -> None:
        """While the experiment runs, only Stop does something. Run stays as it is: a disabled button loses the keyboard's place."""
        self.running = running
        for widget in (self.predict_button, self.answer, *self._choices):
            widget.disabled = running
        self.run_button.disabled = self.prediction is None
        self.run_button.description = "Running…" if running else "Run"
        self.stop_button.disabled = not running


def choice(description: str, options: Sequence[Any], value: Any, width: str) -> widgets.Dropdown:
    """A list to choose from: also for numbers, because the handle of an ipywidgets slider has no name that a screen reader could say.

    Raises ValueError for a value that is not among the options.
    """
    layout = widgets.Layout(width=width, margin="2px 10px 2px 2px")
    style = {"description_width": "initial"}
    return widgets.Dropdown(
        options=options,
        value=one_of(value, options),
        description=description,
        style=style,
        layout=layout,
    )


def switches(on: Sequence[str], names: Iterable[str], width: str) -> dict[str, widgets.Checkbox]:
    """A box to tick for each name, ticked where the name is among `on`. Raises ValueError for a name that there is not."""
    names = list(names)
    for name in on:
        one_of(name, names)
    return {
        name: widgets.Checkbox(
            value=name in on, description=name, indent=False, layout={"width": width}
        )
        for name in names
    }


def one_of(value: Any, allowed: Iterable[Any]) -> Any:
    """The value. Raises ValueError, which names the choices, for one that is none of them."""
    if value not in (choices := list(allowed)):
        raise ValueError(f"{value!r} is no choice here: there are {', '.join(map(repr, choices))}")
    return value
