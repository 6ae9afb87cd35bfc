"""Panels with an experiment that needs no GPU, and what is true of each lab."""

import asyncio
import signal
from collections import Counter
from collections.abc import Iterator
from importlib import import_module

import ipywidgets
import pytest

import labkit
from gpulessons.lesson_01.labs import CopySpeedLab, plot_copy_speed
from gpulessons.lesson_01.labs.pinned_memory import COLUMNS
from gpulessons.lesson_02.labs import StreamsLab
from gpulessons.lesson_04.labs import PipelineLab
from gpulessons.lesson_05.labs import AllocatorLab
from gpulessons.lesson_06.labs import LeakLab
from gpulessons.lesson_07.labs import FormatLab
from gpulessons.lesson_08.labs import SharingLab
from gpulessons.lesson_13.labs import ClaimsPanel
from labkit import courses, progress_file
from labkit.labs import Result, Run
from labkit.labs.panel import ExperimentPanel, Panel
from labkit.labs.predictions import parse_prediction


def all_labs() -> dict[str, type[Panel]]:
    """Return the labs of all lessons by name."""
    found: dict[str, type[Panel]] = {}
    for package, folder in courses.lessons().values():
        if list(folder.glob("labs*")):
            classes = [
                value
                for value in vars(import_module(f"{package}.labs")).values()
                if isinstance(value, type)
            ]
            own = [
                made
                for made in classes
                if issubclass(made, Panel) and made.__module__.startswith(package)
            ]
            found |= {made.__name__: made for made in own}
    return found


LABS = all_labs()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: PipelineLab(micro_batches=0), r"0 is not available\. Choose one of 1, 2, 4"),
        (
            lambda: PipelineLab(schedules=("GPipe", "none")),
            r"'none' is not available\. Choose one of",
        ),
        (lambda: SharingLab(way="x"), r"'x' is not available\. Choose one of"),
        (lambda: SharingLab(processes=0), r"0 is not available\. Choose one of"),
        (
            lambda: LeakLab(leaks=("foo",)),
            r"'foo' is not available\. Choose one of .*'kept losses'",
        ),
        (lambda: CopySpeedLab(sizes=[]), "expected at least one size in bytes"),
    ],
)
def test_what_a_lab_is_made_with_is_checked(make, said):
    with labkit.use(gpus=2, virtual=True, quiet=True), pytest.raises(ValueError, match=said):
        make()


def test_the_question_is_of_a_size_that_is_measured():
    with labkit.use(virtual=True, quiet=True):
        lab = CopySpeedLab(sizes=(4096, 1 << 20))
    assert "copy 1 MiB to the GPU" in lab.question


