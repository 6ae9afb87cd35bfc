"""What students get to fill in: an exercise's cell is released only while it is the stub that its check expects."""

import ast
import inspect
import io
import tokenize

from labkit import checks


def require(number: str, name: str, source: str, notebook: str) -> None:
    """Raises ValueError, naming the exercise, unless the cell defines `name` and gives nothing of an answer to it away.

    That is one function with a docstring and `...`, or, where the exercise is to mend a function, the one that the check knows. A comment
    could hold an answer too: no stub has one.
    """
    script = checks.find(number).script
    expected = ast.parse(inspect.getsource(script)).body[0] if script else None
    try:
        [function] = ast.parse(source).body
        commented = any(token.type == tokenize.COMMENT for token in tokenize.generate_tokens(io.StringIO(source).readline))
    except (SyntaxError, ValueError, tokenize.TokenError):
        function, commented = None, False
    if not isinstance(function, ast.FunctionDef) or function.name != name or commented or not _is_stub(function, expected):
        raise ValueError(
            f"exercise {number}: its cell in {notebook} is not the stub that the check expects: it may hold an answer. Nothing was "
            f"written. Put back the function {name} as the kit hands it out, or release from the kit's own lessons "
            "(no `notebooks` in the course file)"
        )


def _is_stub(function: ast.FunctionDef, expected: ast.stmt | None) -> bool:
    if isinstance(expected, ast.FunctionDef):
        return _said(function) == _said(expected)
    return _said(function)[1] in ([], [ast.dump(ast.Expr(ast.Constant(...)))], [ast.dump(ast.Pass())])


def _said(function: ast.FunctionDef) -> tuple[str, list[str]]:
    """Its parameters and statements, without types, which notebooks leave out, and the docstring, which may be in any language."""
    for node in ast.walk(function):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.FunctionDef):
            node.returns = None
    return ast.dump(function.args), [ast.dump(statement) for statement in function.body[ast.get_docstring(function) is not None :]]
