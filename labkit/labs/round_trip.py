"""Wait until the kernel has every value that was typed into a page's widgets.

The kernel asks the page a question. When the answer comes, the kernel has all earlier values.

The front end sends a click or the Enter key at once. It holds back a widget's new value while the
kernel has not yet confirmed the previous one. A click can therefore overtake the last characters of
a number. The kernel sends its question after the confirmations, and the page sends the held-back
values before it answers.

JupyterLab divides its messages between the kernel's main thread and another one (a subshell), which
keep no order between them. The kernel therefore asks a second time. When the second answer comes,
the messages before the first answer have been read.

ipywidgets 7.7 and 8 hold values back in the same way. `jslink` would answer without a script, but
it does not run in front ends that create only the widgets they show, such as Colab's.
"""

from collections.abc import Callable

import ipywidgets as widgets

PANEL = "labkit-panel"  # class of the element that holds the question and the answer
_ANSWER = "labkit-answer"
_EMPTY = "data:image/gif;base64,R0lGODlhAQABAAAAACH5BAEKAAEALAAAAAABAAEAAAICTAEAOw=="

# The image loads before the panel's elements are joined, so the script looks for the text box up
# to 100 times. The random number makes each answer different, because an unchanged value is not
# sent.
_SCRIPT = (
    "const answer = left => {"
    f" const box = this.closest('.{PANEL}')?.querySelector('.{_ANSWER} input');"
    " if (box) { box.value = 'NUMBER ' + Math.random();"
    " box.dispatchEvent(new Event('input', {bubbles: true})) }"
    " else if (left) setTimeout(answer, 50, left - 1) }; answer(100)"
)


def picture_that_runs(script: str) -> str:
    """Return the HTML of an invisible picture. The browser loads it and then runs the script."""
    return f'<img alt="" src="{_EMPTY}" onload="{script}">'


class RoundTrip:
    """The questions and answers of one panel. Use an object from one thread only.

    The page answers for the first time when it shows the panel, and is asked only after that. In a
    program, or in a front end that runs no scripts, there is no answer, and actions run at once.

    Attributes:
        widgets: hidden widgets, which must be among the panel's children.
    """

    def __init__(self, run_later: Callable[[Callable[[], None]], None]) -> None:
        """Make the hidden widgets. `run_later` runs a function in the thread of this object."""

        def answered(change: dict[str, str]) -> None:
            run_later(lambda: self._take_answer(change["new"]))

        hidden = widgets.Layout(display="none")
        self._question = widgets.HTML(_question(0), layout=hidden)
        hidden = widgets.Layout(display="none")
        self._answer = widgets.Text(description="Answer of the page:", layout=hidden)
        self._answer.add_class(_ANSWER)
        self._answer.observe(answered, "value")
        self.widgets = (self._question, self._answer)
        self._page_answers = False
        self._asked = 0
        self._waiting: list[tuple[int, Callable[[], None]]] = []

    def then(self, action: Callable[[], None]) -> None:
        """Run the action when the kernel has all values that the page has sent or holds back."""
        if self._page_answers:
            self._ask(lambda: self._ask(action))
        else:
            action()

    def after_one(self, action: Callable[[], None]) -> None:
        """Run the action when the page has shown what the kernel has sent so far.

        Run it now if the page does not answer.
        """
        if self._page_answers:
            self._ask(action)
        else:
            action()

    def _ask(self, action: Callable[[], None]) -> None:
        """Send the page a question, and run the action when the page has answered it."""
        self._asked += 1
        self._waiting.append((self._asked, action))
        self._question.value = _question(self._asked)

    def _take_answer(self, text: str) -> None:
        """Run the actions that wait for this answer of the page, or for an earlier one.

        `text` begins with the number of the question. Other texts are ignored.
        """
        number = text.partition(" ")[0]
        if not number.isdecimal():
            return
        self._page_answers = True
        while self._waiting and self._waiting[0][0] <= int(number):
            _, action = self._waiting.pop(0)
            action()


def _question(number: int) -> str:
    """Return the HTML of a question, whose script makes the page answer with its number."""
    return picture_that_runs(_SCRIPT.replace("NUMBER", str(number)))
