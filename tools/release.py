"""Check that this version can be released, and write what GitHub's release page says about it.

    python tools/release.py NOTES

prints the version of labkit/version.py and writes its section of CHANGELOG.md to the file NOTES.
Fails if the changelog has no such section, or if git has the version's tag already.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main(arguments: list[str]) -> None:
    [notes] = arguments
    version = version_of((ROOT / "labkit" / "version.py").read_text(encoding="utf-8"))
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    list_tags = ["git", "tag", "--list"]
    listed = subprocess.run(list_tags, cwd=ROOT, capture_output=True, text=True, check=True)
    try:
        text = release_notes(version, changelog, listed.stdout.split())
    except ValueError as error:
        sys.exit(str(error))
    Path(notes).write_text(text, encoding="utf-8")
    print(version)


def version_of(text: str) -> str:
    """Return the version that a file assigns to `__version__`."""
    return re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)[0]


def release_notes(version: str, changelog: str, tags: list[str]) -> str:
    """Return the version's section of the changelog. Raises ValueError if it cannot be released."""
    if f"v{version}" in tags:
        raise ValueError(f"v{version} is released already: raise the version in labkit/version.py")
    sections = re.split(r"^## ", changelog, flags=re.MULTILINE)
    own = [section for section in sections if section.startswith(f"[{version}]")]
    if not own:
        raise ValueError(f"CHANGELOG.md has no section ## [{version}]: rename ## [Unreleased]")
    return own[0].partition("\n")[2].strip() + "\n"


if __name__ == "__main__":
    main(sys.argv[1:])
