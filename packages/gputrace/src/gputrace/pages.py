"""Templates of the HTML pages."""

import re
from functools import cache
from html import escape
from pathlib import Path

import jinja2

from gputrace import units


@cache
def templates() -> jinja2.Environment:
    """Return the environment that loads the templates beside this file."""
    pages = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    pages.filters |= {"bytes": units.byte_text, "time": units.time_text, "code": with_code}
    return pages


def with_code(text: str) -> str:
    """Return a text as HTML, in which the parts in backticks are shown as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))
