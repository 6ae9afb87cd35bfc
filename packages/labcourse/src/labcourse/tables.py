"""Tables that people fill in with a spreadsheet: read in whatever dialect it writes; what it would take for a formula is quoted."""

import csv
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

FORMULA = ("=", "+", "-", "@", "\t", "\r")  # how a cell begins that a spreadsheet would compute


def read(path: Path, needed: Iterable[str] = ()) -> list[dict[str, str]]:
    """The rows: with commas, semicolons or tabs between cells, in UTF-8, UTF-16 or Windows' own letters.

    Raises ValueError, naming it, for a column that is missing.
    """
    text = _decoded(path.read_bytes())
    first = text.partition("\n")[0]
    delimiter = max(",;\t", key=first.count)
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter)
    try:
        columns = [(name or "").strip() for name in reader.fieldnames or []]
    except csv.Error as error:
        raise ValueError(f"{path}: its first line holds no names of columns: {error}") from None
    if missing := [name for name in needed if name not in columns]:
        raise ValueError(f"{path} has no column `{missing[0]}`; it has {', '.join(columns) or 'none'}")
    reader.fieldnames = columns
    try:
        return [{key: _unquoted(value or "") for key, value in row.items() if key} for row in reader]
    except csv.Error as error:
        raise ValueError(f"{path}: this is no table that can be read: {error}") from None


def _decoded(data: bytes) -> str:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return data.decode("utf-16", errors="replace")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return data.decode("cp1252", errors="replace")


def number(text: str) -> float:
    """A number as people write it, with a comma too. Raises ValueError."""
    return float(text.strip().replace(",", ".")) if text.count(",") == 1 and "." not in text else float(text)


def written(columns: Iterable[str], rows: Iterable[dict[str, Any]]) -> str:
    """CSV. What a spreadsheet would take for a formula is quoted."""
    with io.StringIO() as file:
        writer = csv.DictWriter(file, list(columns), lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: _quoted(value) for key, value in row.items()} for row in rows)
        return file.getvalue()


def _quoted(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value[:1] in FORMULA else value


def _unquoted(value: str) -> str:
    return value[1:] if value[:1] == "'" and value[1:2] in FORMULA else value
