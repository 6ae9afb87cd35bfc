"""Read from an executed notebook how its cells ended. A page has only the text in sight."""

import re
from collections.abc import Sequence
from typing import Any

_COLOURS = re.compile(r"\x1b\[[\d;]*m")


def printed(cell: dict[str, Any]) -> str:
    """Return what a code cell has printed so far."""
    return "".join(_text(output) for output in cell["outputs"])


def failures(cells: Sequence[dict[str, Any]]) -> list[str]:
    """Return the number and the error of each code cell that failed.

    A cell failed if it has a traceback on its standard error, or an error although it does not have
    the tag "raises-exception" of nbconvert and nbval.

    Args:
        cells: the cells of a notebook in nbformat 4, numbered from 0.
    """
    found = []
    for number, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            announced = "raises-exception" in cell["metadata"].get("tags", ())
            texts = [_text(output) for output in cell["outputs"] if _failed(output, announced)]
            found += [f"cell {number}:\n{_joined(cell['source'])}\n\n{text}" for text in texts]
    return found


def _failed(output: dict[str, Any], announced: bool) -> bool:
    if output["output_type"] == "error":
        return not announced
    return output.get("name") == "stderr" and "Traceback (most recent call last)" in _text(output)


def _text(output: dict[str, Any]) -> str:
    match output["output_type"]:
        case "error":
            return _COLOURS.sub(
                "", "\n".join([*output["traceback"], f"{output['ename']}: {output['evalue']}"])
            )
        case "stream":
            return _joined(output["text"])
    return ""


def _joined(text: str | list[str]) -> str:
    """Join the lines of a text in a notebook, which the file may hold as a list of lines."""
    return text if isinstance(text, str) else "".join(text)
