"""Formulas of the keys of a configuration, as `models.toml` and `frameworks/` have them: a value
that begins with `=`, in the syntax of Python's expressions. Only what `formula_value` names can be
said.
"""

import ast
import functools as ft
import math
import operator
import re
from collections.abc import Callable, Mapping


# Of numbers only: a list of a file times a number of a file could fill the memory.
_NUMBERS: dict[type, Callable[..., object]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Div: operator.truediv,
}
_COMPARE: dict[type, Callable[..., object]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
_CALLS: dict[str, Callable[..., object]] = {
    "at": lambda values, i: values[i] if isinstance(values, list) else values,
    "int": int,
    "len": len,
    "max": max,
    "padded": lambda size, multiple: -(-size // multiple) * multiple,
    "product": lambda *numbers: _product(*numbers),
    "round": round,
}
_LARGEST = 2**53
# What is raised by a formula of other values than it is of.
NO_VALUE = (ArithmeticError, LookupError, TypeError, ValueError)


@ft.cache
def parsed(formula: str) -> ast.expr:
    """The syntax of a formula, which begins with `=`."""
    return ast.parse(f"({formula[1:].strip()})", mode="eval").body


@ft.cache
def keys_of(formula: str) -> tuple[str, ...]:
    """The keys that a formula reads."""
    names = (node.id for node in ast.walk(parsed(formula)) if isinstance(node, ast.Name))
    return tuple(dict.fromkeys(name for name in names if name not in _CALLS))


def _product(*numbers: object) -> int:
    """The product of those that are said, which must be above zero."""
    factors = [number for number in numbers if number is not None]
    if not factors or not all(isinstance(number, int) and number > 0 for number in factors):
        raise TypeError
    return math.prod(factors)  # pyright: ignore


def parsed_text(value: object) -> object:
    """The switch or number that a text says, else the value itself."""
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    if not re.fullmatch(r"-?\d{1,15}(\.\d{1,15})?", value):
        return value
    return int(value) if value.lstrip("-").isdigit() else float(value)


def formula_value(node: ast.expr, values: Mapping[str, object]) -> object:
    """The value of a formula.

    **Arguments:**

    - `node`: the syntax of the formula.
    - `values`: the values of its keys; a key that a file lacks is `None`.

    **Raises:**

    `ArithmeticError`, `LookupError` or `TypeError` where the values are not what the formula is of.
    """
    value = ft.partial(formula_value, values=values)
    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            return values[node.id]
        case ast.Attribute():
            table = value(node.value)
            return table.get(node.attr) if isinstance(table, Mapping) else None
        case ast.Subscript():
            inside = value(node.value)
            if not isinstance(inside, Mapping | list | str):
                raise TypeError
            return inside[value(node.slice)]  # pyright: ignore
        case ast.BinOp():
            a, b = value(node.left), value(node.right)
            for number in (a, b):
                if not isinstance(number, int | float) or abs(number) > _LARGEST:
                    raise TypeError
            return _NUMBERS[type(node.op)](a, b)
        case ast.UnaryOp(op=ast.Not()):
            return not value(node.operand)
        case ast.BoolOp():
            *first, last = node.values
            stops = isinstance(node.op, ast.Or)
            for part in first:
                result = value(part)
                if bool(result) == stops:
                    return result
            return value(last)
        case ast.Compare():
            return _COMPARE[type(node.ops[0])](value(node.left), value(node.comparators[0]))
        case ast.IfExp():
            return value(node.body if value(node.test) else node.orelse)
        case ast.Call(func=ast.Name(name)):
            return _CALLS[name](*map(value, node.args))
        case _:  # A list, which is of names and numbers.
            assert isinstance(node, ast.List | ast.Tuple)
            return [value(element) for element in node.elts]
