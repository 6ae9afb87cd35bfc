"""Functions sent by value keep the file in which they were defined."""

import pickle
import types

import pytest

from labkit.processes import by_value


def defined_here(x):
    def inner(y):
        return y + x

    return inner


def test_code_keeps_its_file_and_lines_whatever_version_of_cloudpickle():
    names: dict = {}
    exec(compile("def f(x):\n    return [y / x for y in (1, 2)]\n", "a cell", "exec"), names)
    sent = pickle.loads(by_value.dumps(names["f"]))
    assert sent is not names["f"] and sent(2) == [0.5, 1.0]
    codes = [
        sent.__code__,
        *(value for value in sent.__code__.co_consts if isinstance(value, types.CodeType)),
    ]
    assert {code.co_filename for code in codes} == {"a cell"} and sent.__code__.co_firstlineno == 1


def test_closures_and_lambdas():
    assert pickle.loads(by_value.dumps(defined_here(2)))(3) == 5
    assert pickle.loads(by_value.dumps(lambda: __file__))() == __file__


def test_what_cannot_be_pickled_raises():
    with pytest.raises(TypeError, match="cannot pickle 'generator' object"):
        by_value.dumps(value for value in ())
