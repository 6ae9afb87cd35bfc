"""The profiles have the constants that the benchmark's script prints."""

from pathlib import Path

import pytest

from virtualgpu import profiles

from ...benchmarks.timing import fit

FITTED = fit.fit()


@pytest.mark.parametrize("name", FITTED)
def test_a_fitted_constant_is_what_the_script_prints(name):
    field, _, entry = name.partition(".")
    value = getattr(profiles.load("H200"), field)
    assert (value[entry] if entry else value) == FITTED[name][0]


def test_the_script_prints_each_constant_with_its_figures(capsys):
    fit.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(FITTED)
    assert all(
        name in line and source in line
        for line, (name, (_, source)) in zip(lines, FITTED.items(), strict=True)
    )


def test_the_judge_is_no_source():
    """Check that no constant is fitted to multi.py, which shows how good the profile is."""
    assert "multi.json" not in Path(fit.__file__).read_text(encoding="utf-8").replace(
        "Nothing here reads multi.json", ""
    )
