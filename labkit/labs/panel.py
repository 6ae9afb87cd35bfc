"""Widgets for labs. A lab asks for a prediction, runs an experiment, and shows both in a figure.

They work with ipywidgets 7.7 and 8. They show text with HTML widgets only, because Output widgets
leave no stable text in a stored notebook.
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
from IPython.display import display

from gputrace.figures.figure import BLUE, IN_THE_DARK, Figure
from gputrace.units import number_text
from labkit import progress_file
from labkit.labs.experiment import Result, Run
from labkit.labs.kept import Kept
from labkit.labs.predictions import parse_prediction
from labkit.labs.round_trip import PANEL, RoundTrip, picture_that_runs

# Arguments of a layout. They are not a Layout, because each box needs a Layout of its own.
WRAP = {"flex_flow": "row wrap", "align_items": "center"}
PROGRAM = "labkit-program"  # class of a list whose lines are code

# A panel brings a hidden style to the page. It makes visible what ipywidgets hardly shows: links,
# the arrows of lists in a dark theme, and the control that has the keyboard focus, whose border
# ipywidgets only changes from grey to light blue.
_ARROW = (
    "%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 18 18'%3E"
    "%3Cpath d='M5 7l4 4 4-4' fill='none' stroke='white'/%3E%3C/svg%3E"
)
_STYLE = f"""<style>
.{PANEL} :is(button, input, select, [tabindex]):focus-visible {{
  outline: 2px solid var(--jp-brand-color1, {BLUE}); outline-offset: -2px }}
.{PANEL} input[type=checkbox]:focus-visible {{ outline-offset: 1px }}
.{PANEL} .widget-checkbox {{ padding-left: 4px }}
.{PROGRAM} select {{ font-family: var(--jp-code-font-family, monospace) }}
.{PANEL} a {{ color: var(--jp-content-link-color, {BLUE}); text-decoration: underline }}
[data-jp-theme-light=false] .{PANEL} img {IN_THE_DARK}
[data-jp-theme-light=false] .{PANEL} {{
  --jp-widgets-dropdown-arrow: url("data:image/svg+xml,{_ARROW}") }}
</style>"""
# JupyterLab takes the arrows and letters that are typed in a list for its own shortcuts, which go
# to another cell or delete this one (https://github.com/jupyter-widgets/ipywidgets/issues/3912).
# An attribute of the list's element prevents that. Python cannot set it, but a script can.
_KEEP_KEYS = (
    f"this.closest('.{PANEL}')?.addEventListener('focusin', event => {{"
    " if (event.target.matches('select')) event.target.dataset.lmSuppressShortcuts = 'true' })"
)
_HIDDEN = _STYLE + picture_that_runs(_KEEP_KEYS)


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the event loop of the kernel that runs this cell, or None outside a notebook."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


@contextmanager
def interrupted_by(action: Callable[..., Any]) -> Iterator[None]:
    """Let an interrupt of the kernel call `action` with the arguments of a signal handler.

    Between two cells, the kernel would ignore an interrupt. Only the main thread receives signals,
    so this changes nothing in other threads.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, action)
    try:
        yield
    finally:
        # A cell that has begun meanwhile has set its own handler, and restores this one's.
        if signal.getsignal(signal.SIGINT) == action:
            signal.signal(signal.SIGINT, before)


