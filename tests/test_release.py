"""A release needs its section in the changelog and a version that has no tag."""

from pathlib import Path

import pytest

import labkit
from tools.release import release_notes, version_of

ROOT = Path(__file__).parents[1]
CHANGELOG = """# Changelog

## [0.2.0] - 2027-01-05

### Added

- Something new.

## [0.1.0] - 2026-12-01

- The first release.
"""


def test_notes_are_the_section_of_the_version():
    assert release_notes("0.2.0", CHANGELOG, ["v0.1.0"]) == "### Added\n\n- Something new.\n"
    assert release_notes("0.1.0", CHANGELOG, []) == "- The first release.\n"


def test_a_version_is_released_once():
    with pytest.raises(ValueError, match="v0.2.0 is released already"):
        release_notes("0.2.0", CHANGELOG, ["v0.1.0", "v0.2.0"])


@pytest.mark.parametrize("version", ["0.3.0", "0.2"])
def test_a_version_needs_a_section_of_the_changelog(version):
    with pytest.raises(ValueError, match=r"CHANGELOG.md has no section"):
        release_notes(version, CHANGELOG, [])


def test_the_version_is_read_where_it_is_kept():
    text = (ROOT / "labkit" / "version.py").read_text(encoding="utf-8")
    assert version_of(text) == labkit.__version__
