"""Compare the answers of a class: who has the published solution, and who has the same answer.

Equal answers prove nothing. A short answer is the same for everybody who is right. So each group
comes with its size, and with the number of parts in its answer.
"""

import ast
import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, product

from labcourse.simplified import simplified

__all__ = ["Compared", "Group", "Normal", "Pair", "compared", "normalized", "pairs"]

SHORT = 25  # parts. Shorter answers are often equal by chance.
FEW = 3  # students. An answer that more students share says little about two of them.
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
SYNTAX = (ast.arg, ast.arguments, ast.keyword)  # nodes that do not count as parts
UNUSED = ("annotation", "returns", "type_comment", "type_params", "kind")
COMMUTATIVE = (ast.Add, ast.Mult, ast.BitAnd, ast.BitOr, ast.BitXor)
LONG = 8  # parts of a long statement. Shorter statements are in many answers.
SHARED = 0.4  # of an answer's rare statements. Two answers that share less are alike by chance.


@dataclass(frozen=True)
class Normal:
    """Normal form of an answer.

    It does not depend on the names, comments, layout, docstrings, types and the order of lines.

    Attributes:
        form: a digest. Answers with the same normal form have the same digest. "" for no answer.
        parts: the number of names, operators, constants and statements.
        parsed: whether the answer is Python. Other texts are compared word by word.
        pieces: the digests of the long statements, each with the number of its parts.
    """

    form: str
    parts: int
    parsed: bool = True
    pieces: tuple[tuple[str, int], ...] = ()


def normalized(source: str, name: str = "") -> Normal:
    """Normalize an answer: the function called `name`, and what it uses from its cell.

    A cell without such a function is normalized as a whole. Call this function in a
    `labcourse.limited_process.LimitedProcess`, because parsing may never end.
    """
    lines = source.splitlines()
    plain = "\n".join(line for line in lines if not line.lstrip().startswith(("%", "!")))
    try:
        module = ast.parse(plain)
    except (SyntaxError, ValueError):
        words = re.sub(r"#.*", "", plain).split()
        return Normal(_digest(" ".join(words)), len(words), parsed=False)
    name = _wrapped(module, name)
    statements = simplified(_used(module, name), name, _imported(module))
    nodes = [node for statement in statements for node in ast.walk(statement)]
    if all(isinstance(node, DEFINITIONS) for node in nodes if isinstance(node, ast.stmt)):
        return Normal("", 0)
    written = _Written(_own_names(statements))
    form = written.block(statements)
    return Normal(_digest(form), written.parts, pieces=tuple(sorted(written.pieces.items())))


def as_text(source: str) -> Normal:
    """Normalize a written answer, or code that cannot be parsed, to its words."""
    words = re.findall(r"\w+", source.casefold())
    return Normal(_digest(" ".join(words)), len(words), parsed=False)


def _digest(form: str) -> str:
    """Return the SHA-256 of a normal form, or "" for an empty one."""
    if not form:
        return ""
    return hashlib.sha256(form.encode(errors="replace")).hexdigest()


def _used(module: ast.Module, name: str) -> list[ast.stmt]:
    """Return the statements that define a name, and those that define the names used in them."""
    defined: dict[str, list[ast.stmt]] = defaultdict(list)
    for statement in module.body:
        targets: list[str] = []
        if isinstance(statement, DEFINITIONS):
            targets.append(statement.name)
        elif isinstance(statement, ast.Assign):
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


def _wrapped(module: ast.Module, name: str) -> str:
    """Return the function that the function `name` only passes its own parameters to.

    Return `name` itself if it does something else.
    """
    functions = {item.name: item for item in module.body if isinstance(item, ast.FunctionDef)}
    for _ in functions:  # a wrapper may have a wrapper
        inner = _only_call(functions[name]) if name in functions else None
        if inner not in functions:
            return name
        name = inner
    return name


def _only_call(function: ast.FunctionDef) -> str | None:
    """Return the name of the function that a function calls with its own parameters.

    Return None if the function does anything else.
    """
    if not all(isinstance(item, ast.Expr) for item in function.body[:-1]):  # a docstring
        return None
    parameters = [item.arg for item in function.args.args]
    match function.body[-1]:
        case ast.Return(ast.Call(ast.Name(inner), passed, [])):
            if [getattr(item, "id", None) for item in passed] == parameters:
                return inner
    return None


