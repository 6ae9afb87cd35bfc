"""Articles on trial: run the code of a claim as it stands, and compare what happens with what is expected."""

import signal
import textwrap
from collections import Counter
from collections.abc import Sequence
from functools import partial
from html import escape
from typing import Any

import ipywidgets as widgets
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Patch

from gpulessons.lesson_13 import articles
from gpulessons.lesson_13.articles import VERDICTS, Claim
from gpulessons.lesson_13.articles.trial import UNTRIED, ClaimOutcome, outcomes, require
from gputrace import Table
from gputrace.figures.figure import BLACK, BLUE, GREEN, ORANGE, SIZE, SKY_BLUE, TEXT_POINTS, VERMILLION, YELLOW, Figure, add_title
from labkit import machine
from labkit.labs.experiment import Result, Row, Run, badge
from labkit.labs.figures import badged, in_style
from labkit.labs.panel import WRAP, Panel, interrupted_by

COLUMNS = {"claim": "", "article": "", "verdict": "", "outcome": "", "as_expected": "", "peak": "bytes"}


def try_claim(name: str) -> ClaimOutcome:
    """Run the claim of this name, as it stands in its article, on the GPUs in use.

    A claim that starts processes, or changes what the whole process shares, runs in a process of its own.

    Raises ValueError when there is no such claim, RuntimeError when too few GPUs are in use.
    """
    [(_, outcome)] = outcomes([articles.find(name)])
    return outcome


def claims_table(article: str | None = None, verdict: str | None = None) -> Table:
    """The claims of one article and with one verdict, or all: what each says, and why the verdict. Prints as text and as HTML.

    Raises ValueError, naming the choices, for an article or a verdict that there is not.
    """
    chosen = articles.claims(article, verdict)
    rows = tuple((claim.name, claim.says, claim.verdict, claim.changed, claim.why) for claim in chosen)
    told = f"{len(chosen)} claims" + (f" of “{chosen[0].article.title}”" if article and chosen else "")
    return Table(("claim", "says", "verdict", "changed in", "why"), rows, told)


def articles_on_trial(names: Sequence[str] | None = None) -> Run:
    """Runs claims, by default all that need no more GPUs than are in use, and compares each with what is expected. One row a claim.

    `names` are some of `articles.claims()`. `as_expected` is "yes", "no" or, for one that cannot be run, "not tried"; `peak` is in
    bytes, on the first GPU. The claims that need a process of their own share one, at the end.

    Raises ValueError for a name that there is not, RuntimeError when too few GPUs are in use.
    """
    told, used = badge(), machine.in_use()
    if names is None:
        chosen = [claim for claim in articles.claims() if claim.gpus <= used.count]
    else:
        chosen = [articles.find(name) for name in names]
    for claim in chosen:
        require(claim)
    parameters = {"names": [claim.name for claim in chosen]}
    return Run("articles_on_trial", parameters, COLUMNS, told, len(chosen), (_row(*tried, used.virtual) for tried in outcomes(chosen)))


def _row(claim: Claim, outcome: ClaimOutcome, virtual: bool) -> Row:
    fits = UNTRIED if outcome.untried else "yes" if outcome.fits(claim.expected(virtual)) else "no"
    row = {"claim": claim.name, "article": claim.article.name, "verdict": claim.verdict}
    return row | {"outcome": outcome.short, "as_expected": fits, "peak": outcome.peak}


# The figure


LOOKS = {  # fill, digits, hatch
    "holds": (BLUE, "white", ""),
    "deprecated": (SKY_BLUE, BLACK, "...."),
    "outdated": (GREEN, BLACK, ""),
    "typo": (YELLOW, BLACK, ""),
    "invented": (ORANGE, BLACK, "////"),
    "false": (VERMILLION, BLACK, ""),
}
NAMES = 34  # characters in a line of an article's title


