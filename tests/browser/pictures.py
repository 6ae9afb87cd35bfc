"""Pictures of the pages, kept for who wants to look. No test fails for want of them."""

from pathlib import Path
from typing import Any


class Pictures:
    """Pictures in one folder. Each file name begins with the name of the front end."""

    def __init__(self, folder: Path, front_end: str) -> None:
        self.folder, self.front_end = folder, front_end
        self.kept: list[Path] = []
        self.trouble: OSError | None = None

    def keep(self, page: Any, name: str) -> None:
        """Take a picture of the visible part of a page.

        Continue if the folder cannot be written.
        """
        path = self.folder / f"{self.front_end}_{name}.png"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            path.write_bytes(page.screenshot())
            self.kept.append(path)
        except OSError as error:
            self.trouble = error

    def told(self) -> str:
        """Return a note that says how many pictures there are and where, or why there are none."""
        if self.trouble is not None:
            return f"pictures of the pages could not be kept: {self.trouble}"
        return f"{len(self.kept)} pictures of the pages are in {self.folder}" if self.kept else ""