class Panel(widgets.VBox):
    """Base class of the widgets in lessons: a box of controls with a question.

    Outside a notebook, and in a stored one, the panel is a text with the question and how to show
    the panel.

    The actions of its buttons run on the kernel's event loop, in the main thread. JupyterLab hands
    clicks to another thread, and Colab drops what other threads draw.

    The browser forgets a panel when its page is loaded again or its cell is run again. A new panel
    shows what the last used panel of the same class and arguments showed.

    Attributes:
        question: what the learner is to predict.
        message: the widget for messages, in panels that use `_say`.
        running: whether an experiment is running.
    """

    question: str
    message: widgets.HTML
    running = False
    shows = "picture"  # the widget whose HTML stays in the notebook when the kernel has ended
    cells_to_run = "the set-up cell at the top of the lesson, and then this cell"
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
        self._kept: Kept | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}: {self.question} Run this cell to bring it up."

    # ipywidgets 8 has this method, and shortens the text to 110 characters.
    if hasattr(widgets.Widget, "_repr_mimebundle_"):

        def _repr_mimebundle_(self, **options: Any) -> Any:
            return super()._repr_mimebundle_(**options) | {"text/plain": repr(self)}

    def _ipython_display_(self, **options: Any) -> None:
        """Show the panel and its second output, which stays in the notebook without a kernel."""
        if self._loop is not None and progress_file.path() is not None:
            self._keep()
        if hasattr(self, "_repr_mimebundle_"):
            display(self._repr_mimebundle_(**options), raw=True)
        else:  # ipywidgets 7
            super()._ipython_display_(**options)

    def _keep(self) -> None:
        """Show the second output (see `kept`), and update it whenever the figure changes."""
        shown = getattr(self, self.shows, None)
        if self._kept is None:
            self._kept = Kept(repr(self._made_with), self.cells_to_run)
            self.add_class(self._kept.css_class)
            if shown is not None:
                shown.observe(self._figure_changed, "value")
        self._kept.show("" if shown is None else shown.value)

    def _figure_changed(self, change: dict[str, Any]) -> None:
        """Copy a new figure to the second output. Do nothing if the figure was cleared."""
        if change["new"] and self._kept is not None:
            self._kept.update(change["new"])

    def _used_before(self) -> Any:
        """Return the last used panel of this class and arguments, or None.

        From now on this panel is the last used one, unless the other one is still running.
        """
        before = self._last_used.get(self._made_with)
        if before is None or not before.running:
            self._last_used[self._made_with] = self
        return before

    def _take_over(self, before: "Panel", *names: str) -> None:
        """Copy attributes of another panel to this one. For a widget, copy its value.

        `names` are the names of the attributes.
        """
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

        def clicked(_: widgets.Button) -> None:
            if at_once:
                self._on_main_thread(action)
            else:
                self._on_main_thread(partial(self._round_trip.then, action))

        button.on_click(clicked)

    def _when_entered(self, field: widgets.Text, action: Callable[[], None]) -> None:
        """Let the Enter key in a text field run the action, as a click on its button does."""

        def heard(_: widgets.Widget, content: Any, buffers: Any) -> None:
            if isinstance(content, dict) and content.get("event") == "submit":
                self._on_main_thread(partial(self._round_trip.then, action))

        field.on_msg(heard)

    def _assign(self, widget: widgets.Widget, trait: str, value: Any, lock: bool = False) -> None:
        """Set a trait that the learner can set too.

        The new value also replaces a value that is on its way from the page. With `lock`, the
        widget is disabled until then, so that the learner cannot choose something in between.
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
        """Show new options in a list, and choose one of them.

        The list is disabled until the page shows the choice.
        """
        select.disabled = True
        select.options = options
        self._assign(select, trait, value, lock=True)

    def _on_main_thread(self, action: Callable[[], None]) -> None:
        """Make this panel the last used one, and run the action on the kernel's event loop."""
        self._last_used[self._made_with] = self
        self._call_on_main_thread(action)

    def _call_on_main_thread(self, action: Callable[[], None]) -> None:
        """Run the action on the kernel's event loop, or now if no loop is running."""
        if self._loop is None or not self._loop.is_running():
            action()
        else:
            self._loop.call_soon_threadsafe(action)

    def _focus(self, button: widgets.Button) -> None:
        """Give a button the keyboard focus, before the button that has it is disabled.

        This needs ipywidgets 8.
        """
        if hasattr(button, "focus"):
            button.focus()

    def _prediction_tested(self) -> None:
        """Add a prediction with a known outcome to the learner's progress."""
        progress_file.add(type(self).__name__, True)

    def _say(self, text: str, alert: bool = False) -> None:
        """Show a message, which a screen reader reads out. Text in backticks is shown as code."""
        html = re.sub(r"`([^`\n]+)`", r"<code>\1</code>", escape(text))
        if alert:
            self.message.value = f'<p role="alert">⚠ {html}</p>'
        else:
            self.message.value = f'<p role="status">{html}</p>'


