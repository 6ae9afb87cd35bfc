"""What `labkit.puzzle` returns: a verdict, a table of scores and a figure."""

from dataclasses import dataclass, field
from html import escape
from typing import NamedTuple

from gputrace.figures.figure import Figure
from gputrace.tables import aligned
from labkit.checks.checking import Verdict

RIGHT, OVER_BUDGET, WRONG = "right", "over budget", "wrong"
NOT_RUN = "could not be run"


@dataclass(frozen=True)
class Judgement:
    """The judgement on one attempt.

    Attributes:
        status: `RIGHT`, `OVER_BUDGET`, `WRONG` or `NOT_RUN`.
        message: what the function did, for the learner.
        score: what was measured, None if the function raised an error.
    """

    status: str
    message: str
    score: float | None = None


class Row(NamedTuple):
    """A row of the table: what the number is, the number, and what to compare it with."""

    label: str
    number: str
    beside: str = ""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a puzzle. A notebook shows the verdict, the table and the figure.

    Attributes:
        verdict: whether the puzzle is solved, and why not.
        rows: the table of scores. It is empty if the function raised an error.
        figure: the learner's memory or timeline, with the original in grey, or None.
        score: the score of a solution, None if the puzzle is not solved.
        best: the learner's best score so far, None if there is none.
    """

    verdict: Verdict
    rows: list[Row] = field(default_factory=list)
    figure: Figure | None = None
    score: float | None = None
    best: float | None = None

    @property
    def solved(self) -> bool:
        """Whether the values are right and the budget is met."""
        return self.verdict.passed

    def __repr__(self) -> str:
        return "\n".join([repr(self.verdict), *aligned(self.rows)]).rstrip()

    def _repr_html_(self) -> str:
        left = 'style="text-align: left"'
        body = ""
        for label, *numbers in self.rows:
            body += f'<tr><th scope="row" {left}>{escape(label)}</th>'
            body += "".join(f"<td {left}>{escape(number)}</td>" for number in numbers) + "</tr>"
        table = f"<table><tbody>{body}</tbody></table>" if body else ""
        return self.verdict._repr_html_() + table

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display({"text/html": self._repr_html_(), "text/plain": repr(self)}, raw=True)
        if self.figure is not None:
            display(self.figure)
