"""Four articles on PyTorch and GPUs: their claims, the code that tries them, and the verdicts.

An article has one TOML file, or several in order if it is long. Claims are quoted or told in a few
words. `code` holds the article's lines that the claim is about, without comments. `before` and
`after` are the kit's own code. The code of a claim without a snippet is the kit's own, too.
"""

import tomllib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

# The verdicts, each with a clause about one claim. Deprecated code still runs. An outdated claim
# was true of an older version.
VERDICTS = {
    "holds": "it holds",
    "deprecated": "it is deprecated",
    "outdated": "it is outdated",
    "typo": "it has a typo",
    "invented": "it uses an invented name",
    "false": "it is false",
}
# as a learner meets them
ORDER = (
    "shared_gpu_memory",
    "memory_and_multiple_gpus",
    "gpu_acceleration",
    "speed_up_pytorch",
)

_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Article:
    """An article whose claims are tried.

    `name` is the kit's short name. `url` is "" if the article does not say it.
    """

    name: str
    title: str
    author: str
    date: str
    url: str = ""


@dataclass(frozen=True)
class Expected:
    """Expected outcome of running a claim.

    An empty field means that this does not happen: no exception, no output, no warning.
    """

    raises: str = ""
    message: str = ""
    prints: str = ""
    like: str = ""
    warns: str = ""
    may_warn: str = ""


@dataclass(frozen=True)
class Claim:
    """A claim of an article.

    Attributes:
        name: the name by which `try_claim` finds the claim.
        article: the article, and the `section` of it.
        says: the claim, quoted or in a few words.
        verdict: one of VERDICTS.
        why: what happens instead, or why the claim holds, in a sentence or two.
        snippet: whether `code` is the article's.
        code: the code that runs after `before` and is followed by `after`, in one namespace with
            torch and nn.
        expect: the expected outcome on CUDA, and `expect_virtual` on a virtual GPU if that differs.
        today: the code to write now. It runs after `before`, too, and neither fails nor warns.
        changed: the version in which it changed, and `source`, an address that says so.
        gpus: the number of GPUs that the code needs.
        values: False if only memory and time count, so that virtual GPUs need not compute.
        alone: whether it starts processes or changes what the whole process shares.
        untried: why it is not run. `code` may then be empty.
    """

    name: str
    article: Article
    section: str
    says: str
    verdict: str
    why: str
    snippet: bool = False
    code: str = ""
    before: str = ""
    after: str = ""
    expect: Expected = field(default_factory=Expected)
    expect_virtual: Expected | None = None
    today: str = ""
    changed: str = ""
    source: str = ""
    gpus: int = 1
    values: bool = True
    alone: bool = False
    untried: str = ""

    def expected(self, virtual: bool) -> Expected:
        """Return the expected outcome on a virtual GPU, or on a real one."""
        if virtual and self.expect_virtual is not None:
            return self.expect_virtual
        return self.expect

    @property
    def program(self) -> str:
        """The whole code that runs, including `before` and `after`."""
        parts = [part.strip("\n") for part in (self.before, self.code, self.after) if part]
        return "\n".join(parts) + "\n"


def articles() -> list[Article]:
    """Return the four articles in the order in which a learner meets them."""
    return [_load(name)[0] for name in ORDER]


def claims(article: str | None = None, verdict: str | None = None) -> list[Claim]:
    """Return all claims in reading order, or those of one article or with one verdict.

    Raises ValueError for an unknown article or verdict, and names the choices.
    """
    if article is not None and article not in ORDER:
        raise ValueError(
            f"article={article!r}: choose one of {', '.join(map(repr, ORDER))}, or None for all"
        )
    if verdict is not None and verdict not in VERDICTS:
        raise ValueError(
            f"verdict={verdict!r}: choose one of {', '.join(map(repr, VERDICTS))}, or None for all"
        )
    found = [claim for name in ([article] if article else ORDER) for claim in _load(name)[1]]
    return [claim for claim in found if verdict in (None, claim.verdict)]


def find(name: str) -> Claim:
    """Return the claim of this name. Raises ValueError for an unknown name, and suggests others."""
    there = {claim.name: claim for claim in claims()}
    if name not in there:
        import difflib

        near = difflib.get_close_matches(str(name), there, n=3, cutoff=0.4)
        others = "articles.claims() has all"
        if near:
            others = f"near it: {', '.join(near)}"
        raise ValueError(f"there is no claim {name!r}; {others}")
    return there[name]


@cache
def _load(name: str) -> tuple[Article, list[Claim]]:
    contents = [
        tomllib.loads(path.read_text(encoding="utf-8"))
        for path in sorted(_FOLDER.glob(f"{name}*.toml"))
    ]
    article = Article(name, **contents[0]["article"])
    return article, [_claim(article, entry) for part in contents for entry in part["claim"]]


def _claim(article: Article, entry: dict[str, Any]) -> Claim:
    given = dict(entry)
    given["expect"] = Expected(**given.get("expect", {}))
    if "expect_virtual" in given:
        given["expect_virtual"] = Expected(**given["expect_virtual"])
    claim = Claim(article=article, **given)
    if claim.verdict not in VERDICTS:
        raise ValueError(
            f"{claim.name}: the verdict {claim.verdict!r} is none of {', '.join(VERDICTS)}"
        )
    return claim
