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

ROUNDS = 8  # a rule may make another one applicable
LARGEST_NUMBER = 1 << 40  # numbers that are computed here stay smaller
LARGEST_VALUE = 15  # nodes of a value that takes the place of several names
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
NEGATIVE = (ast.NotEq, ast.NotIn, ast.IsNot, ast.LtE)  # a <= b is taken as not b < a
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
    """Return the statements in a simpler form.

    Args:
        name: the name of the answer, which is used elsewhere.
        imported: the full names of what the answer imports.
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
    """Return whether a statement adds nothing to an answer: a docstring, `pass`, a `print`."""
    if isinstance(statement, ast.Expr):
        value = statement.value
        if isinstance(value, ast.Call):
            return ast.unparse(value.func) == "print"
        return not _does_something(value)
    return isinstance(statement, ast.Pass | ast.Assert | ast.Import | ast.ImportFrom)


def _does_something(value: ast.AST) -> bool:
    return any(isinstance(node, DOES_SOMETHING) for node in ast.walk(value))


class _Expressions(ast.NodeTransformer):
    """Give expressions, and statements of one line, one of the ways to write them."""

    def __init__(self, imported: dict[str, str]) -> None:
        self._imported = imported

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if isinstance(node.ctx, ast.Load) and node.id in self._imported:
            first, *rest = self._imported[node.id].split(".")
            full: ast.expr = ast.Name(first, ast.Load())
            for attribute in rest:
                full = ast.Attribute(full, attribute, ast.Load())
            return full
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        self.generic_visit(node)
        old = copy.deepcopy(node.target)
        old.ctx = ast.Load()
        return ast.Assign([node.target], ast.BinOp(old, node.op, node.value))

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        self.generic_visit(node)
        return ast.Assign([node.target], node.value or ast.Constant(None))

    def visit_Assign(self, node: ast.Assign) -> ast.AST | list[ast.stmt]:
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
        self.generic_visit(node)
        left, right = getattr(node.left, "value", None), getattr(node.right, "value", None)
        if type(left) is not int or type(right) is not int:
            return node
        small = abs(left) < LARGEST_NUMBER and 0 <= right < LARGEST_NUMBER
        compute = ARITHMETIC.get(type(node.op))
        if isinstance(node.op, ast.LShift | ast.Pow) and 0 <= left <= 10 and 0 <= right <= 30:
            return ast.Constant(left << right if isinstance(node.op, ast.LShift) else left**right)
        if compute is None or not small or (right == 0 and isinstance(node.op, ast.FloorDiv)):
            return node
        return ast.Constant(compute(left, right))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        return negated(node.operand) if isinstance(node.op, ast.Not) else node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        if len(node.ops) == 1 and isinstance(node.ops[0], ast.Gt | ast.GtE):
            smaller = ast.Lt() if isinstance(node.ops[0], ast.Gt) else ast.LtE()
            return ast.Compare(node.comparators[0], [smaller], [node.left])
        return node

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        self.generic_visit(node)
        if _is_negative(node.test):
            return ast.IfExp(negated(node.test), node.orelse, node.body)
        return node

    def visit_ListComp(self, node: ast.ListComp) -> ast.AST:
        self.generic_visit(node)
        return _called("list", ast.GeneratorExp(node.elt, node.generators))

    def visit_SetComp(self, node: ast.SetComp) -> ast.AST:
        self.generic_visit(node)
        return _called("set", ast.GeneratorExp(node.elt, node.generators))

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        for place, argument in enumerate(node.args):
            match argument:
                case ast.Call(ast.Name("list"), [ast.GeneratorExp() as inner]):
                    node.args[place] = inner  # sum([…]) and sum(…)
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
    """Return an assignment of a tuple as one assignment per value, if no value needs another."""
    stored = {each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)}
    used = {each.id for value in values for each in ast.walk(value) if isinstance(each, ast.Name)}
    if len(targets) != len(values) or stored & used:
        return node
    return [ast.Assign([target], value) for target, value in zip(targets, values, strict=True)]


def _called(function: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(function, ast.Load()), list(arguments), [])


def _is_negative(test: ast.expr) -> bool:
    if isinstance(test, ast.Compare):
        return len(test.ops) == 1 and isinstance(test.ops[0], NEGATIVE)
    return isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)


def negated(test: ast.expr) -> ast.expr:
    """Return the opposite of a condition."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return test.operand
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        left, right, kind = test.left, test.comparators[0], OPPOSITES[type(test.ops[0])]
        if kind in (ast.Gt, ast.GtE):
            left, right, kind = right, left, ast.Lt if kind is ast.Gt else ast.LtE
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
        found += _chosen(statement) if isinstance(statement, ast.If) else [statement]
        if not rest or (found and isinstance(found[-1], JUMPS)):
            break
    return _comprehended(found)


