"""A made-up class: students who found answers of their own, and students who copied one and tried to hide it."""

import ast
import random
from collections.abc import Callable

# Two exercises, each with answers that are right in another way; SAY is what each student computes on the way.
ANSWERS = {
    "on_gpu": [
        "def on_gpu(numbers):\n    note = SAY\n    host = torch.tensor(numbers)\n    return host.to('cuda')\n",
        "def on_gpu(numbers):\n    note = SAY\n    found = torch.empty(len(numbers), device='cuda')\n"
        "    for place, number in enumerate(numbers):\n        found[place] = number\n    return found\n",
        "def on_gpu(numbers):\n    note = SAY\n    values = [float(number) for number in numbers]\n"
        "    return torch.tensor(values, device='cuda')\n",
    ],
}
NEW_NAMES = ("banana", "zeta", "tmp_1", "q")


def own_answer(student: int, name: str = "on_gpu") -> str:
    """An answer that no other student of the class has."""
    thought = " + ".join(str(int(digit) + 1) for digit in f"{student:03d}") + " - len(numbers) * 2"
    return ANSWERS[name][student % len(ANSWERS[name])].replace("SAY", thought)


def renamed(source: str) -> str:
    tree = ast.parse(source)
    stored = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    stored += [node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)]
    new = dict(zip(dict.fromkeys(stored), NEW_NAMES, strict=False))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            node.id = new.get(node.id, node.id)
        elif isinstance(node, ast.arg):
            node.arg = new.get(node.arg, node.arg)
    return ast.unparse(tree)


def reformatted(source: str) -> str:
    return source.replace("(", "( ").replace("    ", "\t").replace("'", '"').replace(" = ", "=").replace("\n", "\n\n")


def commented(source: str) -> str:
    first, _, rest = source.partition("\n")
    body = rest.replace("\n", "  # as I understand it\n")
    return f"# My own idea\n{first}\n    '''Put the numbers on the GPU.'''\n{body}"


def reordered(source: str) -> str:
    """With the first two lines, which need nothing of each other, the other way round."""
    lines = source.splitlines()
    lines[1], lines[2] = (lines[2], lines[1]) if not lines[2].lstrip().startswith("for ") else (lines[1], lines[2])
    return "\n".join(lines)


def annotated(source: str) -> str:
    return source.replace("numbers)", "numbers: list) -> 'torch.Tensor'", 1) + "\n\nprint(on_gpu([1.0, 2.0]))\nmine = 3\n"


DISGUISES: list[Callable[[str], str]] = [str, renamed, reformatted, commented, reordered, annotated]


def made_up_class(count: int, groups: list[int], seed: int = 1) -> tuple[dict[str, str], list[set[str]]]:
    """The answers of `count` students, and who has copied from whom: groups of these sizes, each copy disguised."""
    draw = random.Random(seed)
    students = [f"s{number:03d}" for number in range(count)]
    answers = {student: own_answer(number) for number, student in enumerate(students)}
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
    """Disguised, unless an earlier disguise leaves no place for this one."""
    changed = disguise(source)
    try:
        ast.parse(changed)
    except SyntaxError:
        return source
    return changed
