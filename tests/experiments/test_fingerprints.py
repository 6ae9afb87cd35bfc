"""The fingerprint of a function changes with its code and with all that the function uses."""

import linecache

import pytest

from labkit.experiments.fingerprints import fingerprint

CELLS = [
    "import math\nWIDTH = 64\nSIZES = [2 ** n for n in range(3)]\nunused = 1\n",
    "class Net:\n    def forward(self):\n        return WIDTH\n",
    "def helper(n):\n    return math.sqrt(n) + len(SIZES)\n",
    "def step(n):\n    local = helper(n)\n    return local + Net().forward()\n",
    "def other(n):\n    return n\n",
]


def run(cells):
    """Run the cells as a notebook does, and return its variables."""
    names = {"__name__": "__main__"}
    for number, cell in enumerate(cells):
        filename = f"<cell {number} of {id(cells)}>"
        linecache.cache[filename] = (len(cell), None, cell.splitlines(keepends=True), filename)
        exec(compile(cell, filename, "exec"), names)
    return names


def fingerprint_with(*cells, name="step"):
    return fingerprint(run(cells)[name])


def changed(number, before, after):
    assert before in CELLS[number]
    return [
        cell.replace(before, after) if index == number else cell for index, cell in enumerate(CELLS)
    ]


@pytest.mark.parametrize(
    ("number", "before", "after"),
    [
        (0, "WIDTH = 64", "WIDTH = 128"),
        (0, "range(3)", "range(4)"),
        (1, "return WIDTH", "return 2 * WIDTH"),
        (2, "math.sqrt(n)", "math.log(n)"),
        (3, "local +", "local -"),
    ],
)
def test_a_change_of_anything_that_is_used_gives_another(number, before, after):
    cells = changed(number, before, after)
    assert "" != fingerprint_with(*cells) != fingerprint_with(*CELLS) != ""
    assert fingerprint_with(*cells, name="other") == fingerprint_with(*CELLS, name="other") != ""


@pytest.mark.parametrize(
    ("number", "before", "after"),
    [
        (0, "unused = 1", "unused = 2"),
        (3, "    local =", "    # A comment.\n\n    local ="),
        (4, "return n", "return 2 * n"),
    ],
)
def test_a_change_of_anything_else_does_not(number, before, after):
    cells = changed(number, before, after)
    assert fingerprint_with(*cells) == fingerprint_with(*CELLS) != ""


def test_what_has_no_source_in_a_notebook_has_no_fingerprint():
    assert fingerprint(print) == "" and fingerprint(run) == ""
    assert fingerprint(eval("lambda: 1", {"__name__": "__main__"})) == ""


def test_a_decorated_function_is_found():
    cell = "import functools\n\n\n@functools.cache\ndef helper(n):\n    return n\n"
    assert fingerprint(run([cell])["helper"].__wrapped__)


USES = "def step(n):\n    return CONSTANT\n"


@pytest.mark.parametrize(
    ("first", "second", "uses"),
    [
        ("CONSTANT = torch.float16", "CONSTANT = torch.float32", USES),
        ("CONSTANT = torch.device('cuda', 0)", "CONSTANT = torch.device('cuda', 1)", USES),
        ("CONSTANT = {'a': [torch.float16]}", "CONSTANT = {'a': [torch.int8]}", USES),
        ("CONSTANT = range(3)", "CONSTANT = range(4)", USES),
        ("CONSTANT = lambda n: n", "CONSTANT = lambda n: 2 * n", USES),
        ("K = 1\nCONSTANT = lambda n: n + K", "K = 2\nCONSTANT = lambda n: n + K", USES),
    ],
)
def test_a_change_of_a_constant_gives_another(first, second, uses):
    cells = [[f"import torch\n{each}\n", uses] for each in (first, second)]
    one, other = (fingerprint(run(each)["step"]) for each in cells)
    assert one and other and one != other


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("step = functools.partial(base, k=1)", "step = functools.partial(base, k=2)"),
        ("step = functools.partial(base, 1)", "step = functools.partial(base, 2)"),
        (
            "step = functools.partial(base, k=torch.relu)",
            "step = functools.partial(base, k=torch.sin)",
        ),
        (
            "step = functools.partial(base, k=lambda: 1)",
            "step = functools.partial(base, k=lambda: 2)",
        ),
        ("step = made(1)", "step = made(2)"),
        ("step = made(lambda: 1)", "step = made(lambda: 2)"),
        ("step = timed(base)", "step = base"),
        (
            "k = made(1)\ndef step(n):\n    return k(n)",
            "k = made(2)\ndef step(n):\n    return k(n)",
        ),
        (
            "k = torch.relu\ndef step(n):\n    return k(n)",
            "k = torch.sin\ndef step(n):\n    return k(n)",
        ),
        ("@decorated(1)\ndef step(n):\n    return n", "@decorated(2)\ndef step(n):\n    return n"),
        (
            "@decorated(1)\ndef step(n):\n    return n",
            "@decorated(1)\ndef step(n):\n    return 2 * n",
        ),
    ],
)
def test_what_is_bound_or_enclosed_counts(first, second):
    before = (
        "import functools\nimport torch\n",
        "def base(n, k=0):\n    return k\n",
        "def made(k):\n    def inner(n):\n        return k\n    return inner\n",
        "def timed(f):\n    @functools.wraps(f)\n    def inner(n):\n        return 2 * f(n)\n"
        "    return inner\n",
        "def decorated(n):\n    def decorate(f):\n        return timed(f)\n    return decorate\n",
    )
    one, same, other = (fingerprint_with(*before, each) for each in (first, first, second))
    assert one == same and one != other
    if "timed" not in first:
        assert one and other


@pytest.mark.parametrize(
    "unknown",
    [
        "torch.ones(2)",
        "torch.nn.Linear(2, 2)",
        "[torch.ones(2)]",
        "object()",
        "[1].append",
        "type('T', (), {})",
    ],
)
def test_what_uses_a_value_without_a_text_has_no_fingerprint(unknown):
    before = f"import functools\nimport torch\nCONSTANT = {unknown}\n"
    base = "def base(n, k=0):\n    return k\n"
    made = "def made(k):\n    def step(n):\n        return k\n    return step\n"
    assert fingerprint_with(before, USES) == ""
    assert fingerprint_with(before, base, "step = functools.partial(base, k=CONSTANT)\n") == ""
    assert fingerprint_with(before, made, "step = made(CONSTANT)\n") == ""


def test_a_lambda_that_is_measured_has_a_fingerprint():
    one, same, other = (fingerprint_with(f"step = lambda n: {k} * n\n") for k in (2, 2, 3))
    assert one == same != other and one and other


def test_a_function_that_calls_itself_has_a_fingerprint():
    cell = (
        "def made():\n"
        "    def step(n):\n"
        "        return other(n - 1) if n else 0\n"
        "    def other(n):\n"
        "        return step(n) + other(n - 1)\n"
        "    return step\n"
        "step = made()\n"
    )
    assert fingerprint_with(cell)
    cells = ["def step(n):\n    return step(n - 1) if n else len(str(n))\n"]
    assert fingerprint_with(*cells)


def test_names_of_packages_need_no_text():
    cells = [
        "import torch\nfrom math import sqrt\nfrom torch import nn\nfrom torch.nn import Linear\n",
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n",
        "def step(n):\n    return nn.ReLU()(Linear(n, n)(torch.ones(n))) + sqrt(n) + abs(Net())\n",
    ]
    assert fingerprint_with(*cells)
