"""Compare the answers of a class: who has the published solution, and who has the same answer.

Equal answers prove nothing. An answer of a few words is the same for everybody who is right. So each
group comes with its size and with the number of parts that the answer has.
"""

import ast
import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations

__all__ = ["Compared", "Group", "Normal", "Pair", "compared", "normalized", "pairs"]

SHORT = 25  # parts: answers of fewer agree by chance
FEW = 3  # students: an answer that more students share says little about two of them
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
SYNTAX = (ast.arg, ast.arguments, ast.keyword)  # are no parts of their own


@dataclass(frozen=True)
class Normal:
    """An answer without its names, comments, layout, docstrings, types and order of lines.

    Attributes:
        form: a digest, equal for answers that differ in nothing else; "" where there is no answer.
        parts: the names, operators, constants and statements in it.
        parsed: whether it is Python; other texts are compared word by word.
    """

    form: str
    parts: int
    parsed: bool = True


def normalized(source: str, name: str = "") -> Normal:
    """Normalize one answer: the function called `name`, and what it uses in this cell.

    A cell without such a function is normalized as a whole. Call this function in a
    `labcourse.limited_process.LimitedProcess`, because parsing can take for ever.
    """
    lines = source.splitlines()
    plain = "\n".join(line for line in lines if not line.lstrip().startswith(("%", "!")))
    try:
        module = ast.parse(plain)
    except (SyntaxError, ValueError):
        words = re.sub(r"#.*", "", plain).split()
        return Normal(_digest(" ".join(words)), len(words), parsed=False)
    statements = _used(module, name)
    if not any(_does_something(node) for statement in statements for node in ast.walk(statement)):
        return Normal("", 0)
    counts: Counter[str] = Counter()
    form = _block(statements, _own_names(statements), counts)
    return Normal(_digest(form), counts.total())


def as_text(source: str) -> Normal:
    """Normalize a written answer, or code that cannot be parsed within the limits, to its words."""
    words = re.findall(r"\w+", source.casefold())
    return Normal(_digest(" ".join(words)), len(words), parsed=False)


def _digest(form: str) -> str:
    return hashlib.sha256(form.encode(errors="replace")).hexdigest() if form else ""


def _used(module: ast.Module, name: str) -> list[ast.stmt]:
    """The statement that defines a name, and those that define what it uses."""
    defined: dict[str, list[ast.stmt]] = defaultdict(list)
    for statement in module.body:
        targets = [statement.name] if isinstance(statement, DEFINITIONS) else []
        if isinstance(statement, ast.Assign):
            targets += [target.id for target in statement.targets if isinstance(target, ast.Name)]
        for target in targets:
            defined[target].append(statement)
    if name not in defined:
        ignored = ast.Expr | ast.Import | ast.ImportFrom
        return [item for item in module.body if not isinstance(item, ignored)]
    found: list[ast.stmt] = []
    needed = [name]
    while needed:
        for statement in defined.pop(needed.pop(), []):
            found.append(statement)
            needed += [node.id for node in ast.walk(statement) if isinstance(node, ast.Name)]
    return found


def _does_something(node: ast.AST) -> bool:
    return isinstance(node, ast.stmt) and not isinstance(node, DEFINITIONS) and not _is_idle(node)


def _is_idle(statement: ast.stmt) -> bool:
    """Whether a statement adds nothing to an answer: a docstring, `...`, `pass`, a `print`."""
    if isinstance(statement, ast.Expr):
        value = statement.value
        if isinstance(value, ast.Call):
            return ast.unparse(value.func) == "print"
        return isinstance(value, ast.Constant)
    return isinstance(statement, ast.Pass)


def _own_names(statements: list[ast.stmt]) -> dict[str, str]:
    """The names that an answer gives, each with its replacement.

    A parameter is replaced by its place. All other names are replaced by the same word.
    """
    nodes = [node for statement in statements for node in ast.walk(statement)]
    own: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            parameters = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            for place, parameter in enumerate(parameters):
                own.setdefault(parameter.arg, f"parameter{place}")
    for node in nodes:
        if isinstance(node, DEFINITIONS):
            own.setdefault(node.name, "own")
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.setdefault(node.id, "own")
        elif isinstance(node, ast.alias):
            own.setdefault((node.asname or node.name).partition(".")[0], "own")
        elif isinstance(node, ast.arg):
            own.setdefault(node.arg, "own")
        elif isinstance(node, ast.ExceptHandler) and node.name:
            own.setdefault(node.name, "own")
    return own


