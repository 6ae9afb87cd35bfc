"""Rewrite an answer so that the usual ways to disguise a copy leave no trace.

Each rule replaces one way to write something with another that means nearly the same: a loop that
fills a list with a comprehension, a name that is used once with its value, dead code with nothing.
The result is compared and never run.
"""

import ast
import copy
import operator
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise

__all__ = ["simplified"]

ROUNDS = 8  # more than one, because a rule may make another one applicable
LARGEST_NUMBER = 1 << 40  # larger results are not computed
LARGEST_VALUE = 15  # nodes. Larger values do not replace a name that is used several times.
JUMPS = (ast.Return, ast.Raise, ast.Continue, ast.Break)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
REPEATED = (ast.For, ast.While, ast.Lambda, ast.comprehension, *FUNCTIONS)
DOES_SOMETHING = (ast.Call, ast.Await, ast.Yield, ast.YieldFrom)
PLAIN = (ast.Constant, ast.Name, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Load)
OPPOSITES: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
NEGATIVE = (ast.NotEq, ast.NotIn, ast.IsNot, ast.LtE)  # a <= b counts as not b < a
ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


def simplified(
    statements: list[ast.stmt],
    name: str = "",
    imported: dict[str, str] | None = None,
) -> list[ast.stmt]:
    """Return the statements of an answer in a simpler form.

    Args:
        name: the name of the answer's function, which is kept although nothing here uses it.
        imported: the full names of what the answer imports, by the names that it uses.
    """
    module = _Expressions(imported or {}).visit(ast.Module(statements, []))
    for _ in range(ROUNDS):
        before = ast.dump(module)
        module.body = _block(module.body)
        _inline(module, name)
        if ast.dump(module) == before:
            break
    return list(module.body)


def is_idle(statement: ast.stmt) -> bool:
    """Return whether a statement adds nothing to an answer, such as a docstring or a `print`."""
    if isinstance(statement, ast.Expr):
        value = statement.value
        if isinstance(value, ast.Call):
            return ast.unparse(value.func) == "print"
        return not _does_something(value)
    return isinstance(statement, ast.Pass | ast.Assert | ast.Import | ast.ImportFrom)


def _does_something(value: ast.AST) -> bool:
    """Return whether a value contains a call, an `await` or a `yield`."""
    return any(isinstance(node, DOES_SOMETHING) for node in ast.walk(value))