@in_style
def plot_articles_on_trial(result: Result, recorded: Result | None = None) -> Figure:
    """The verdicts on the claims of a trial, article by article; the badges say how many came to what was expected, and where."""
    there = [article for article in articles.articles() if article.name in result.column("article")]
    counts = {article.name: Counter(result.column("verdict", article=article.name)) for article in there}
    canvas = Canvas(figsize=SIZE, facecolor="white")
    axes = canvas.add_axes((0.4, 0.22, 0.56, 0.62))
    add_title(canvas, _finding(result))
    for row, article in enumerate(there):
        _bar(axes, row, counts[article.name], first=row == 0)
    titles = ["\n".join([*textwrap.wrap(article.title, NAMES), article.date[:4] or "no date"]) for article in there]
    axes.set_yticks(range(len(there)), titles, fontsize=TEXT_POINTS)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("claims")
    told = [_agreement(some) for some in (result, recorded) if some is not None]
    spoken = (_spoken(article.title, counts[article.name]) for article in there)
    return badged(canvas, told[-1], *spoken, *told[:-1], shown="\n".join(told))


def _finding(result: Result) -> str:
    if not result.rows:
        return "Not tried yet: not even one claim"
    found = Counter(result.column("verdict"))
    old = found["deprecated"] + found["outdated"]
    wrong = f"{found['typo']} have typos, {found['invented']} invent names, {found['false']} are false"
    return f"Of {len(result.rows)} claims {found['holds']} hold, {old} are too old, {wrong}"


def _bar(axes: Axes, row: int, counts: Counter, first: bool) -> None:
    left = 0
    for verdict in VERDICTS:
        count = counts[verdict]
        fill, ink, hatch = LOOKS[verdict]
        axes.barh(row, count, left=left, height=0.6, color=fill, hatch=hatch, edgecolor="white", linewidth=1)
        if count:
            look = {"boxstyle": "round,pad=0.15", "facecolor": fill, "edgecolor": "none"}
            axes.text(left + count / 2, row, str(count), ha="center", va="center", color=ink, fontweight="bold", bbox=look)
        left += count
    if first:
        entries = [Patch(facecolor=fill, hatch=hatch, edgecolor="white", label=verdict) for verdict, (fill, _, hatch) in LOOKS.items()]
        legend: dict[str, Any] = {"frameon": False, "fontsize": TEXT_POINTS, "handlelength": 1.2, "columnspacing": 1.0}
        axes.legend(
            handles=entries, ncols=len(entries), loc="lower right", bbox_to_anchor=(1.02, 1.0), borderaxespad=0, handletextpad=0.4, **legend
        )


def _agreement(result: Result) -> str:
    """Where the claims were tried, and how many of them came to what was expected."""
    expected = Counter(result.column("as_expected"))
    tried = f"{expected['yes'] + expected['no']} tried"
    untried = f", {expected[UNTRIED]} {UNTRIED}" if expected[UNTRIED] else ""
    return f"{tried}, {expected['no']} unlike expected{untried}: {result.badge}"


def _spoken(title: str, counts: Counter) -> str:
    return f"{title}: {', '.join(f'{counts[verdict]} {verdict}' for verdict in VERDICTS)}"


# The widget


ANY = "any"
SHOWN = 1500  # characters of an outcome