def _imported(module: ast.Module) -> dict[str, str]:
    """Return the full names of what a cell imports under other names."""
    full: dict[str, str] = {}
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            full |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom):
            names = {alias.asname or alias.name: alias.name for alias in node.names}
            full |= {name: f"{node.module or ''}.{own}" for name, own in names.items()}
    return full


def _own_names(statements: list[ast.stmt]) -> dict[str, str]:
    """Return the names that an answer defines, each with its replacement.

    A parameter is replaced with its index, and every other name with the same word.
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
        elif isinstance(node, ast.arg):
            own.setdefault(node.arg, "own")
        elif isinstance(node, ast.ExceptHandler) and node.name:
            own.setdefault(node.name, "own")
    return own


class _Written:
    """Writer that turns statements into text, independent of their order and their names.

    Attributes:
        parts: the number of parts written so far.
        pieces: the number of parts of each long statement, by its digest. The inner blocks of a
            statement are not part of it.
    """

    def __init__(self, own: dict[str, str]) -> None:
        self._own = own
        self.parts = 0
        self.pieces: dict[str, int] = {}

    def block(self, statements: list[ast.stmt]) -> str:
        """Return the text of a block of statements."""
        return "{" + ";".join(sorted(map(self._statement, statements))) + "}"

    def _statement(self, statement: ast.stmt) -> str:
        """Return the text of one statement, and keep the digest of a long one in `pieces`."""
        whole, head, parts = [type(statement).__name__], [type(statement).__name__], 1
        self.parts += 1
        for value in self._values(statement):
            before = self.parts
            whole.append(self._form(value))
            if not _is_block(value):
                head.append(whole[-1])
                parts += self.parts - before
        if parts >= LONG:
            self.pieces[_digest(",".join(head))] = parts
        return ",".join(whole)

    def _form(self, node: object) -> str:
        """Return the text of one node of the syntax tree, or of a list of nodes."""
        if isinstance(node, list):
            if _is_block(node):
                return self.block(node)
            return "[" + ",".join(map(self._form, node)) + "]"
        if not isinstance(node, ast.AST):
            return repr(node)
        if isinstance(node, ast.expr_context):
            return ""
        if not isinstance(node, SYNTAX):
            self.parts += 1
        return f"{type(node).__name__}({','.join(map(self._form, self._values(node)))})"

    def _values(self, node: ast.AST) -> list[object]:
        """Return the fields of a node in normal form.

        Where the order does not matter, the fields are sorted.
        """
        if isinstance(node, ast.BinOp) and isinstance(node.op, COMMUTATIVE):
            operands = _operands(node, type(node.op))
            self.parts += 2 * len(operands) - 3  # the node itself is counted already
            return [type(node.op).__name__, *sorted(map(self._form, operands))]
        if isinstance(node, ast.BoolOp):
            return [node.op, *sorted(map(self._form, node.values))]
        match node:
            case ast.Compare(left, [ast.Eq() | ast.NotEq()], [right]):
                return [node.ops, *sorted(map(self._form, [left, right]))]
        values = {name: value for name, value in ast.iter_fields(node) if name not in UNUSED}
        own = self._own
        if isinstance(node, ast.Call):
            keywords = [(item.arg, item.value) for item in node.keywords]
            if isinstance(node.func, ast.Name) and node.func.id in own:
                keywords = [(own.get(name or "", name), value) for name, value in keywords]
            written = [self._form(ast.keyword(name, value)) for name, value in keywords]
            values["keywords"] = sorted(written)
        names = ["id", "name", "asname"]
        if not isinstance(node, ast.keyword):
            names.append("arg")
        for field in names:
            if isinstance(values.get(field), str):
                values[field] = own.get(values[field], values[field])
        return list(values.values())


def _is_block(value: object) -> bool:
    """Return whether a field of a node is a block of statements."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], ast.stmt)


