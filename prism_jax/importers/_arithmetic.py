"""Whole numbers, names and `+ - * / %` as a shell counts with them."""

import re
from collections.abc import Callable


_TOKEN = re.compile(r"\s*(\d+|[A-Za-z_]\w*|\$?\{?[A-Za-z_]\w*\}?|[<>=!]=|&&|\|\||[-+*/%()<>])")
_MOST, _DEEPEST = 2**63, 40
_PRECEDENCE = {"||": 0, "&&": 1, "==": 2, "!=": 2, "<": 3, ">": 3, "<=": 3, ">=": 3}
_PRECEDENCE |= {"+": 4, "-": 4, "*": 5, "/": 5, "%": 5}
_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: int(a / b) if abs(a) < 2**53 else a // b,
    "%": lambda a, b: a - b * int(a / b),
    "||": lambda a, b: int(bool(a or b)),
    "&&": lambda a, b: int(bool(a and b)),
    "==": lambda a, b: int(a == b),
    "!=": lambda a, b: int(a != b),
    "<": lambda a, b: int(a < b),
    ">": lambda a, b: int(a > b),
    "<=": lambda a, b: int(a <= b),
    ">=": lambda a, b: int(a >= b),
}


def arithmetic(text: str, value: Callable[[str], str]) -> int:
    """The value of an expression.

    **Arguments:**

    - `text`: the expression, of whole numbers, names, brackets and operators.
    - `value`: the text of a name.

    **Raises:**

    `ValueError` if it is anything else, if a name has no value, or beyond 64 bits.
    """
    tokens: list[str] = []
    text = text.strip()
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None or len(tokens) > 1000:
            raise ValueError(f"`{text[:40]}` is no sum of whole numbers")
        tokens.append(match[1])
        at = match.end()
    result, at = _sum(tokens, 0, 0, value, 0)
    if at != len(tokens):
        raise ValueError(f"`{text[:40]}` is no sum of whole numbers")
    return result


def _sum(
    tokens: list[str], at: int, least: int, value: Callable[[str], str], depth: int
) -> tuple[int, int]:
    """The value of what begins at a token, of operators of at least a precedence; where it ends."""
    if at >= len(tokens) or depth > _DEEPEST:
        raise ValueError("the expression is not complete")
    token = tokens[at]
    if token == "(":
        left, at = _sum(tokens, at + 1, 0, value, depth + 1)
        if tokens[at : at + 1] != [")"]:
            raise ValueError("a bracket is not closed")
        at += 1
    elif token in ("-", "+"):
        left, at = _sum(tokens, at + 1, 6, value, depth + 1)
        left = -left if token == "-" else left
    else:
        digits = token if token.isdigit() else value(token.strip("${}")).strip()
        if not re.fullmatch(r"-?\d{1,19}", digits):
            raise ValueError(f"`{token}` is no whole number")
        left, at = int(digits), at + 1
    while at < len(tokens) and _PRECEDENCE.get(tokens[at], -1) >= least:
        operator = tokens[at]
        right, at = _sum(tokens, at + 1, _PRECEDENCE[operator] + 1, value, depth + 1)
        if operator in "/%" and right == 0:
            raise ValueError("a division by zero")
        left = _OPERATIONS[operator](left, right)
        if abs(left) >= _MOST:
            raise ValueError("a number of more than 64 bits")
    return left, at
