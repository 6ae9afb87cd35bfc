"""Read and write CSV tables that people edit in a spreadsheet program.

Text that a spreadsheet would compute as a formula is written with a quote in front of it. In some
countries, spreadsheet programs separate cells by semicolons. So a formula may begin within a text.
"""

import csv
import io
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# The place before a formula: at the beginning, or where another program sees a new cell. A hyphen
# with a space begins an item of a list.
FORMULA = r"(?:\A(?=[=+@\t\n-])|(?<=[;\t\n])(?=[=+@]|-\S))"
QUOTED = r"(?:\A'(?=[=+@\t\n-])|(?<=[;\t\n])'(?=[=+@]|-\S))"


def read(path: Path, needed: Iterable[str] = ()) -> list[dict[str, str]]:
    """Read the rows of a table.

    The cells are separated by commas, semicolons or tabs. The encoding is UTF-8, UTF-16 or
    Windows-1252.

    Raises:
        ValueError: the table cannot be read, or lacks a column of `needed`.
    """
    text = _decoded(path.read_bytes())
    first = text.partition("\n")[0]
    delimiter = max(",;\t", key=first.count)
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter)
    try:
        columns = [(name or "").strip() for name in reader.fieldnames or []]
    except csv.Error as error:
        raise ValueError(f"{path}: the first line has no column names ({error})") from None
    missing = [name for name in needed if name not in columns]
    if missing:
        found = ", ".join(columns) or "no column"
        raise ValueError(f"{path}: expected a column `{missing[0]}`, got {found}")
    reader.fieldnames = columns
    try:
        return [
            {key: _unquoted(value or "") for key, value in row.items() if key} for row in reader
        ]
    except csv.Error as error:
        raise ValueError(f"{path} cannot be read as a table: {error}") from None


def _decoded(data: bytes) -> str:
    """Decode a table in one of the encodings that spreadsheet programs write."""
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return data.decode("utf-16", errors="replace")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return data.decode("cp1252", errors="replace")


def number(text: str) -> float:
    """Read a number with a decimal point or a decimal comma. Raise ValueError for other text."""
    text = text.strip()
    if text.count(",") == 1 and "." not in text:
        text = text.replace(",", ".")
    return float(text)


def written(columns: Iterable[str], rows: Iterable[dict[str, Any]]) -> str:
    """Return a table as CSV, with formulas quoted."""
    with io.StringIO() as file:
        writer = csv.DictWriter(file, list(columns), lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: _quoted(value) for key, value in row.items()} for row in rows)
        return file.getvalue()


def _quoted(value: Any) -> Any:
    """Put a quote before each text that a spreadsheet would take for a formula.

    All lines end with a line feed, because `csv` writes other ends of lines without quotes.
    """
    if isinstance(value, str):
        return re.sub(FORMULA, "'", re.sub(r"\r\n?", "\n", value))
    return value


def _unquoted(value: str) -> str:
    """Remove the quotes that `_quoted` put into a text."""
    return re.sub(QUOTED, "", value)
