"""A made-up class: some students found their own answers, others copied and disguised one."""

import ast
import random
import re
from collections.abc import Callable

# Answers that are right in another way. CHAIN is what each student calls on the way.
ANSWERS = {
    "on_gpu": [
        "def on_gpu(numbers):\n    side = 'cuda'\n    host = torch.tensor(numbers)CHAIN\n"
        "    return host.to(side)\n",
        "def on_gpu(numbers):\n    found = torch.empty(len(numbers), device='cuda')\n"
        "    for place, number in enumerate(numbers):\n        found[place] = number\n"
        "    return foundCHAIN\n",
        "def on_gpu(numbers):\n    side = 'cuda'\n    values = [float(number) for number in "
        "numbers if number == number]\n"
        "    return torch.tensor(values, device=side)CHAIN\n",
    ],
    "fit": [
        "def fit(model, batches):\n"
        "    ready = [torch.nn.functional.normalize(batch.to('cuda')CHAIN, dim=1) for batch in "
        "batches]\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)\n    total = 0\n"
        "    for batch in ready:\n"
        "        optimizer.zero_grad()\n        loss = model(batch)ODD.square().mean() * 2 + "
        "batch.abs().mean() * 3\n"
        "        loss.backward()\n        optimizer.step()\n        total += loss.item()\n"
        "    if total > 100:\n        return 100\n    else:\n        return total\n",
    ],
}
# Each gives back the same numbers, so that the answer stays right.
METHODS = (
    "clone",
    "detach",
    "contiguous",
    "float",
    "flatten",
    "ravel",
    "positive",
    "conj",
    "resolve_conj",
    "resolve_neg",
)
NEW_NAMES = ("banana", "zeta", "tmp_1", "q", "w", "e", "r2")


def own_answer(student: int, name: str = "on_gpu") -> str:
    """Return an answer that no other student of the class has."""
    chain = [f".{METHODS[int(digit)]}()" for digit in f"{student:03d}"]
    text = ANSWERS[name][student % len(ANSWERS[name])]
    return text.replace("CHAIN", "".join(chain * 2)).replace("ODD", "".join(chain[::-1] * 2))


def renamed(source: str) -> str:
    tree = ast.parse(source)
    stored = [
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    ]
    stored += [node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)]
    new = dict(zip(dict.fromkeys(stored), NEW_NAMES, strict=False))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            node.id = new.get(node.id, node.id)
        elif isinstance(node, ast.arg):
            node.arg = new.get(node.arg, node.arg)
    return ast.unparse(tree)


def reformatted(source: str) -> str:
    return (
        source.replace("(", "( ")
        .replace("    ", "\t")
        .replace("'", '"')
        .replace(" = ", "=")
        .replace("\n", "\n\n")
    )


def commented(source: str) -> str:
    first, _, rest = source.partition("\n")
    body = rest.replace("\n", "  # as I understand it\n")
    return f"# My own idea\n{first}\n    '''Put the numbers on the GPU.'''\n{body}"


def reordered(source: str) -> str:
    """Return the answer with its first two lines exchanged. They do not depend on each other."""
    lines = source.splitlines()
    lines[1], lines[2] = (
        (lines[2], lines[1]) if not lines[2].lstrip().startswith("for ") else (lines[1], lines[2])
    )
    return "\n".join(lines)


def annotated(source: str) -> str:
    return (
        source.replace("numbers)", "numbers: list) -> 'torch.Tensor'", 1)
        + "\n\nprint(on_gpu([1.0, 2.0]))\nmine = 3\n"
    )


def looped(source: str) -> str:
    """Return the answer with a loop in place of a comprehension."""
    return re.sub(
        r"    (\w+) = \[(.*) (for \w+ in \w+)( if .*)?\]\n",
        lambda m: (
            f"    {m[1]} = []\n    {m[3]}:\n"
            f"        {f'if{m[4][3:]}: ' if m[4] else ''}{m[1]}.append({m[2]})\n"
        ),
        source,
    )


def with_constants(source: str) -> str:
    """Return the answer with each constant under a name, at the top of the cell or the function."""
    tree = ast.parse(source)
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    names = [
        ast.Assign([ast.Name(f"MY_{place}")], ast.Constant(node.value), lineno=0)
        for place, node in enumerate(found)
    ]
    lines = ast.unparse(
        _Named({id(node): f"MY_{place}" for place, node in enumerate(found)}).visit(tree)
    ).splitlines()
    half = len(names) // 2
    inside = ["    " + ast.unparse(name) for name in names[:half]]
    return "\n".join([*map(ast.unparse, names[half:]), lines[0], *inside, *lines[1:]])


class _Named(ast.NodeTransformer):
    def __init__(self, names: dict[int, str]) -> None:
        self._names = names

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return ast.Name(self._names[id(node)]) if id(node) in self._names else node


def with_dead_code(source: str) -> str:
    """Return the answer with lines that do nothing, at its beginning and end."""
    first, _, rest = source.rstrip().partition("\n")
    dead = (
        "    spare = 3 * 7\n    spare2 = spare\n    if False:\n        print('never')\n"
        "    assert 1 == 1\n"
    )
    return f"import math\n{first}\n{dead}{rest}\n    after = 1\n    return after\n"


def with_another_name(source: str) -> str:
    """Return the answer with a name for the result, and without the short form of a sum."""
    source = re.sub(
        r"    return ([^0-9\n]+)\n", r"    answer = \1\n    return answer\n", source + "\n"
    )
    return re.sub(r"(\w+) \+= (.*)", r"\1 = \2 + \1", source)


def turned(source: str) -> str:
    """Return the answer with conditions written the other way round."""
    return re.sub(
        r"if (\w+) > 100:\n(.*)\n    else:\n(.*)\n",
        r"if not 100 < \1:\n\3\n        pass\n    else:\n\2\n",
        source,
    )


def imported(source: str) -> str:
    """Return the answer with other names for functions of PyTorch."""
    changed = source.replace("torch.tensor(", "make(").replace("torch.nn.functional.", "F.")
    return f"from torch import tensor as make\nimport torch.nn.functional as F\n{changed}"


def merged(first: str, second: str) -> str:
    """Return the first half of one answer to "fit", joined with the second half of another."""
    return first[: first.index("    total = 0")] + second[second.index("    total = 0") :]


DISGUISES: list[Callable[[str], str]] = [
    str, renamed, reformatted, commented, reordered, annotated, looped, with_constants,
    with_dead_code, with_another_name, turned, imported,
]  # fmt: skip


def made_up_class(
    count: int,
    groups: list[int],
    seed: int = 1,
    name: str = "on_gpu",
) -> tuple[dict[str, str], list[set[str]]]:
    """Return the answers of `count` students, and the groups of students who copied.

    The groups have the given sizes. Each copy is disguised.
    """
    draw = random.Random(seed)
    students = [f"s{number:03d}" for number in range(count)]
    answers = {student: own_answer(number, name) for number, student in enumerate(students)}
    free = draw.sample(students, sum(groups))
    planted = []
    for size in groups:
        group, free = free[:size], free[size:]
        for student in group[1:]:
            answers[student] = answers[group[0]]
            for disguise in draw.sample(DISGUISES, 3):
                answers[student] = _disguised(answers[student], disguise)
        planted.append(set(group))
    return answers, planted


def _disguised(source: str, disguise: Callable[[str], str]) -> str:
    """Return the disguised answer, or the answer itself if this disguise no longer applies."""
    changed = disguise(source)
    try:
        ast.parse(changed)
    except SyntaxError:
        return source
    return changed