class ExperimentPanel(Panel):
    """A panel that asks a question, takes a prediction, runs an experiment and shows both.

    `labkit.Lab` is such a panel for any function. Other subclasses define `question`, `unit` and
    the four methods below.

    Attributes:
        unit: the unit of the prediction.
        zero_is_possible: whether 0 is a possible prediction.
        prediction: the learner's prediction, or None.
        result: the result of the last run, or None.
        task: the task in which the last run takes place, or None outside a notebook.
    """

    unit: str
    zero_is_possible = False
    _last_started: ClassVar["ExperimentPanel | None"] = None

    def experiment(self) -> Run:
        """Return the experiment, which has not started yet.

        Raises ValueError if the learner's choices do not fit together.
        """
        raise NotImplementedError

    def point(self, row: dict[str, Any]) -> str:
        """Return a few words about a point that was just measured, for the progress message."""
        raise NotImplementedError

    def draw(self, result: Result, prediction: float | None) -> Figure:
        """Return a figure of the result, with the recording and the prediction if there are any."""
        raise NotImplementedError

    def verdict(self, result: Result, prediction: float) -> str:
        """Return a sentence that says how far the prediction was off."""
        raise NotImplementedError

    def __init__(self, *choices: Sequence[widgets.ValueWidget]) -> None:
        """Make the panel.

        Args:
            choices: rows of widgets below the question. The method `experiment` reads them.
        """
        self._choices = [choice for row in choices for choice in row]
        self.prediction: float | None = None
        self.result: Result | None = None
        self.task: asyncio.Task | None = None
        self._stopping = self._interrupted = self._chosen_meanwhile = False
        self._make_controls()
        question = widgets.HTML(f"<p><b>{escape(self.question)}</b></p>")
        rows = [widgets.HBox(list(row), layout={"flex_flow": "row wrap"}) for row in choices]
        unit = widgets.Label(self.unit)
        predict = widgets.HBox([self.answer, unit, self.predict_button], layout=WRAP)
        run = widgets.HBox([self.run_button, self.stop_button, self.progress], layout=WRAP)
        super().__init__([question, *rows, predict, run, self.message, self.picture])
        self._ask()
        self._bring_back(self._used_before())
        # A prediction that is still on its way belongs to the choice before.
        chosen = partial(self._round_trip.then, self._chosen)
        for choice in self._choices:
            choice.observe(lambda _: self._on_main_thread(chosen), "value")

    def _make_controls(self) -> None:
        """Make the widgets for the prediction, the run and the result, and connect the buttons."""
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

    def _bring_back(self, before: "ExperimentPanel | None") -> None:
        """Show the choices, prediction and result of another panel.

        Do nothing if its choices are not available now, for example on a machine with fewer GPUs.
        """
        if before is None:
            return
        pairs = list(zip(self._choices, before._choices, strict=True))
        for own, its in pairs:
            if getattr(own, "options", None) != getattr(its, "options", None):
                return
        for own, its in pairs:
            own.value = its.value
        self._take_over(before, "answer", "prediction")
        if before.running:
            self._say(
                "An earlier run of this lab continues. Interrupt the kernel to stop it. "
                "Run this cell again to see its result."
            )
        else:
            self.progress.max = before.progress.max
            self._take_over(before, "result", "progress", "message", "picture")
        self._set_buttons(running=False)

    def predicted(self, text: str) -> float:
        """Return the predicted number that a learner typed.

        Raises ValueError, which says what to type, if the text is not a prediction.
        """
        return parse_prediction(text, self.zero_is_possible)

    def _ask(self) -> None:
        """Ask for a prediction."""
        self.prediction = None
        self._say("First predict, then run.")
        self._set_buttons(running=False)

    def _chosen(self) -> None:
        """Ask for a new prediction after the learner has changed a choice.

        While an experiment runs, the panel waits until it ends.
        """
        if self.running:
            self._chosen_meanwhile = True
        else:
            self._ask()

    def _predict(self) -> None:
        if not self.running and self._read_prediction():
            assert self.prediction is not None  # it was just read
            predicted = number_text(self.prediction, 6)
            self._say(f"You predict: {predicted} {self.unit}. Now press Run.")

    def _read_prediction(self) -> bool:
        """Read the prediction from its text box. Show an error and return False if it is none."""
        try:
            self.prediction = self.predicted(self.answer.value)
        except ValueError as error:
            self.prediction = None
            self._say(str(error), alert=True)
        self._set_buttons(running=False)
        return self.prediction is not None

    def _start(self) -> None:
        """Start the experiment, with the prediction that is in the text box."""
        if self.running or self.prediction is None or not self._read_prediction():
            return
        last = ExperimentPanel._last_started
        if last is not None and last.running:
            # Both would measure the work of the other one on the same GPUs.
            self._say(
                f"{type(last).__name__} is still running. Stop it or wait until it has ended. "
                "Then press Run again.",
                alert=True,
            )
            return
        ExperimentPanel._last_started = self
        self._stopping = self._interrupted = self._chosen_meanwhile = False
        self._assign(self.answer, "value", self.answer.value)
        try:
            run = self.experiment()
        except Exception as error:  # the learner must see every error
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
        self._focus(self.run_button)

    def _interrupt(self, *_: Any) -> None:
        self._stopping = self._interrupted = True

    async def _run(self, run: Run) -> None:
        """Run the experiment on the event loop, which handles clicks between two points."""
        end = object()
        with closing(self._steps(run)) as steps:
            while True:
                # Again for each point, because a cell or click in between may set another handler.
                with interrupted_by(self._interrupt):
                    if next(steps, end) is end:
                        return
                    await asyncio.sleep(0)

    def _steps(self, run: Run) -> Generator[None, None, None]:
        """Measure the points of a run, yield after each one, and show the result at the end."""
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
            # Jupyter also interrupts the processes of an experiment. Their errors mean nothing.
            if self._interrupted:
                self._show(run)
            else:
                self._fail(error)
        finally:
            if self._chosen_meanwhile:  # before the page heard that the choices are disabled
                self.prediction = None
            self._set_buttons(running=False)

    def _show(self, run: Run) -> None:
        """Show the figure and the verdict on the prediction."""
        assert self.prediction is not None  # an experiment starts only with a prediction
        self.result = run.result()
        self.progress.max = run.total  # a run may end earlier than it expected
        self.picture.value = self.draw(self.result, self.prediction).html
        text = self.verdict(self.result, self.prediction)
        if run.done < run.total:
            text = f"Stopped after {run.done} of {run.total} points. {text}"
        self._say(text)
        self._prediction_tested()

    def _fail(self, error: Exception) -> None:
        """Show an error. A ValueError of a panel with choices says what to choose instead."""
        self.picture.value = ""
        text = str(error)
        if not self._choices or not isinstance(error, ValueError):
            text = f"The experiment failed. {type(error).__name__}: {text}"
        self._say(text, alert=True)

    def _set_buttons(self, running: bool) -> None:
        """Enable the widgets that the learner may use now, and disable the others.

        While an experiment is `running`, only Stop does something. Run stays enabled then, because
        a button that is disabled loses the keyboard focus.
        """
        self.running = running
        for widget in (self.predict_button, self.answer, *self._choices):
            widget.disabled = running
        self.run_button.disabled = self.prediction is None
        self.run_button.description = "Running…" if running else "Run"
        self.stop_button.disabled = not running


