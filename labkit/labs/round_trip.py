"""Question to the page and its answer: after it, every value that the page had sent or held back is in the kernel.

The front end sends a click or the Enter key at once. It holds back a widget's new value while the kernel has not yet
confirmed the one before. A click can therefore overtake the last characters of a number. The kernel sends its question
after the confirmations, and the page sends the held-back values before it answers.

JupyterLab divides its messages between the kernel's main thread and another one (a subshell), which keep no order
between them. The kernel therefore asks a second time: the messages before the first answer are read by then.

ipywidgets 7.7 and 8 hold values back in the same way. `jslink` would answer without any script, but front ends that
create only the widgets they show, such as Colab's, do not run it.
"""

from collections.abc import Callable

import ipywidgets as widgets

PANEL = "labkit-panel"  # class of the element that holds the question and the answer
_ANSWER = "labkit-answer"
_EMPTY = "data:image/gif;base64,R0lGODlhAQABAAAAACH5BAEKAAEALAAAAAABAAEAAAICTAEAOw=="

# The image loads before the panel's elements are joined, so the script looks for the text box up to 100 times.
# The random number makes each answer differ from the one before: an unchanged value is not sent.
_SCRIPT = (
    "const answer = left => {"
    f" const box = this.closest('.{PANEL}')?.querySelector('.{_ANSWER} input');"
    " if (box) { box.value = 'NUMBER ' + Math.random(); box.dispatchEvent(new Event('input', {bubbles: true})) }"
    " else if (left) setTimeout(answer, 50, left - 1) }; answer(100)"
)


def picture_that_runs(script: str) -> str:
    """HTML of an invisible picture. The browser runs the script when it has read the picture."""
    return f'<img alt="" src="{_EMPTY}" onload="{script}">'


class RoundTrip:
    """Question and answer of one panel. `widgets` are hidden, and belong among the panel's children.

    A page is asked only after it has answered once: that is when it first shows the panel. Without such a page, in a
    program or in a front end that runs no scripts, actions run at once. Use an object from one thread only;
    `run_later` passes the answer on to that thread.
    """

    def __init__(self, run_later: Callable[[Callable[[], None]], None]) -> None:
        self._question = widgets.HTML(_question(0), layout=widgets.Layout(display="none"))
        self._answer = widgets.Text(description="Answer of the page:", layout=widgets.Layout(display="none"))
        self._answer.add_class(_ANSWER)
        self._answer.observe(lambda change: run_later(lambda: self._take_answer(change["new"])), "value")
        self.widgets = (self._question, self._answer)
        self._page_answers = False
        self._asked = 0
        self._waiting: list[tuple[int, Callable[[], None]]] = []

    def then(self, action: Callable[[], None]) -> None:
        """Run the action when all values that the page has sent or holds back are here."""
        if self._page_answers:
            self._ask(lambda: self._ask(action))
        else:
            action()

    def after_one(self, action: Callable[[], None]) -> None:
        """Run the action when the page has shown what the kernel has sent so far."""
        if self._page_answers:
            self._ask(action)
        else:
            action()

    def _ask(self, action: Callable[[], None]) -> None:
        """Ask the page, and run the action when the answer is here."""
        self._asked += 1
        self._waiting.append((self._asked, action))
        self._question.value = _question(self._asked)

    def _take_answer(self, text: str) -> None:
        """Run the actions up to this question. The page may leave out answers to earlier questions."""
        number = text.partition(" ")[0]
        if not number.isdecimal():
            return
        self._page_answers = True
        while self._waiting and self._waiting[0][0] <= int(number):
            _, action = self._waiting.pop(0)
            action()


def _question(number: int) -> str:
    return picture_that_runs(_SCRIPT.replace("NUMBER", str(number)))
