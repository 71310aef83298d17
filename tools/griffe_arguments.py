"""For the API reference: the arguments of classes, also of those that inherit their `__init__`, and
formulas as text, for what sets formulas comes from the network.
"""

import ast
import re
from collections.abc import Iterator
from typing import Any

import griffe


_ARGUMENTS = "**Arguments:**"
_FORMULA = re.compile(r"\$([^$\n]+)\$")
_SYMBOLS = {
    r"\mu": "μ",
    r"\sigma": "σ",
    r"\lambda": "λ",
    r"\Phi": "Φ",
    r"\exp": "exp",
    "^{-1}": "⁻¹",
}


class Arguments(griffe.Extension):
    """Adds what `Name.__init__` takes to the docstrings of `Name` and of its subclasses. It stands
    in the docstring of `__init__` or, for dataclasses, in that of the class.
    """

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def on_module_node(self, *, node: Any, **_: Any) -> None:
        """Collects those of a file."""
        for statement in getattr(node, "body", ()):
            if isinstance(statement, ast.ClassDef):
                functions = (x for x in statement.body if isinstance(x, ast.FunctionDef))
                texts = [ast.get_docstring(x) for x in functions if x.name == "__init__"]
                for text in (*texts, ast.get_docstring(statement)):
                    if text and _ARGUMENTS in text:
                        self._texts[statement.name] = text[text.index(_ARGUMENTS) :]

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Adds them."""
        for cls in _classes(pkg):
            names = [cls.name, *(str(base).rpartition(".")[2] for base in cls.bases)]
            text = next((self._texts[name] for name in names if name in self._texts), None)
            if cls.docstring and text and _ARGUMENTS not in cls.docstring.value:
                cls.docstring.value += f"\n\n{text}"
            for documented in (cls, *cls.functions.values(), *cls.attributes.values()):
                if documented.docstring is not None:
                    documented.docstring.value = _FORMULA.sub(_text, documented.docstring.value)


def _text(formula: re.Match[str]) -> str:
    text = formula[1]
    for symbol, plain in _SYMBOLS.items():
        text = text.replace(symbol, plain)
    return f"`{text}`"


def _classes(module: griffe.Module) -> Iterator[griffe.Class]:
    for member in module.members.values():
        if isinstance(member, griffe.Class):
            yield member
        elif isinstance(member, griffe.Module):
            yield from _classes(member)
