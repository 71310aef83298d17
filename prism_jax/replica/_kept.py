"""Traced functions, kept beside the code that is compiled of them: to trace one takes as long as to
read the compiled code of several.
"""

import contextlib
import dataclasses
import functools as ft
import hashlib
import importlib.metadata
import pathlib
import pickle
from collections.abc import Callable
from typing import Any

import jax
from jax import export

from .._cache import kept_folder
from .._files import written_whole


# By what they are traced for: the jitted function of leaves, and the structure of what it gives.
_kept: dict[Any, tuple[Callable[..., Any], Any]] = {}


def with_kept_traces(
    function: Callable[..., Any], static: Any, options: dict[str, Any]
) -> Callable[..., Any] | None:
    """`function(static, *args)`, jitted, which reads from the folder for compiled code what it was
    traced to; `None` if there is none, or there are several devices.

    **Arguments:**

    - `function`: of this package; what it is traced to must follow from its code, the shapes of
        its arguments and JAX's configuration.
    - `static`: whose `repr` says all of it.
    - `options`: of `jax.jit`.
    """
    folder = kept_folder()
    if folder is None or len(jax.devices()) > 1:
        return None

    def call(*args):
        leaves, tree = jax.tree.flatten(args)
        shapes = [jax.typeof(x).update(sharding=None) for x in leaves]
        place = function.__qualname__, static, tree, *map(str, shapes)
        if place not in _kept:
            digest = hashlib.sha256(repr((place, _circumstances())).encode()).hexdigest()[:32]
            file = folder / f"{function.__name__}-{digest}-trace"
            exported, result = _read(file) or _traced(function, static, tree, leaves, file)
            run = ft.wraps(function)(lambda *leaves: exported.call(*leaves))
            _kept[place] = jax.jit(run, **options), jax.tree.structure(result)
        run, structure = _kept[place]
        return jax.tree.unflatten(structure, run(*leaves))

    return call


def _traced(function, static, tree, leaves, file: pathlib.Path) -> tuple[export.Exported, Any]:
    """What a function is traced to, which is written to a file, and a tree like its result."""
    structures = []

    def of_leaves(*leaves):
        results, structure = jax.tree.flatten(function(static, *jax.tree.unflatten(tree, leaves)))
        structures.append(structure)
        return results

    exported = export.export(jax.jit(ft.wraps(function)(of_leaves)))(*leaves)
    exported = dataclasses.replace(exported, _get_vjp=None)  # Which cannot be pickled.
    kept = exported, jax.tree.unflatten(structures[-1], range(structures[-1].num_leaves))
    with contextlib.suppress(OSError), written_whole(file) as partial:
        partial.write_bytes(pickle.dumps(kept))
    return kept


def _read(file: pathlib.Path) -> Any:
    """What was written; `None` if nothing was, or it is damaged."""
    try:
        return pickle.loads(file.read_bytes())
    except Exception:
        return None


def _circumstances() -> tuple[Any, ...]:
    """All else that a trace depends on."""
    versions = [importlib.metadata.version(name) for name in ("jax", "jaxlib", "equinox", "numpy")]
    return jax.default_backend(), sorted(jax.config.values.items(), key=str), versions, _code()


@ft.cache
def _code() -> str:
    """A digest of this package's code."""
    content = hashlib.sha256()
    for file in sorted(pathlib.Path(__file__).parents[1].rglob("*.py")):
        content.update(file.read_bytes())
    return content.hexdigest()