def choice(description: str, options: Sequence[Any], value: Any, width: str) -> widgets.Dropdown:
    """Return a list widget with a description, from which the learner chooses an option.

    `value` is chosen at first, and `width` is the width in CSS. Numbers are chosen from a list too,
    because the handle of an ipywidgets slider has no name for screen readers. Raises ValueError if
    the value is not among the options.
    """
    return widgets.Dropdown(
        options=options,
        value=one_of(value, options),
        description=description,
        style={"description_width": "initial"},
        layout=widgets.Layout(width=width, margin="2px 10px 2px 2px"),
    )


def switches(on: Sequence[str], names: Iterable[str], width: str) -> dict[str, widgets.Checkbox]:
    """Return a checkbox for each name.

    The boxes of the names in `on` are checked. Raises ValueError if such a name does not exist.
    """
    names = list(names)
    for name in on:
        one_of(name, names)
    boxes = {}
    for name in names:
        boxes[name] = widgets.Checkbox(
            value=name in on, description=name, indent=False, layout={"width": width}
        )
    return boxes


def one_of(value: Any, allowed: Iterable[Any]) -> Any:
    """Return the value. Raise ValueError, which lists the choices, if it is not allowed."""
    choices = list(allowed)
    if value not in choices:
        raise ValueError(
            f"{value!r} is not available. Choose one of {', '.join(map(repr, choices))}."
        )
    return value