class _Expressions(ast.NodeTransformer):
    """Visitor that replaces each expression and short statement with one form of writing it."""

    def __init__(self, imported: dict[str, str]) -> None:
        self._imported = imported

    def visit_Name(self, node: ast.Name) -> ast.AST:
        """Replace an imported name with its full name."""
        if not isinstance(node.ctx, ast.Load) or node.id not in self._imported:
            return node
        first, *rest = self._imported[node.id].split(".")
        full: ast.expr = ast.Name(first, ast.Load())
        for attribute in rest:
            full = ast.Attribute(full, attribute, ast.Load())
        return full

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        """Write `a += b` as `a = a + b`."""
        self.generic_visit(node)
        old = copy.deepcopy(node.target)
        old.ctx = ast.Load()
        return ast.Assign([node.target], ast.BinOp(old, node.op, node.value))

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        """Leave out the type of an assignment."""
        self.generic_visit(node)
        return ast.Assign([node.target], node.value or ast.Constant(None))

    def visit_Assign(self, node: ast.Assign) -> ast.AST | list[ast.stmt]:
        """Write an assignment to several targets as several, and a named lambda as a function."""
        self.generic_visit(node)
        target, value = node.targets[0], node.value
        if len(node.targets) > 1:
            return [ast.Assign([each], copy.deepcopy(value)) for each in node.targets]
        if isinstance(target, ast.Name) and isinstance(value, ast.Lambda):
            function = ast.FunctionDef(target.id, value.args, [ast.Return(value.body)], [])
            return function
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            return _one_by_one(node, target.elts, value.elts)
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        """Compute an operation of two small whole numbers."""
        self.generic_visit(node)
        left, right = getattr(node.left, "value", None), getattr(node.right, "value", None)
        if type(left) is not int or type(right) is not int:
            return node
        if 0 <= left <= 10 and 0 <= right <= 30:
            if isinstance(node.op, ast.LShift):
                return ast.Constant(left << right)
            if isinstance(node.op, ast.Pow):
                return ast.Constant(left**right)
        small = abs(left) < LARGEST_NUMBER and 0 <= right < LARGEST_NUMBER
        compute = ARITHMETIC.get(type(node.op))
        if compute is None or not small or (right == 0 and isinstance(node.op, ast.FloorDiv)):
            return node
        return ast.Constant(compute(left, right))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        """Write `not a` as the opposite of `a`."""
        self.generic_visit(node)
        if isinstance(node.op, ast.Not):
            return negated(node.operand)
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        """Write `a > b` as `b < a`."""
        self.generic_visit(node)
        if len(node.ops) != 1:
            return node
        if isinstance(node.ops[0], ast.Gt):
            return ast.Compare(node.comparators[0], [ast.Lt()], [node.left])
        if isinstance(node.ops[0], ast.GtE):
            return ast.Compare(node.comparators[0], [ast.LtE()], [node.left])
        return node

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        """Write a conditional expression with its positive condition."""
        self.generic_visit(node)
        if _is_negative(node.test):
            return ast.IfExp(negated(node.test), node.orelse, node.body)
        return node

    def visit_ListComp(self, node: ast.ListComp) -> ast.AST:
        """Write `[a for …]` as `list(a for …)`."""
        self.generic_visit(node)
        return _called("list", ast.GeneratorExp(node.elt, node.generators))

    def visit_SetComp(self, node: ast.SetComp) -> ast.AST:
        """Write `{a for …}` as `set(a for …)`."""
        self.generic_visit(node)
        return _called("set", ast.GeneratorExp(node.elt, node.generators))

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Write `sum([…])` as `sum(…)`, and `map(f, values)` as a generator."""
        self.generic_visit(node)
        for place, argument in enumerate(node.args):
            match argument:
                case ast.Call(ast.Name("list"), [ast.GeneratorExp() as inner]):
                    node.args[place] = inner
        match node:
            case ast.Call(ast.Name("map"), [function, values], []):
                each = ast.comprehension(ast.Name("each", ast.Store()), values, [], 0)
                item = ast.Name("each", ast.Load())
                return ast.GeneratorExp(ast.Call(function, [item], []), [each])
        return node


def _one_by_one(
    node: ast.Assign,
    targets: list[ast.expr],
    values: list[ast.expr],
) -> ast.AST | list[ast.stmt]:
    """Split an assignment of a tuple into one assignment per value, if these are independent.

    `targets` and `values` are the parts of `node`.
    """
    stored = set(_all_names(targets))
    used = set(_all_names(values))
    if len(targets) != len(values) or stored & used:
        return node
    return [ast.Assign([target], value) for target, value in zip(targets, values, strict=True)]


def _all_names(nodes: list[ast.expr]) -> Iterator[str]:
    """Yield the names in some expressions."""
    for node in nodes:
        for each in ast.walk(node):
            if isinstance(each, ast.Name):
                yield each.id


def _called(function: str, *arguments: ast.expr) -> ast.Call:
    """Return the syntax tree of a call of the function with this name, with these arguments."""
    return ast.Call(ast.Name(function, ast.Load()), list(arguments), [])


def _is_negative(test: ast.expr) -> bool:
    """Return whether a condition is written as the opposite of another, such as `a != b`."""
    if isinstance(test, ast.Compare):
        return len(test.ops) == 1 and isinstance(test.ops[0], NEGATIVE)
    return isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)


def negated(test: ast.expr) -> ast.expr:
    """Return the opposite of a condition."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return test.operand
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        left, right, kind = test.left, test.comparators[0], OPPOSITES[type(test.ops[0])]
        if kind is ast.Gt:
            return ast.Compare(right, [ast.Lt()], [left])
        if kind is ast.GtE:
            return ast.Compare(right, [ast.LtE()], [left])
        return ast.Compare(left, [kind()], [right])
    return ast.UnaryOp(ast.Not(), test)


