import ast
import importlib
import inspect
import pathlib
import pkgutil
import pydoc
import re
import subprocess
import sys

import equinox as eqx
import numpy as np
import pytest
from jaxtyping import TypeCheckError

import prism_jax
from prism_jax import _public
from prism_jax._estimate import in_core


_ROOT = pathlib.Path(__file__).parents[1]


def test_public_names_are_sorted_and_imported_by_name():
    lines = (_ROOT / "prism_jax/_public.py").read_text().splitlines()
    names = [n for n in dir(prism_jax) if not n.startswith("_") and n[0].isupper()]
    assert len(names) >= 20
    assert all(hasattr(prism_jax, name) for name in names)
    # A folder of the same name would take its place once it is imported.
    assert all(getattr(prism_jax, name) is getattr(_public, name) for name in dir(prism_jax))
    modules = [line.split()[1] for line in lines if line.startswith("from .")]
    assert modules == sorted(modules)


def test_help_begins_with_functions_and_says_what_keys_are():
    text = pydoc.plain(pydoc.render_doc(prism_jax))
    assert text.index("simulate(program, key=key)") < text.index("PACKAGE CONTENTS")
    named = {name.partition("(")[0] for name in re.findall("`([^`]+)`", str(prism_jax.__doc__))}
    named.remove("help")
    assert len(named) > 15
    assert all(callable(getattr(prism_jax, name)) for name in named)
    for name in dir(prism_jax):
        if "key" in (taken := _parameters(getattr(prism_jax, name))):
            assert re.fullmatch(r"key: 'jax\.Array( \| None)?'( = None)?", str(taken["key"])), name


def _parameters(function):
    return inspect.signature(function).parameters if inspect.isroutine(function) else {}


def _packages():
    """All that are below the package, imported."""
    for found in pkgutil.walk_packages(prism_jax.__path__, "prism_jax."):
        if found.ispkg:
            yield importlib.import_module(found.name)


def test_a_package_shows_names_of_its_private_files_and_holds_nothing_else():
    packages = list(_packages())
    assert len(packages) > 10
    for package in packages:
        for node in ast.parse(pathlib.Path(str(package.__file__)).read_text()).body:
            assert isinstance(node, ast.ImportFrom), package
            assert node.level == 1, package
            assert str(node.module).startswith("_"), package
            assert all(alias.asname == alias.name for alias in node.names), package


def test_shapes_are_checked_in_tests():
    with pytest.raises(TypeCheckError, match="steps"):
        in_core(np.ones((3, 4)))


def _modules_of_equinox(base=eqx.Module):
    for cls in base.__subclasses__():
        yield cls
        yield from _modules_of_equinox(cls)


def test_classes_are_abstract_or_final():
    assert list(_packages())  # Which imports every file that has a class.
    classes = {c for c in _modules_of_equinox() if c.__module__.startswith("prism_jax.")}
    assert len(classes) > 40
    for cls in classes:
        abstract = inspect.isabstract(cls)
        assert abstract == cls.__name__.startswith("Abstract"), cls
        for base in cls.__mro__[1:]:
            if not issubclass(base, eqx.Module) or base is eqx.Module:
                continue
            assert base.__name__.startswith("Abstract"), f"{cls} subclasses a final class"
            for name in vars(cls).keys() & vars(base).keys():
                old = vars(base)[name]
                concrete = not getattr(old, "__isabstractmethod__", False)
                concrete &= inspect.isroutine(old) or isinstance(old, property)
                assert name.startswith("__") or not concrete, f"{cls} overrides {base}.{name}"


def test_imports_leave_out_jax_and_slow_libraries():
    script = (
        "import sys, prism_jax.cli._main; print('jax' in sys.modules);"
        "from prism_jax import *; late = {'tqdm', 'matplotlib', 'optax', 'scipy.stats'};"
        "print(simulate.__name__, sorted(late & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.split("\n") == ["False", "simulate []", ""]


def test_files_that_the_readme_names_exist():
    text = (_ROOT / "README.md").read_text()
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    assert len(links) > 5
    assert [link for link in links if not (_ROOT / link).exists()] == []
