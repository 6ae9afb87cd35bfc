"""The figure of the articles on trial: how many claims of each article hold, held once, and never held."""

from collections import Counter

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from gputrace.figures.figure import (
    BLACK,
    BLUE,
    ORANGE,
    SIZE,
    STYLE,
    TEXT_POINTS,
    VERMILLION,
    Figure,
    add_badge,
    add_title,
    darker,
    shortened,
    words,
)
from labkit import articles
from labkit.articles import VERDICTS
from labkit.experiments.result import Result

LOOKS = {"holds": (BLUE, "white", ""), "held once": (ORANGE, BLACK, "...."), "never held": (VERMILLION, BLACK, "")}  # fill, digits, hatch
NAMES = 188  # points that an article's title may take


def articles_on_trial(result: Result, recorded: Result | None = None) -> Figure:
    """The verdicts on the claims of a trial, article by article; the badges say how many came to what was expected, and where."""
    there = [article for article in articles.articles() if article.name in result.column("article")]
    counts = {article.name: Counter(result.column("verdict", article=article.name)) for article in there}
    with matplotlib.rc_context(STYLE):
        canvas = Canvas(figsize=SIZE, facecolor="white")
        axes = canvas.add_axes((0.4, 0.22, 0.56, 0.62))
        add_title(canvas, _finding(result))
        for row, article in enumerate(there):
            _bar(axes, row, counts[article.name], first=row == 0)
        titles = [f"{shortened(article.title, NAMES)}\n{article.date[:4] or 'no date'}" for article in there]
        axes.set_yticks(range(len(there)), titles, fontsize=TEXT_POINTS)
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel("claims")
        told = [_agreement(some) for some in (result, recorded) if some is not None]
        add_badge(canvas, "\n".join(told))
        return Figure(canvas, words(canvas, *(_spoken(article.title, counts[article.name]) for article in there), *told))


def _finding(result: Result) -> str:
    if not result.rows:
        return "Not tried yet: not even one claim"
    found = Counter(result.column("verdict"))
    return f"Of {len(result.rows)} claims {found['holds']} hold, {found['held once']} held once, {found['never held']} never did"


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
        for place, verdict in zip((0.0, 0.19, 0.46), VERDICTS, strict=True):
            colour = darker(LOOKS[verdict][0])
            axes.text(place, 1.04, f"■ {verdict}", transform=axes.transAxes, color=colour, fontweight="bold", fontsize=TEXT_POINTS + 1)


def _agreement(result: Result) -> str:
    """Where the claims were tried, and how many of them came to what was expected."""
    expected = Counter(result.column("as_expected"))
    return f"{expected['yes']} as expected, {expected['no']} not: {result.badge}"


def _spoken(title: str, counts: Counter) -> str:
    return f"{title}: {', '.join(f'{counts[verdict]} {verdict}' for verdict in VERDICTS)}"