def _block(statements: list[ast.stmt]) -> list[ast.stmt]:
    """Simplify the statements of a block and all blocks in it."""
    found: list[ast.stmt] = []
    for place, statement in enumerate(statements):
        if is_idle(statement):
            continue
        rest = statements[place + 1 :]
        if isinstance(statement, ast.If) and _ends(statement.body):
            statement.orelse, rest = [*statement.orelse, *rest], []
        for field in ("body", "orelse", "finalbody"):
            inner = getattr(statement, field, None)
            if isinstance(inner, list):
                setattr(statement, field, _block(inner))
        for handler in getattr(statement, "handlers", []):
            handler.body = _block(handler.body)
        if isinstance(statement, ast.For | ast.While):
            statement.body = _without_last_continue(statement.body)
        if isinstance(statement, ast.If):
            found += _chosen(statement)
        else:
            found.append(statement)
        if not rest or (found and isinstance(found[-1], JUMPS)):
            break
    return _comprehended(found)


def _ends(statements: list[ast.stmt]) -> bool:
    """Return whether a block ends in a `return`, `raise`, `continue` or `break`."""
    return bool(statements) and isinstance(statements[-1], JUMPS)


def _without_last_continue(body: list[ast.stmt]) -> list[ast.stmt]:
    """Leave out a `continue` at the end of a loop's body."""
    if not body:
        return body
    *first, last = body
    if isinstance(last, ast.Continue):
        return first
    if isinstance(last, ast.If):
        last.body = _without_last_continue(last.body)
        last.orelse = _without_last_continue(last.orelse)
        return first + _chosen(last)
    return body


def _chosen(node: ast.If) -> list[ast.stmt]:
    """Write an `if` with its positive condition. Replace it if its condition decides nothing."""
    if isinstance(node.test, ast.Constant):
        if node.test.value:
            return node.body
        return node.orelse
    if (not node.body and node.orelse) or (node.orelse and _is_negative(node.test)):
        node.test, node.body, node.orelse = negated(node.test), node.orelse, node.body
    if not node.body and not _does_something(node.test):
        return []
    match node.body, node.orelse:
        case [ast.Return(one)], [ast.Return(other)] if one and other:
            return [ast.Return(ast.IfExp(node.test, one, other))]
        case [ast.Assign([target], one)], [ast.Assign([same], other)]:
            if ast.dump(target) == ast.dump(same):
                return [ast.Assign([target], ast.IfExp(node.test, one, other))]
    return [node]


def _comprehended(statements: list[ast.stmt]) -> list[ast.stmt]:
    """Replace each loop that only fills a list, a set or a dictionary, or computes a sum."""
    found: list[ast.stmt] = []
    for statement in statements:
        gathered = None
        if isinstance(statement, ast.For):
            gathered = _gathered(statement)
        if gathered is not None:
            name, empty, value = gathered
            place = _last_use(found, name)
            if place is not None and _starts(found[place], name, empty):
                del found[place]
                statement = ast.Assign([ast.Name(name, ast.Store())], value)
        found.append(statement)
    return found


def _last_use(statements: list[ast.stmt], name: str) -> int | None:
    """Return the index of the last statement that contains a name, or None."""
    for place in reversed(range(len(statements))):
        for node in ast.walk(statements[place]):
            if isinstance(node, ast.Name) and node.id == name:
                return place
    return None


def _starts(statement: ast.stmt, name: str, values: tuple[str, ...]) -> bool:
    """Return whether a statement assigns one of these values to a name."""
    match statement:
        case ast.Assign([ast.Name(target)], value):
            return target == name and ast.unparse(value) in values
    return False


