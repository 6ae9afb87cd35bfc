"""Sizes of a test run: no option, --slow, --rest and --everything."""

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

SUITE = """
import pytest

def test_fast():
    pass

@pytest.mark.slow
def test_slow():
    pass

@pytest.mark.sample(2)
@pytest.mark.parametrize("case", range(5))
def test_large(case):
    pass
"""


def run(pytester: pytest.Pytester, *options: str) -> set[str]:
    """Return the names of the tests that ran."""
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-v", *options)
    assert result.ret == 0
    passed = (line for line in result.stdout.lines if " PASSED" in line)
    return {line.split("::")[1].split(" ")[0] for line in passed}


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeconftest((Path(__file__).parents[1] / "conftest.py").read_text(encoding="utf-8"))
    pytester.makepyprojecttoml('[tool.pytest.ini_options]\nmarkers = ["slow", "sample(n)"]\n')
    pytester.makepyfile(SUITE)
    return pytester


def test_the_fast_run_and_the_rest_run_each_test_once(suite):
    fast, rest = run(suite), run(suite, "--rest")
    assert fast.isdisjoint(rest)
    assert fast | rest == run(suite, "--everything")
    assert "test_fast" in fast and "test_slow" in rest
    assert len([name for name in fast if name.startswith("test_large")]) == 2


def test_the_slow_run_has_the_slow_tests_and_no_more_of_the_large_sets(suite):
    fast, slow = run(suite), run(suite, "--slow")
    assert "test_slow" in slow and "test_fast" not in slow
    assert fast.isdisjoint(slow)
    assert slow < run(suite, "--rest")


def test_the_sample_is_the_same_in_each_run(suite):
    assert run(suite) == run(suite)


@pytest.mark.parametrize(("larger", "smaller"), [("everything", "rest"), ("rest", "slow")])
def test_two_sizes_together_are_refused(suite, larger, smaller):
    result = suite.runpytest_inprocess(f"--{larger}", f"--{smaller}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*--{larger} includes --{smaller}: give one of them*"])
