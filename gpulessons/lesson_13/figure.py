"""Draw the verdicts: how many sentences of each article hold, and what is wrong with the others."""

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from gpulessons.lesson_13 import articles
from gpulessons.lesson_13.articles import VERDICTS, Claim
from gpulessons.lesson_13.articles.trial import ClaimOutcome
from gputrace.figures.figure import (
    BLACK,
    BLUE,
    GREEN,
    ORANGE,
    SIZE,
    SKY_BLUE,
    TEXT_POINTS,
    VERMILLION,
    YELLOW,
    Figure,
    add_title,
)
from labkit import machine
from labkit.labs.experiment import badge, recorded_result
from labkit.labs.figures import badged, in_style

# Each verdict has a colour, a marker and a column with its name, so no one needs the colour.
LOOKS = {
    "holds": (BLUE, "o"),
    "deprecated": (SKY_BLUE, "p"),
    "outdated": (GREEN, "D"),
    "typo": (YELLOW, "^"),
    "invented": (ORANGE, "X"),
    "false": (VERMILLION, "s"),
}
LONGEST_LINE = 30  # characters of an article's title
SMALLEST_MARKER, MARKER_PER_SENTENCE = 40, 14  # square points
YOURS = "Yours"


@in_style
def draw_verdicts(outcomes: Mapping[Claim, ClaimOutcome], own: Sequence[str] = ()) -> Figure:
    """Draw how many sentences of each article got each verdict.

    `outcomes` has the outcome of each claim. `own` has your verdicts on other sentences, which get
    a row of their own.
    """
    rows: list[tuple[str, Counter]] = []
    for article in articles.articles():
        counts = Counter(claim.verdict for claim in outcomes if claim.article == article)
        if counts:
            label = [*textwrap.wrap(article.title, LONGEST_LINE), article.date[:4] or "no date"]
            rows.append(("\n".join(label), counts))
    if own:
        rows.append((YOURS, Counter(own)))
    canvas = Canvas(figsize=SIZE, facecolor="white")
    axes = canvas.add_axes((0.36, 0.2, 0.61, 0.62))
    add_title(canvas, _finding(rows))
    for place, (_, counts) in enumerate(rows):
        _draw_row(axes, place, counts)
    _label(axes, [label for label, _ in rows])
    spoken = [_spoken(label, counts) for label, counts in rows]
    recorded = _recorded(outcomes)
    if recorded:
        canvas.text(
            0.98, 0.085, recorded, ha="right", fontsize=TEXT_POINTS, color="#444444", style="italic"
        )
        spoken.append(recorded)
    return badged(canvas, _agreement(outcomes), *spoken)


def _finding(rows: Sequence[tuple[str, Counter]]) -> str:
    found = sum((counts for _, counts in rows), Counter())
    if not found:
        return "No sentence was tried"
    old = found["deprecated"] + found["outdated"]
    return (
        f"{found['holds']} of {found.total()} sentences hold, {old} are old, {found['typo']} "
        "have typos, "
        f"{found['invented']} invent names, {found['false']} are false"
    )


def _draw_row(axes: Axes, place: int, counts: Counter) -> None:
    for column, (verdict, (colour, marker)) in enumerate(LOOKS.items()):
        count = counts[verdict]
        if not count:
            axes.text(column, place, "–", ha="center", va="center", color=BLACK)
            continue
        size = SMALLEST_MARKER + MARKER_PER_SENTENCE * count
        axes.scatter(
            column - 0.12,
            place,
            s=size,
            color=colour,
            marker=marker,
            edgecolor=BLACK,
            linewidth=0.7,
        )
        axes.text(column + 0.18, place, str(count), ha="left", va="center", fontweight="bold")


def _label(axes: Axes, rows: Sequence[str]) -> None:
    axes.set_xlim(-0.5, len(LOOKS) - 0.5)
    axes.set_ylim(max(len(rows), 1) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), rows, fontsize=TEXT_POINTS)
    axes.set_xticks(range(len(LOOKS)), list(LOOKS), fontsize=TEXT_POINTS)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.grid(axis="x", visible=False)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _agreement(outcomes: Mapping[Claim, ClaimOutcome]) -> str:
    """Return a text with the number of claims that were tried.

    It also says how many outcomes differ from their verdict, and on which GPU they ran.
    """
    virtual = machine.in_use().virtual
    other = sum(not outcome.fits(claim.expected(virtual)) for claim, outcome in outcomes.items())
    return f"{len(outcomes)} tried, {other} unlike their verdict: {badge()}"


def _recorded(outcomes: Mapping[Claim, ClaimOutcome]) -> str:
    """Return a text that says how many of the claims have a recording on real GPUs, or ""."""
    recorded = recorded_result("articles_on_trial")
    if recorded is None:
        return ""
    verdicts = {claim.name: claim.verdict for claim in outcomes}
    answers = Counter(
        row["as_expected"] for row in recorded.rows if verdicts.get(row["claim"]) == row["verdict"]
    )
    tried = answers["yes"] + answers["no"]
    if tried:
        return f"{tried} tried, {answers['no']} unlike their verdict: {recorded.badge}"
    return ""


def _spoken(label: str, counts: Counter) -> str:
    told = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS)
    return f"{' '.join(label.splitlines())}: {told}"