def _gathered(loop: ast.For) -> tuple[str, tuple[str, ...], ast.expr] | None:
    """Return the name that a loop fills, its possible values before the loop, and its value after.

    Return None if the loop does something else.
    """
    generators = []
    body: list[ast.stmt] = [loop]
    while len(body) == 1 and isinstance(body[0], ast.For) and not body[0].orelse:
        generators.append(ast.comprehension(body[0].target, body[0].iter, [], 0))
        body = body[0].body
        while len(body) == 1 and isinstance(body[0], ast.If) and not body[0].orelse:
            generators[-1].ifs.append(body[0].test)
            body = body[0].body
    if len(body) != 1:
        return None
    match body[0]:
        case ast.Expr(ast.Call(ast.Attribute(ast.Name(name), "append"), [item], [])):
            return name, ("[]", "list()"), _called("list", ast.GeneratorExp(item, generators))
        case ast.Expr(ast.Call(ast.Attribute(ast.Name(name), "add"), [item], [])):
            return name, ("set()",), _called("set", ast.GeneratorExp(item, generators))
        case ast.Assign([ast.Subscript(ast.Name(name), key)], item):
            return name, ("{}", "dict()"), ast.DictComp(key, item, generators)
        case ast.Assign([ast.Name(name)], ast.BinOp(ast.Name(same), ast.Add(), item)):
            if name == same:
                return name, ("0", "0.0"), _called("sum", ast.GeneratorExp(item, generators))
    return None


def _inline(scope: ast.AST, keep: str = "") -> None:
    """Replace names in a function or a module with their values, and leave out unused names.

    `keep` is a name that is never replaced.
    """
    for node in ast.walk(scope):
        if isinstance(node, FUNCTIONS) and node is not scope:
            _inline(node)
    stored = Counter(_names(scope, ast.Store))
    stored.update(node.arg for node in ast.walk(scope) if isinstance(node, ast.arg))
    used = Counter(_names(scope, ast.Load))
    for block in list(_blocks(scope)):
        for statement, following in pairwise([*block, ast.Pass()]):
            match statement:
                case ast.Assign([ast.Name(name)], value) if stored[name] == 1 and name != keep:
                    if not used[name] and _does_something(value):
                        block[block.index(statement)] = ast.Expr(value)
                        continue
                    if used[name] and _is_plain(value, stored):
                        _Replaced(name, value).visit(scope)
                    elif used[name] == 1 and _once_at_once(name, following):
                        _Replaced(name, value).visit(following)
                    elif used[name]:
                        continue
                    block.remove(statement)


def _names(scope: ast.AST, context: type[ast.expr_context]) -> Iterator[str]:
    """Yield the names that are read (`ast.Load`) or assigned (`ast.Store`)."""
    for node in ast.walk(scope):
        if isinstance(node, ast.Name) and isinstance(node.ctx, context):
            yield node.id


def _blocks(scope: ast.AST) -> Iterator[list[ast.stmt]]:
    """Yield the blocks of a function or a module. Bodies of classes are left out."""
    for field in ("body", "orelse", "finalbody"):
        block = getattr(scope, field, None)
        if isinstance(block, list):
            yield block
            for statement in block:
                if not isinstance(statement, (*FUNCTIONS, ast.ClassDef)):
                    yield from _blocks(statement)


def _is_plain(value: ast.expr, stored: Counter[str]) -> bool:
    """Return whether a value is small and is the same wherever it is computed."""
    nodes = list(ast.walk(value))
    if len(nodes) > LARGEST_VALUE:
        return False
    for node in nodes:
        if not isinstance(node, PLAIN):
            return False
        if isinstance(node, ast.Name) and stored[node.id] > 1:
            return False
    return True


def _once_at_once(name: str, statement: ast.stmt) -> bool:
    """Return whether a statement uses a name only outside of parts that may run several times."""
    if isinstance(statement, ast.For):
        return name in _names(statement.iter, ast.Load)
    parts = [node for node in ast.walk(statement) if isinstance(node, REPEATED)]
    repeated = {each for part in parts for each in _names(part, ast.Load)}
    return name in _names(statement, ast.Load) and name not in repeated


class _Replaced(ast.NodeTransformer):
    """Visitor that replaces a name with a value."""

    def __init__(self, name: str, value: ast.expr) -> None:
        self._name, self._value = name, value

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id == self._name and isinstance(node.ctx, ast.Load):
            return copy.deepcopy(self._value)
        return node
