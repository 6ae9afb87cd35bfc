"""Warnings of C++ and of the kit name the line of the program, as on a real GPU."""

import sys
import warnings

import pytest
import torch


def discard_imaginary_part():
    """Return the number of the line that lets C++ warn on a path through the kit's Python."""
    torch.ones(2, dtype=torch.complex64, device="cuda").to(torch.float32)
    return sys._getframe().f_lineno - 1


@pytest.fixture(autouse=True)
def warn_always():
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(before)


@pytest.fixture
def registry():
    globals().pop("__warningregistry__", None)
    yield
    globals().pop("__warningregistry__", None)


def test_a_warning_of_cpp_names_the_line_of_the_program(machine):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        line = discard_imaginary_part()
    (warning,) = caught
    assert "discards the imaginary part" in str(warning.message)
    assert (warning.filename, warning.lineno) == (__file__, line)


@pytest.mark.parametrize(("action", "times"), [("always", 2), ("default", 1), ("once", 1)])
def test_a_line_warns_as_often_as_python_says(machine, registry, action, times):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter(action)
        warnings.onceregistry.clear()
        for _ in range(2):
            discard_imaginary_part()
    assert len(caught) == times


def test_two_lines_warn_twice(machine, registry):
    x = torch.ones(2, dtype=torch.complex64, device="cuda")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        x.to(torch.float32)
        x.to(torch.float64)
    assert [warning.filename for warning in caught] == [__file__] * 2
    assert caught[1].lineno == caught[0].lineno + 1


def test_a_filter_for_the_programs_module_counts(machine, registry):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", module=__name__)
        discard_imaginary_part()
    assert not caught


def test_a_warning_that_is_an_error_is_raised(machine, registry):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", module=__name__)
        with pytest.raises(UserWarning, match="discards the imaginary part"):
            discard_imaginary_part()


def test_a_warning_of_other_code_is_unchanged(machine):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.warn_explicit("from elsewhere", UserWarning, "elsewhere.py", 7)
    (warning,) = caught
    assert (warning.filename, warning.lineno) == ("elsewhere.py", 7)