class FakeLab(ExperimentPanel):
    """Lab with an experiment of six points. `before[n]` is called before point n is measured."""

    question = "How many times faster is <pinned> memory?"
    unit = "times"

    def __init__(self):
        self.before = {}
        self.closed = 0
        self.drawn = []
        super().__init__()

    def experiment(self):
        return Run("copy_speed", {}, COLUMNS, "measured on paper", 6, self._points())

    def _points(self):
        try:
            for n in range(6):
                self.before.get(n, lambda: None)()
                size, memory = 1 << (20 + n // 2), ("pageable", "pinned")[n % 2]
                yield {
                    "size": size,
                    "memory": memory,
                    "direction": "h2d",
                    "seconds": 1.0,
                    "bytes_per_second": 1e9 + n,
                }
        finally:
            self.closed += 1

    def point(self, row):
        return row["memory"]

    def draw(self, result: Result, prediction):
        self.drawn.append((len(result.rows), prediction))
        return plot_copy_speed(result)

    def verdict(self, result, prediction):
        return f"{prediction:g} & so on"


def text(lab) -> str:
    return lab.message.value


def buttons(lab) -> tuple[bool, bool, bool]:
    """Return whether the buttons Predict, Run and Stop of a lab are enabled."""
    return tuple(
        not button.disabled for button in (lab.predict_button, lab.run_button, lab.stop_button)
    )


def predict(lab, value: str) -> None:
    lab.answer.value = value
    lab.predict_button.click()


def test_at_first_only_a_prediction_can_be_made():
    lab = FakeLab()
    assert buttons(lab) == (True, False, False)
    assert "First predict, then run." in text(lab)
    lab.run_button.click()
    assert lab.closed == 0
    assert lab.result is None


@pytest.mark.parametrize("name", ["FakeLab", *LABS])
def test_its_text_in_a_stored_notebook_says_what_it_is_and_how_to_bring_it_up(name):
    with labkit.use(gpus=2, virtual=True, quiet=True):
        lab = FakeLab() if name == "FakeLab" else LABS[name]()
        said = f"{name}: {lab.question} Run this cell to bring it up."
    assert said == repr(lab) and lab.question.endswith(("?", ".", ")"))
    if hasattr(lab, "_repr_mimebundle_"):  # ipywidgets 8
        assert lab._repr_mimebundle_()["text/plain"] == said


def test_the_question_is_escaped():
    assert "&lt;pinned&gt;" in FakeLab().children[0].value


def test_predict_then_run_then_see_the_figure_and_the_verdict():
    lab, before = FakeLab(), len(progress_file.tries["FakeLab"])
    predict(lab, " 2.5 ")
    assert "You predict: 2.5 times. Now press Run." in text(lab)
    assert buttons(lab) == (True, True, False)
    lab.run_button.click()
    assert lab.progress.value == lab.progress.max == 6
    assert "2.5 &amp; so on" in text(lab)
    assert lab.picture.value.startswith("<img ")
    assert 'alt="' in lab.picture.value
    assert buttons(lab) == (True, True, False)
    assert lab.drawn == [(6, 2.5)]
    assert lab.closed == 1
    assert len(progress_file.tries["FakeLab"]) == before + 1


@pytest.mark.parametrize("silly", ["", "   ", "banana", "-3", "0", "nan", "inf", "1e9", "<b>"])
def test_silly_predictions_get_a_clear_message_and_no_run(silly):
    lab = FakeLab()
    predict(lab, "2")
    predict(lab, silly)
    assert 'role="alert"' in text(lab)
    assert "type a number greater than 0 and up to 1000" in text(lab)
    assert "<b>" not in text(lab)
    assert buttons(lab) == (True, False, False)


@pytest.mark.parametrize("make", [lambda: FakeLab(), FormatLab, PipelineLab, AllocatorLab])
def test_a_decimal_comma_is_refused_by_name_and_enter_takes_every_prediction(make):
    with labkit.use(virtual=True, quiet=True):
        lab = make()
        for typed, said in (("1,5", "“1,5” has a comma: type a point, 1.5."), ("1.5", "predict")):
            lab.answer.value = typed
            lab.answer._handle_custom_msg({"event": "submit"}, [])
            assert said in text(lab)


def test_numbers_are_predictions():
    assert [parse_prediction(text) for text in ("2", " 0.5", "1e3")] == [2, 0.5, 1000]


def test_stop_ends_the_run_at_the_next_point_and_shows_what_there_is():
    lab = FakeLab()
    lab.before[3] = lab.stop_button.click
    predict(lab, "2")
    lab.run_button.click()
    assert "Stopped after 4 of 6 points. 2 &amp; so on" in text(lab)
    assert lab.drawn == [(4, 2)]
    assert lab.closed == 1
    assert buttons(lab) == (True, True, False)


def test_it_runs_again_after_a_stop():
    lab = FakeLab()
    lab.before[1] = lab.stop_button.click
    predict(lab, "2")
    lab.run_button.click()
    lab.before.clear()
    predict(lab, "4")
    lab.run_button.click()
    assert lab.drawn == [(2, 2), (6, 4)]
    assert "Stopped" not in text(lab)


def test_while_it_runs_only_stop_does_something():
    lab = FakeLab()
    seen = []
    lab.before[1] = lambda: seen.append(
        (buttons(lab), lab.run_button.description, lab.answer.disabled, text(lab))
    )
    lab.before[2] = lab.run_button.click  # does nothing
    lab.before[3] = lambda: lab.answer._handle_custom_msg({"event": "submit"}, [])  # nor does Enter
    predict(lab, "2")
    lab.run_button.click()
    (can, run, disabled, message) = seen[0]
    assert can == (False, True, True)
    assert run == "Running…"
    assert disabled
    assert "Point 1 of 6: pageable" in message
    assert lab.run_button.description == "Run"
    assert lab.closed == 1


def fail():
    raise RuntimeError("out of <memory>")


def test_one_lab_runs_at_a_time():
    lab, other = FakeLab(), FakeLab()
    predict(lab, "2")
    predict(other, "2")
    lab.before[3] = other.run_button.click
    lab.run_button.click()
    assert "FakeLab is still running. Stop it or wait" in text(other) and other.result is None
    other.run_button.click()
    assert "2 &amp; so on" in text(other) and len(lab.result.rows) == 6


def test_an_exception_is_shown_and_the_buttons_come_back():
    lab = FakeLab()
    lab.before[2] = fail
    predict(lab, "2")
    lab.run_button.click()
    assert 'role="alert"' in text(lab)
    assert "The experiment failed. RuntimeError: out of &lt;memory&gt;" in text(lab)
    assert buttons(lab) == (True, True, False)
    assert lab.closed == 1
    lab.before.clear()
    lab.run_button.click()
    assert lab.result is not None


def test_an_experiment_that_cannot_begin_is_shown_too(monkeypatch):
    lab = FakeLab()
    monkeypatch.setattr(lab, "experiment", fail)
    predict(lab, "2")
    lab.run_button.click()
    assert "out of &lt;memory&gt;" in text(lab)
    assert buttons(lab) == (True, True, False)


def test_a_lab_brought_up_again_has_its_choices_prediction_and_result():
    with labkit.use(gpus=2, virtual=True, quiet=True):
        first, other = LeakLab(steps=3), LeakLab(steps=4)
        first.switches["retain_graph"].value = True
        predict(first, "3")
        first.run_button.click()
        again, second_cell = LeakLab(("kept losses",), 3), LeakLab(steps=3)
        assert (
            again.leaks == ["kept losses", "retain_graph"]
            and "retain_graph=True" in again.source.value
        )
        assert (
            again.prediction == 3
            and again.result is first.result
            and again.progress.value == again.progress.max
        )
        assert text(again) == text(first) and again.picture.value == first.picture.value
        assert buttons(again) == (True, True, False)
        assert LeakLab(steps=4).prediction is other.prediction is None
        predict(again, "5")  # the one that was used last, whichever was made last
        assert LeakLab(steps=3).prediction == 5 and second_cell.prediction == 3
    with labkit.use(gpus=4, virtual=True, quiet=True):
        lab = PipelineLab()
        predict(lab, "30")
    with labkit.use(gpus=2, virtual=True, quiet=True):
        assert PipelineLab().prediction is None  # of four stages, of which there are two


def test_each_other_panel_brought_up_again_has_what_it_showed():
    with labkit.use(memory="2GiB", virtual=True, quiet=True):
        for lab in (StreamsLab(), AllocatorLab(), ClaimsPanel()):
            if isinstance(lab, StreamsLab):
                lab.remove_button.click()
                lab.answer.value = "stale value"
            elif isinstance(lab, AllocatorLab):
                lab.answer.value = "20"
            else:
                lab.verdict.value = "deprecated"
            button = lab.guesses["deprecated"] if isinstance(lab, ClaimsPanel) else lab.run_button
            button.click()
            again = type(lab)()
            shown = (
                [getattr(part, "value", None) for part in parts(panel)] for panel in (lab, again)
            )
            assert next(shown) == next(shown)
            assert "predict" in text(again) or "it is deprecated" in text(again).lower()
        held = AllocatorLab().hand
        assert held is not None and held.requests == {"A": 5 << 20}
    with labkit.use(virtual=True, quiet=True):
        assert AllocatorLab().hand is None  # its blocks were those of another machine


def test_an_interrupt_of_the_kernel_is_a_stop_and_no_failure():
    async def learner(of_a_child):
        lab = FakeLab()
        predict(lab, "2")
        await asyncio.sleep(0)
        lab.before[3] = lambda: (signal.raise_signal(signal.SIGINT), of_a_child())
        lab.run_button.click()
        while lab.task is None or not lab.task.done():
            await asyncio.sleep(0)
            if lab.running:
                assert "An earlier run of this lab continues" in text(FakeLab())
        return lab

    before = signal.getsignal(signal.SIGINT)
    assert "Stopped after 4 of 6 points." in text(asyncio.run(learner(of_a_child=int)))
    assert "Stopped after 3 of 6 points." in text(asyncio.run(learner(of_a_child=fail)))
    assert signal.getsignal(signal.SIGINT) == before


def test_on_an_event_loop_clicks_are_heard_between_two_points():
    async def learner():
        lab = FakeLab()
        predict(lab, "2")
        await asyncio.sleep(0)  # the click is done by the loop
        lab.run_button.click()
        assert lab.progress.value == 0
        while lab.progress.value < 2:
            await asyncio.sleep(0)
        assert buttons(lab) == (False, True, True)
        lab.stop_button.click()
        await lab.task
        return lab

    lab = asyncio.run(learner())
    assert "Stopped after " in text(lab)
    assert 2 <= lab.drawn[0][0] < 6
    assert buttons(lab) == (True, True, False)


def test_a_click_from_another_thread_is_done_by_the_loop_in_the_main_thread():
    import threading

    async def learner():
        lab = FakeLab()
        threads = []
        lab.before[0] = lambda: threads.append(threading.current_thread())
        lab.answer.value = "2"
        await asyncio.to_thread(lab.predict_button.click)
        await asyncio.to_thread(lab.run_button.click)
        while lab.result is None:
            await asyncio.sleep(0)
        return threads

    assert asyncio.run(learner()) == [threading.main_thread()]


def test_a_cancelled_run_lets_go_of_the_experiment():
    async def learner():
        lab = FakeLab()
        predict(lab, "2")
        await asyncio.sleep(0)
        lab.run_button.click()
        while lab.progress.value < 2:
            await asyncio.sleep(0)
        lab.task.cancel()
        await asyncio.gather(lab.task, return_exceptions=True)
        return lab

    lab = asyncio.run(learner())
    assert lab.closed == 1
    assert buttons(lab) == (True, True, False)


def parts(widget: ipywidgets.Widget) -> Iterator[ipywidgets.Widget]:
    """Yield the widget and all widgets that it shows."""
    yield widget
    for child in getattr(widget, "children", ()):
        yield from parts(child)


@pytest.mark.parametrize("name", LABS)
def test_no_two_widgets_share_a_layout_or_a_style(name):
    with labkit.use(gpus=2, virtual=True, quiet=True):
        shown = [part for _ in range(2) for part in parts(LABS[name]())]
    for trait in ("layout", "style"):
        owners = Counter(
            look.model_id for part in shown if (look := getattr(part, trait, None)) is not None
        )
        assert owners and max(owners.values()) == 1, trait
