"""Whole numbers, names and `+ - * / %` as a shell counts with them."""

import ast
import operator
import re
from collections.abc import Callable


_MOST_LETTERS, _MOST = 500, 2**63
# fmt: off
_OPERATIONS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    # Towards zero, as in C.
    ast.Div: lambda a, b: abs(a) // abs(b) * (1 if a * b >= 0 else -1),
    ast.Mod: lambda a, b: abs(a) % abs(b) * (1 if a >= 0 else -1),
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.Gt: operator.gt,
    ast.LtE: operator.le, ast.GtE: operator.ge, ast.And: min, ast.Or: max,
}
# fmt: on


def arithmetic(text: str, value: Callable[[str], str]) -> int:
    """The value of an expression.

    **Arguments:**

    - `text`: the expression, of whole numbers, names, brackets and operators, which Python writes
        as a shell does, except for `&&` and `||`.
    - `value`: the text of a name.

    **Raises:**

    `ValueError` if it is anything else, if a name has no value, or beyond 64 bits.
    """
    text = re.sub(r"\$\{?(\w+)\}?", r"\1", text).replace("&&", " and ").replace("||", " or ")
    try:
        if len(text) > _MOST_LETTERS or re.search(r"\d[A-Za-z_]|[^\w\s+*/%()<>=!-]", text):
            raise ValueError
        return _value(ast.parse(text.strip(), mode="eval").body, value)
    except (SyntaxError, ArithmeticError, RecursionError, MemoryError, LookupError, ValueError):
        raise ValueError(f"`{text[:40]}` is no sum of whole numbers of 64 bits") from None


def _value(node: ast.expr, value: Callable[[str], str]) -> int:
    """The value of a node, of the few kinds that an expression may have."""
    match node:
        case ast.BinOp(left, operation, right) | ast.Compare(left, [operation], [right]):
            pair = [_value(left, value), _value(right, value)]
        case ast.BoolOp(operation, [left, right]):
            pair = [int(bool(_value(left, value))), int(bool(_value(right, value)))]
        case ast.UnaryOp(ast.USub(), inner):
            pair, operation = [0, _value(inner, value)], ast.Sub()
        case ast.Constant(int(number)):
            pair, operation = [number, 0], ast.Add()
        case ast.Name(name) if re.fullmatch(r"\s*-?\d{1,19}\s*", value(name)):
            pair, operation = [int(value(name)), 0], ast.Add()
        case _:
            raise ValueError
    result = int(_OPERATIONS[type(operation)](*pair))
    if abs(result) >= _MOST:
        raise ValueError
    return result