class ClaimsPanel(Panel):
    """The claims of four articles, to be filtered by article and verdict. Your guess runs the claim that is chosen, on the GPUs in use.

    `name` is the claim chosen at first. `outcome` is what the last one came to. There is no Stop button: a guess runs one claim, which
    takes a moment or, in a process of its own, some seconds, and is ended when it takes longer than it may,
    or when the kernel is interrupted.
    """

    question = "Does this claim hold?"

    def __init__(self, name: str = "_get_shared_mem") -> None:
        claim = articles.find(name)
        self.outcome: ClaimOutcome | None = None
        described = {"style": {"description_width": "5em"}}
        titles = [("all four", ANY), *((article.title, article.name) for article in articles.articles())]
        self.article = widgets.Dropdown(options=titles, value=ANY, description="Article:", **described)
        self.verdict = widgets.Dropdown(options=[ANY, *VERDICTS], value=ANY, description="Verdict:", **described)
        self.choice = widgets.Select(description="Claim:", rows=8, layout=widgets.Layout(width="34em", max_width="100%"), **described)
        self.source = widgets.HTML()
        self.guesses = {verdict: _guess_button(words) for verdict, words in VERDICTS.items()}
        self.message = widgets.HTML()
        self.told = widgets.HTML()
        super().__init__(
            [
                widgets.HTML(f"<p><b>{self.question}</b></p>"),
                widgets.HBox([self.article, self.verdict], layout=WRAP),
                self.choice,
                self.source,
                widgets.HBox(list(self.guesses.values()), layout=WRAP),
                self.message,
                self.told,
            ]
        )
        self._filter()
        self.choice.value = claim.name
        self._show_claim()
        if (before := self._used_before()) is not None:
            self._take_over(before, "article", "verdict")
            self._filter()
            self._take_over(before, "choice")
            self._show_claim()
            self._take_over(before, "outcome", "message", "told")
        for filtered in (self.article, self.verdict):
            filtered.observe(lambda _: self._on_main_thread(self._filter), "value")
        self.choice.observe(lambda _: self._on_main_thread(self._show_claim), "value")
        for verdict, button in self.guesses.items():
            self._when_clicked(button, partial(self._guess, verdict))

    @property
    def claim(self) -> Claim | None:
        """The one that is chosen; None where no claim passes the filters."""
        return articles.find(self.choice.value) if self.choice.value else None

    def _filter(self) -> None:
        """Offer the claims that both filters let pass; the one chosen stays so if it is among them."""
        chosen = [None if filtered.value == ANY else filtered.value for filtered in (self.article, self.verdict)]
        names, before = [claim.name for claim in articles.claims(*chosen)], self.choice.value
        self._offer(self.choice, names, "value", before if before in names else next(iter(names), None))
        self._show_claim()

    def _show_claim(self) -> None:
        claim = self.claim
        self.told.value = ""
        if claim is None:
            self.source.value = ""
            self._say("No claim of this article has this verdict: choose another.")
        else:
            self.source.value = _told_claim(claim)
            self._say("First guess: does it hold? Your guess runs it.")
        for button in self.guesses.values():
            button.disabled = claim is None

    def _guess(self, verdict: str) -> None:
        claim = self.claim
        if claim is None:
            return
        self._say(f"“{claim.name}” runs…")
        if claim.alone and self._loop is not None and self._loop.is_running():
            self._loop.call_later(0.1, self._run, claim, verdict)  # some seconds: let the page say so first
        else:
            self._run(claim, verdict)

    def _run(self, claim: Claim, verdict: str) -> None:
        try:
            with interrupted_by(signal.default_int_handler):
                self.outcome = try_claim(claim.name)
        except KeyboardInterrupt:
            self._say("Interrupted: guess again to run it again.", alert=True)
            return
        except Exception as error:  # whatever it is, the learner must see it
            self.outcome, self.told.value = None, ""
            self._say(f"It could not be tried: {error}", alert=True)
            return
        right = "Right" if verdict == claim.verdict else "No"
        self._say(f"{right}: {VERDICTS[claim.verdict]}. {claim.why}")
        self.told.value = _told_outcome(claim, self.outcome)
        self._prediction_tested()


def _guess_button(words: str) -> widgets.Button:
    sentence = f"{words[0].upper()}{words[1:]}"
    return widgets.Button(description=sentence, tooltip="Guess, and run it", layout=widgets.Layout(width="auto"))


def _told_claim(claim: Claim) -> str:
    """What the article says, where, and the code that puts it to the test."""
    by = f", {claim.article.author}" if claim.article.author else ""
    told = f"<p>“{escape(claim.article.title)}”{escape(by)}, section “{escape(claim.section)}”: <b>{escape(claim.says)}</b>.</p>"
    parts = {"Before it runs": claim.before, _whose(claim): claim.code, "What we look at": claim.after}
    return told + "".join(f"<p>{name}:</p>{_code(code)}" for name, code in parts.items() if code)


def _whose(claim: Claim) -> str:
    return "The article's code" if claim.snippet else "Our code for it"


def _told_outcome(claim: Claim, outcome: ClaimOutcome) -> str:
    text = repr(outcome)
    parts = [f"<p>Here: {_code(text if len(text) <= SHOWN else text[:SHOWN] + '…')}</p>"]
    if claim.today:
        parts.append(f"<p>Today you write:</p>{_code(claim.today)}")
    if claim.changed:
        parts.append(f"<p>Changed in {escape(claim.changed)}.</p>")
    if claim.source:
        parts.append(f'<p>Source: <a href="{escape(claim.source)}" target="_blank">{escape(claim.source)}</a></p>')
    return "".join(parts)


def _code(text: str) -> str:
    return f"<pre style='line-height: 1.3; white-space: pre-wrap'>{escape(text.strip())}</pre>"