def _operands(node: ast.expr, kind: type[ast.operator]) -> list[ast.expr]:
    """Return the operands of nested operations of one kind, such as the terms of a sum."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, kind):
        return _operands(node.left, kind) + _operands(node.right, kind)
    return [node]


@dataclass(frozen=True)
class Group:
    """A group of students whose answers are equal.

    Attributes:
        parts: the number of parts in the answer.
        parsed: whether the answer is Python.
    """

    students: tuple[str, ...]
    parts: int
    parsed: bool = True


@dataclass(frozen=True)
class Compared:
    """Comparison of all answers to one exercise.

    Attributes:
        answers: the number of students who answered.
        solution: the students with a published solution.
        solution_parts: the number of parts in the longest published solution.
        groups: students whose answers are equal and not published, the longest answers first.
        forms: the number of different answers.
        in_part: pairs of students with different answers that share a large and rare part.
    """

    answers: int
    solution: tuple[str, ...]
    solution_parts: int
    groups: tuple[Group, ...]
    forms: int
    in_part: tuple[tuple[str, str], ...] = ()

    @property
    def most_frequent(self) -> int:
        """The number of students who have the most frequent answer."""
        sizes = [len(group.students) for group in self.groups]
        return max(len(self.solution), min(1, self.answers), *sizes)


def compared(
    answers: dict[str, Normal],
    solutions: Iterable[Normal] = (),
    handed_out: Sequence[Normal] = (),
) -> Compared:
    """Compare the answers of students with each other and with the published solutions.

    Args:
        answers: the answers by the students' ids.
        handed_out: the stubs, which do not count as answers.
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
    known = {piece for text in [*published.values(), *handed_out] for piece, _ in text.pieces}
    sizes = {form: len(by_form[form]) for form in by_form if form not in published}
    in_part: list[tuple[str, str]] = []
    for one, other in _alike(normals, sizes, known):
        for two in product(by_form[one], by_form[other]):
            in_part.append((min(two), max(two)))
    in_part.sort()
    return Compared(count, tuple(solved), parts, tuple(groups), len(by_form), tuple(in_part))


def _alike(
    answers: dict[str, Normal],
    students: dict[str, int],
    known: set[str],
) -> list[tuple[str, str]]:
    """Return pairs of answers that differ but share long statements that few students have.

    Args:
        students: how many students have each answer. Published answers are left out.
        known: statements that do not count, because they were handed out or published.
    """
    having: dict[str, list[str]] = defaultdict(list)
    sizes: dict[str, int] = {}
    for form in students:
        for piece, parts in answers[form].pieces:
            if piece not in known:
                having[piece].append(form)
                sizes[piece] = parts
    rare: Counter[str] = Counter()
    shared: Counter[tuple[str, str]] = Counter()
    for piece, forms in having.items():
        if sum(students[form] for form in forms) <= FEW:
            rare.update(dict.fromkeys(forms, sizes[piece]))
            shared.update(dict.fromkeys(combinations(forms, 2), sizes[piece]))
    found = []
    for (one, other), parts in shared.items():
        if parts >= max(SHORT, SHARED * min(rare[one], rare[other])):
            found.append((one, other))
    return found


@dataclass(frozen=True)
class Pair:
    """Two students with the same rare answers, and the exercises that they share.

    The name of an exercise ends in "(in part)" if only a part of the answers is the same.
    """

    students: tuple[str, str]
    exercises: tuple[str, ...]


def pairs(found: dict[str, Compared]) -> list[Pair]:
    """List the pairs of students who share answers, the pairs with most answers first.

    An answer counts if it is long and not published, and if at most `FEW` students have it. A long
    part of an answer counts, too.
    """
    shared: dict[tuple[str, str], list[str]] = defaultdict(list)
    for exercise, item in found.items():
        for group in item.groups:
            if group.parts >= SHORT and len(group.students) <= FEW:
                for first, second in combinations(group.students, 2):
                    shared[first, second].append(exercise)
        for students in item.in_part:
            shared[students].append(f"{exercise} (in part)")
    listed = [Pair(students, tuple(exercises)) for students, exercises in shared.items()]
    return sorted(listed, key=lambda pair: (-len(pair.exercises), pair.students))
