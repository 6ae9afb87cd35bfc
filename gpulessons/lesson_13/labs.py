"""Articles on trial: run a claim's code unchanged, and browse the claims in a panel."""

import signal
from functools import partial
from html import escape

import ipywidgets as widgets

from gpulessons.lesson_13 import articles
from gpulessons.lesson_13.articles import VERDICTS, Claim
from gpulessons.lesson_13.articles.trial import ClaimOutcome, outcomes
from gpulessons.lesson_13.defence import defend
from gpulessons.lesson_13.figure import draw_verdicts
from labkit.labs.panel import WRAP, Panel, interrupted_by

__all__ = ["ClaimsPanel", "defend", "draw_verdicts", "try_claim"]


def try_claim(name: str) -> ClaimOutcome:
    """Run the code of the claim with this name, unchanged, on the GPUs in use.

    A claim that starts processes, or changes what the whole process shares, runs in a process of
    its own.

    Raises ValueError if there is no such claim, and RuntimeError if too few GPUs are in use.
    """
    [(_, outcome)] = outcomes([articles.find(name)])
    return outcome


# The widget


ANY = "any"
SHOWN = 1500  # characters of an outcome


class ClaimsPanel(Panel):
    """Panel with the claims of four articles, filtered by article and verdict.

    A guess runs the chosen claim on the GPUs in use. `name` is the claim chosen at first. `outcome`
    is the outcome of the last claim. There is no Stop button, because a guess runs only one claim.
    This takes a moment, or some seconds in a new process. A claim is ended if it takes longer than
    allowed, or if the kernel is interrupted.
    """

    question = "Does this claim hold?"
    shows = "told"

    def __init__(self, name: str = "_get_shared_mem") -> None:
        claim = articles.find(name)
        self.outcome: ClaimOutcome | None = None
        described = {"style": {"description_width": "5em"}}
        titles = [
            ("all four", ANY),
            *((article.title, article.name) for article in articles.articles()),
        ]
        self.article = widgets.Dropdown(
            options=titles, value=ANY, description="Article:", **described
        )
        self.verdict = widgets.Dropdown(
            options=[ANY, *VERDICTS], value=ANY, description="Verdict:", **described
        )
        self.choice = widgets.Select(
            description="Claim:",
            rows=8,
            layout=widgets.Layout(width="34em", max_width="100%"),
            **described,
        )
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
        before = self._used_before()
        if before is not None:
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
        """The claim that is chosen, or None if no claim passes the filters."""
        if self.choice.value:
            return articles.find(self.choice.value)
        return None

    def _filter(self) -> None:
        """Offer the claims that pass both filters, and keep the chosen claim if it is one."""
        chosen = [
            None if filtered.value == ANY else filtered.value
            for filtered in (self.article, self.verdict)
        ]
        names, before = [claim.name for claim in articles.claims(*chosen)], self.choice.value
        if before not in names:
            before = next(iter(names), None)
        self._offer(self.choice, names, "value", before)
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
            # some seconds: let the page say so first
            self._loop.call_later(0.1, self._run, claim, verdict)
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
    return widgets.Button(
        description=sentence, tooltip="Guess, and run it", layout=widgets.Layout(width="auto")
    )


def _told_claim(claim: Claim) -> str:
    """Return as HTML the claim, its place in the article, and the code that tries it."""
    by = ""
    if claim.article.author:
        by = f", {claim.article.author}"
    title, section = escape(claim.article.title), escape(claim.section)
    where = f"“{title}”{escape(by)}, section “{section}”"
    told = f"<p>{where}: <b>{escape(claim.says)}</b>.</p>"
    parts = {
        "Before it runs": claim.before,
        _whose(claim): claim.code,
        "What we look at": claim.after,
    }
    return told + "".join(f"<p>{name}:</p>{_code(code)}" for name, code in parts.items() if code)


def _whose(claim: Claim) -> str:
    return "The article's code" if claim.snippet else "Our code for it"


def _told_outcome(claim: Claim, outcome: ClaimOutcome) -> str:
    text = repr(outcome)
    if len(text) > SHOWN:
        text = text[:SHOWN] + "…"
    parts = [f"<p>Here: {_code(text)}</p>"]
    if claim.today:
        parts.append(f"<p>Today you write:</p>{_code(claim.today)}")
    if claim.changed:
        parts.append(f"<p>Changed in {escape(claim.changed)}.</p>")
    if claim.source:
        parts.append(
            f'<p>Source: <a href="{escape(claim.source)}" '
            f'target="_blank">{escape(claim.source)}</a></p>'
        )
    return "".join(parts)


def _code(text: str) -> str:
    return f"<pre style='line-height: 1.3; white-space: pre-wrap'>{escape(text.strip())}</pre>"
