"""For the API reference: docstrings of `__init__`, also those that are assigned below a class, and
formulas as text, for what sets formulas comes from the network.
"""

import ast
import re
from collections.abc import Iterator
from typing import Any

import griffe


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
    """Adds the docstring of `Name.__init__` to those of `Name` and of its subclasses."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def on_module_node(self, *, node: Any, **_: Any) -> None:
        """Collects those of a file."""
        for statement in getattr(node, "body", ()):
            match statement:
                case ast.Assign(
                    targets=[ast.Attribute(ast.Attribute(ast.Name(name), "__init__"), "__doc__")],
                    value=ast.Constant(str(text)),
                ):
                    self._texts[name] = text
                case ast.ClassDef(name=name, body=body):
                    functions = (x for x in body if isinstance(x, ast.FunctionDef))
                    texts = {x.name: ast.get_docstring(x) for x in functions}
                    if text := texts.get("__init__"):
                        self._texts[name] = text

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Adds them."""
        for cls in _classes(pkg):
            names = [cls.name, *(str(base).rpartition(".")[2] for base in cls.bases)]
            text = next((self._texts[name] for name in names if name in self._texts), None)
            if cls.docstring is not None and text is not None:
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
