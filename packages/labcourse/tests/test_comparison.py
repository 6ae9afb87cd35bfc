"""The comparison finds disguised copies and tells them from answers that are often found."""

from functools import cache
from itertools import combinations

import pytest

from labcourse import comparison
from labcourse.comparison import compared, pairs

from .made_up_class import DISGUISES, made_up_class, merged, own_answer

normalized = cache(comparison.normalized)
RIGHT = "def on_gpu(numbers):\n    return torch.tensor(numbers, device='cuda')"


def groups_of(answers: dict[str, str], name: str = "on_gpu") -> list[set[str]]:
    found = compared({student: normalized(source, name) for student, source in answers.items()})
    return sorted((set(group.students) for group in found.groups), key=sorted)


@pytest.mark.parametrize("disguise", DISGUISES)
@pytest.mark.parametrize(
    ("student", "name"), [(0, "on_gpu"), (1, "on_gpu"), (2, "on_gpu"), (3, "fit")]
)
def test_a_disguised_copy_is_the_same_answer(disguise, student, name):
    source = own_answer(student, name)
    assert normalized(disguise(source), name).form == normalized(source, name).form


@pytest.mark.parametrize("disguise", DISGUISES)
def test_a_disguise_changes_an_answer(disguise):
    """Otherwise the tests above would compare equal texts."""
    texts = [own_answer(student) for student in range(3)] + [own_answer(3, "fit")]
    assert disguise is str or any(disguise(text) != text for text in texts)


@pytest.mark.parametrize(
    "other",
    [
        "def on_gpu(numbers):\n    return torch.tensor(numbers, device='cpu')",
        "def on_gpu(numbers):\n    return torch.tensor(numbers).to('cuda')",
        "def on_gpu(numbers):\n    return torch.tensor(list(numbers), device='cuda')",
        "def on_gpu(numbers):\n    return torch.Tensor(numbers, device='cuda')",
        "def on_gpu(numbers):\n    if numbers:\n"
        "        return torch.tensor(numbers, device='cuda')",
    ],
)
def test_another_answer_is_another(other):
    assert normalized(other, "on_gpu").form != normalized(RIGHT, "on_gpu").form


def test_what_is_no_answer_is_compared_with_nothing():
    for source in (
        "",
        "def on_gpu(numbers): ...",
        "def on_gpu(numbers):\n    '''Doc.'''\n    pass",
        "# later",
        "print(3)",
    ):
        assert normalized(source, "on_gpu") == comparison.Normal("", 0)


def test_what_is_no_python_is_compared_by_its_words():
    first, second = (
        normalized(source) for source in ("def f(:\n  return  1  # mine", "def f(:\n\treturn 1")
    )
    assert first == second and not first.parsed
    assert normalized("%time x = 1\n!ls\ny = 2").parsed


def test_helpers_of_an_answer_belong_to_it_and_experiments_do_not():
    helped = "def helper(n=1):\n    return n * 2\n\ndef on_gpu(numbers):\n    return helper(n=3)\n"
    other = (
        "x = on_gpu([1])\ndef double(value=1):\n    return value * 2\ndef on_gpu(a):\n"
        "    return double(value=3)\nfor i in x: print(i)"
    )
    assert normalized(helped, "on_gpu") == normalized(other, "on_gpu")
    assert normalized(helped.replace("* 2", "* 3"), "on_gpu") != normalized(helped, "on_gpu")


@pytest.mark.parametrize("name", ["on_gpu", "fit"])
def test_a_function_that_only_calls_another_is_the_same_answer(name):
    source = own_answer(3, name)
    given = {"on_gpu": "numbers", "fit": "model, batches"}[name]
    moved = source.replace(f"def {name}(", "def mine(")
    for call in (f"mine({given})", f"mine(*[{given}])"):
        wrapper = f'def {name}({given}):\n    """Call it."""\n    return {call}\n'
        same = normalized(f"{moved}\n\n{wrapper}", name) == normalized(source, name)
        assert same == ("*" not in call)
    endless = "def f(x):\n    return g(x)\ndef g(x):\n    return f(x)"
    assert normalized(endless, "f").parsed


def test_written_answers_are_compared_by_their_words():
    assert comparison.as_text("Because it waits.") == comparison.as_text("because **it** waits")
    assert comparison.as_text("Because it waits.") != comparison.as_text("Because it runs.")


def test_published_solutions_and_stubs_are_no_groups():
    stub = "def on_gpu(numbers):\n    return numbers"
    sources = {
        "ada": RIGHT,
        "bob": RIGHT.replace("numbers", "n"),
        "cyd": stub,
        "dee": stub,
        "eve": "",
        "fay": "",
    }
    normals = {student: normalized(source, "on_gpu") for student, source in sources.items()}
    found = compared(normals, [normalized(RIGHT, "on_gpu")], [normalized(stub, "on_gpu")])
    assert (found.answers, found.solution, found.groups, found.most_frequent) == (
        2,
        ("ada", "bob"),
        (),
        2,
    )


@pytest.mark.parametrize(
    ("count", "groups"), [(12, [2, 3]), (30, [2, 2, 4]), (100, [2, 2, 2, 3, 3, 5, 8])]
)
@pytest.mark.parametrize("name", ["on_gpu", "fit"])
def test_the_groups_of_a_made_up_class_are_found_and_nobody_else(count, groups, name):
    answers, planted = made_up_class(count, groups, seed=count, name=name)
    assert groups_of(answers, name) == sorted(planted, key=sorted)


@pytest.mark.parametrize("disguise", DISGUISES)
def test_an_answer_made_of_two_others_is_listed_beside_both(disguise):
    answers = {f"s{number:03d}": own_answer(number, "fit") for number in range(100)}
    answers["s007"] = disguise(merged(answers["s035"], answers["s061"]))
    found = compared({student: normalized(source, "fit") for student, source in answers.items()})
    assert found.groups == ()
    assert found.in_part == (("s007", "s035"), ("s007", "s061"))
    assert [pair.students for pair in pairs({"07.1": found})] == list(found.in_part)


def test_pairs_share_long_answers_that_hardly_anybody_has():
    answers, planted = made_up_class(12, [2, 3])
    normals = {student: normalized(source, "on_gpu") for student, source in answers.items()}
    short = {student: normalized(RIGHT, "on_gpu") for student in answers}
    found = pairs({"01.1": compared(normals), "01.2": compared(normals), "01.3": compared(short)})
    expected = {frozenset(two) for group in planted for two in combinations(group, 2)}
    assert {frozenset(pair.students) for pair in found} == expected
    assert all(pair.exercises == ("01.1", "01.2") for pair in found)