def _block(statements: list[ast.stmt], own: dict[str, str], counts: Counter[str]) -> str:
    """Statements in an order that does not depend on the order in which they were written."""
    forms = sorted(_form(item, own, counts) for item in statements if not _is_idle(item))
    return "{" + ";".join(forms) + "}"


def _form(node: object, own: dict[str, str], counts: Counter[str]) -> str:
    """One node of the syntax tree as text, with the names that the answer gives replaced."""
    if isinstance(node, list):
        if node and isinstance(node[0], ast.stmt):
            return _block(node, own, counts)
        return "[" + ",".join(_form(item, own, counts) for item in node) + "]"
    if isinstance(node, ast.AnnAssign):
        node = ast.Assign([node.target], node.value or ast.Constant(None))
    if not isinstance(node, ast.AST):
        return repr(node)
    if isinstance(node, ast.expr_context):
        return ""
    if not isinstance(node, SYNTAX):
        counts[type(node).__name__] += 1
    values = dict(ast.iter_fields(node))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in own:
        keywords = [(own.get(item.arg or "", item.arg), item.value) for item in node.keywords]
        values["keywords"] = [ast.keyword(name, value) for name, value in keywords]
    for field in ("annotation", "returns", "type_comment", "type_params", "kind"):
        values.pop(field, None)
    for field in ("id", "name", "asname", "" if isinstance(node, ast.keyword) else "arg"):
        if isinstance(values.get(field), str):
            values[field] = own.get(values[field], values[field])
    forms = [_form(value, own, counts) for value in values.values()]
    return f"{type(node).__name__}({','.join(forms)})"


@dataclass(frozen=True)
class Group:
    """Students with the same answer."""

    students: tuple[str, ...]
    parts: int
    parsed: bool = True


@dataclass(frozen=True)
class Compared:
    """The answers to one exercise.

    Attributes:
        answers: the students who answered.
        solution: those who have the published solution; empty where none is published.
        solution_parts: how many parts that solution has.
        groups: of the others, those who have the same answer, the longest answers first.
        forms: the distinct answers.
    """

    answers: int
    solution: tuple[str, ...]
    solution_parts: int
    groups: tuple[Group, ...]
    forms: int

    @property
    def most_frequent(self) -> int:
        """The number of students who have the most frequent answer."""
        sizes = [len(group.students) for group in self.groups]
        return max(len(self.solution), min(1, self.answers), *sizes)


def compared(
    answers: dict[str, Normal],
    solutions: Iterable[Normal] = (),
    handed_out: Iterable[Normal] = (),
) -> Compared:
    """Compare the answers of students with each other and with the published solutions.

    Args:
        answers: the answers by the students' ids.
        handed_out: stubs, which are no answers.
    """
    published = {solution.form: solution for solution in solutions}
    ignored = {"", *(stub.form for stub in handed_out)} - set(published)
    by_form: dict[str, list[str]] = defaultdict(list)
    normals = {}
    for student, normal in sorted(answers.items()):
        if normal.form not in ignored:
            by_form[normal.form].append(student)
            normals[normal.form] = normal
    solved = sorted(student for form in published for student in by_form.get(form, []))
    groups = [
        Group(tuple(students), normals[form].parts, normals[form].parsed)
        for form, students in by_form.items()
        if len(students) > 1 and form not in published
    ]
    groups.sort(key=lambda group: (-group.parts, group.students))
    parts = max((solution.parts for solution in published.values()), default=0)
    count = sum(map(len, by_form.values()))
    return Compared(count, tuple(solved), parts, tuple(groups), len(by_form))


@dataclass(frozen=True)
class Pair:
    """Two students who share answers that hardly anybody else has, with the exercises."""

    students: tuple[str, str]
    exercises: tuple[str, ...]


def pairs(found: dict[str, Compared]) -> list[Pair]:
    """Pairs of students who share answers, the most answers first.

    An answer counts if it is long, is not published, and at most `FEW` students have it.
    """
    shared: dict[tuple[str, str], list[str]] = defaultdict(list)
    for exercise, item in found.items():
        for group in item.groups:
            if group.parts >= SHORT and len(group.students) <= FEW:
                for first, second in combinations(group.students, 2):
                    shared[first, second].append(exercise)
    listed = [Pair(students, tuple(exercises)) for students, exercises in shared.items()]
    return sorted(listed, key=lambda pair: (-len(pair.exercises), pair.students))