def _ends(statements: list[ast.stmt]) -> bool:
    return bool(statements) and isinstance(statements[-1], JUMPS)


def _without_last_continue(body: list[ast.stmt]) -> list[ast.stmt]:
    """Leave out a `continue` after which the loop would go on anyway."""
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
    """Return a condition with its positive form first, or without it where it decides nothing."""
    if isinstance(node.test, ast.Constant):
        return node.body if node.test.value else node.orelse
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
    """Replace each loop that only fills a list, a set or a dictionary, or adds up a sum."""
    found: list[ast.stmt] = []
    for statement in statements:
        gathered = _gathered(statement) if isinstance(statement, ast.For) else None
        if gathered is not None:
            name, empty, value = gathered
            for place in reversed(range(len(found))):
                if any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(found[place])):
                    if _starts(found[place], name, empty):
                        del found[place]
                        statement = ast.Assign([ast.Name(name, ast.Store())], value)
                    break
        found.append(statement)
    return found


def _starts(statement: ast.stmt, name: str, values: tuple[str, ...]) -> bool:
    """Return whether a statement gives a name one of these values."""
    match statement:
        case ast.Assign([ast.Name(target)], value):
            return target == name and ast.unparse(value) in values
    return False


def _gathered(loop: ast.For) -> tuple[str, tuple[str, ...], ast.expr] | None:
    """Return the name that a loop fills, what it is before the loop, and the value as one expression."""
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
        case ast.Assign([ast.Name(name)], ast.BinOp(ast.Name(same), ast.Add(), item)) if name == same:
            return name, ("0", "0.0"), _called("sum", ast.GeneratorExp(item, generators))
    return None


def _inline(scope: ast.AST, keep: str = "") -> None:
    """Replace names with their values in a function or a module, and leave out unused names."""
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
    for node in ast.walk(scope):
        if isinstance(node, ast.Name) and isinstance(node.ctx, context):
            yield node.id


def _blocks(scope: ast.AST) -> Iterator[list[ast.stmt]]:
    """Yield the blocks of a function or a module. Those of a class hold its attributes."""
    for field in ("body", "orelse", "finalbody"):
        block = getattr(scope, field, None)
        if isinstance(block, list):
            yield block
            for statement in block:
                if not isinstance(statement, (*FUNCTIONS, ast.ClassDef)):
                    yield from _blocks(statement)


def _is_plain(value: ast.expr, stored: Counter[str]) -> bool:
    """Return whether a value is the same wherever it is computed: numbers and names that stay."""
    nodes = list(ast.walk(value))
    if len(nodes) > LARGEST_VALUE:
        return False
    names = [node.id for node in nodes if isinstance(node, ast.Name)]
    return all(isinstance(node, PLAIN) for node in nodes) and all(stored[name] <= 1 for name in names)


def _once_at_once(name: str, statement: ast.stmt) -> bool:
    """Return whether a statement uses a name once, and not in a part that may run several times."""
    if isinstance(statement, ast.For):
        return name in _names(statement.iter, ast.Load)
    parts = [node for node in ast.walk(statement) if isinstance(node, REPEATED)]
    repeated = {each for part in parts for each in _names(part, ast.Load)}
    return name in _names(statement, ast.Load) and name not in repeated


class _Replaced(ast.NodeTransformer):
    """Put a value in place of a name."""

    def __init__(self, name: str, value: ast.expr) -> None:
        self._name, self._value = name, value

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id == self._name and isinstance(node.ctx, ast.Load):
            return copy.deepcopy(self._value)
        return node
