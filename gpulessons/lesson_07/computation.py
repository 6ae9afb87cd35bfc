"""Parse and evaluate computations that a learner types, such as "0.1 + 0.2".

No part of the text runs as code.
"""

import ast
import math
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass

LONGEST = 200  # characters
MOST_TERMS = 10_000  # terms of a sum
ALLOWED = (
    "type numbers, + - * / **, brackets, pi, inf, or the functions sqrt, exp, log, abs and "
    "sum(number, times), such as sum(0.01, 1000)"
)
CONSTANTS = {"pi": math.pi, "inf": math.inf}

Rounding = Callable[[float], float]


@dataclass(frozen=True)
class Computation:
    """Parsed computation: the syntax tree of a text such as "0.1 + 0.2"."""

    text: str
    tree: ast.expr


def parse(text: str) -> Computation:
    """Parse the text of a computation. Raises ValueError for other text."""
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"There is nothing to compute: {ALLOWED}.")
    text = " ".join(text.split())
    if len(text) > LONGEST:
        raise ValueError(
            f"“{text[:20]}…” is too long, {len(text)} characters: type at most {LONGEST}."
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Such text is refused below.
            tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"“{text}” is no computation: {ALLOWED}.") from None
    return Computation(text, tree)


def evaluated(computation: Computation, rounded: Rounding) -> float:
    """Return the result of a computation in which every number and every result is `rounded`.

    Raises ValueError for an operation that is not allowed, and says what is allowed.
    """
    return _value(computation.tree, computation.text, rounded)


def _value(node: ast.expr, text: str, rounded: Rounding) -> float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return rounded(float(number))
        case ast.Name(id=name) if name in CONSTANTS:
            return rounded(CONSTANTS[name])
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
            value = _value(operand, text, rounded)
            return -value if isinstance(sign, ast.USub) else value
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            operation = _OPERATIONS[type(op)]
            return rounded(operation(_value(left, text, rounded), _value(right, text, rounded)))
        case ast.Call(
            func=ast.Name(id="sum"), args=[term, ast.Constant(value=int() as times)], keywords=[]
        ) if 1 <= times <= MOST_TERMS:
            return _sum(_value(term, text, rounded), times, rounded)
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in _FUNCTIONS:
            return rounded(_FUNCTIONS[name](_value(argument, text, rounded)))
        case ast.Call(func=ast.Name(id="sum")):
            raise ValueError(
                f"“{ast.get_source_segment(text, node)}”: write sum(number, times), "
                f"times a whole number up to {MOST_TERMS}."
            )
        case ast.Tuple():
            pointed = re.sub(r"(\d),(?=\d)", r"\1.", text)
            raise ValueError(f"“{text}” has a comma: type a point, {pointed}.")
    raise ValueError(f"I cannot compute “{ast.get_source_segment(text, node)}”: {ALLOWED}.")


def _sum(term: float, times: int, rounded: Rounding) -> float:
    total = 0.0
    for _ in range(times):
        total = rounded(total + term)
    return total


# Where Python raises an exception, these functions return infinity or nan, as hardware does.


def _divided(a: float, b: float) -> float:
    if b:
        return a / b
    if a == 0 or math.isnan(a):
        return math.nan
    return math.copysign(math.inf, a) * math.copysign(1, b)


def _power(a: float, b: float) -> float:
    try:
        return math.pow(a, b)
    except OverflowError:
        if a < 0 and b % 2 == 1:
            return -math.inf
        return math.inf
    except ValueError:  # a root of a negative number, or a negative power of 0
        if a == 0:
            return math.inf
        return math.nan


def _exponential(a: float) -> float:
    try:
        return math.exp(a)
    except OverflowError:
        return math.inf


def _logarithm(a: float) -> float:
    if a > 0:
        return math.log(a)
    if a == 0:
        return -math.inf
    return math.nan


_OPERATIONS: dict[type, Callable[[float, float], float]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: _divided,
    ast.Pow: _power,
}
_FUNCTIONS: dict[str, Callable[[float], float]] = {
    "sqrt": lambda a: math.nan if a < 0 else math.sqrt(a),
    "exp": _exponential,
    "log": _logarithm,
    "abs": abs,
}
