"""Parameters of all families: their dtypes and shapes, the rules that `check` applies, and the laws
that files name by them.
"""

import dataclasses
import functools as ft
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from .._installed import Plugins, all_named, named
from .._misc import subclasses, unknown_name
from ._base import AbstractLatency, InFiles, ParameterRule, check_own


def as_parameters(*values: ArrayLike | Sequence[float]) -> list[Array]:
    """Arrays of one floating-point dtype: that of the given arrays, or the default one."""
    strong = [
        jnp.result_type(value)
        for value in values
        if isinstance(value, (jax.Array, np.ndarray))
        and not getattr(value, "weak_type", False)
        and jnp.issubdtype(value.dtype, jnp.floating)
    ]
    dtype = ft.reduce(jnp.promote_types, strong) if strong else jnp.result_type(float)
    arrays = []
    for value in values:
        # Numbers of the host by NumPy, for JAX would compile it.
        if not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(value)):
            array = np.asarray(value)
            if array.dtype.kind in "biuf":
                arrays.append(jax.device_put(array.astype(dtype)))
                continue
        arrays.append(jnp.asarray(value, dtype))
    return arrays


def check_held(name: str, value: ArrayLike, held: Array) -> None:
    """Raises if a value in seconds, not traced, is so small that its dtype makes it zero."""
    if isinstance(value, jax.Array):
        return
    least, magnitude = float(jnp.finfo(held.dtype).tiny), np.abs(np.asarray(value, np.float64))
    lost = (magnitude > 0) & (magnitude < least)
    if lost.any():
        raise ValueError(
            f"`{name}` is {magnitude[lost].flat[0]:g}, less than the least number that "
            f"{held.dtype} holds, {least:.2g}; give 0 or more, or set `jax_enable_x64`."
        )


def broadcast_batch(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The common batch shape of parameters, which have equal rank or are scalars."""
    if len({len(shape) for shape in shapes if shape}) > 1:
        raise ValueError(
            f"The batch shapes {', '.join(map(str, shapes))} differ in rank; give every parameter "
            "the same number of axes, or make it a scalar."
        )
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        raise ValueError(
            f"The batch shapes {', '.join(map(str, shapes))} do not broadcast; give every axis "
            "the same length, or one."
        ) from None


# What the values of a parameter may be, and how this is tested.
_RULES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "finite": np.isfinite,
    "finite and at least 0": lambda x: np.isfinite(x) & (x >= 0),
    "positive": lambda x: x > 0,  # Infinity included.
}


def parameter(allowed: str) -> Any:
    """A field of an `AbstractParametric`, with what `check` allows: a key of `_RULES`."""
    return eqx.field(metadata={"allowed": allowed})


class AbstractParametric(AbstractLatency):
    """A law whose fields are parameters, or laws, that broadcast; each `parameter` has its rule."""

    @property
    def batch_shape(self) -> tuple[int, ...]:
        shapes = []
        for field in dataclasses.fields(self):
            held = getattr(self, field.name)
            shapes.append(held.batch_shape if isinstance(held, AbstractLatency) else held.shape)
        return broadcast_batch(*shapes)

    def rules(self) -> tuple[ParameterRule, ...]:
        rules = []
        for field in dataclasses.fields(self):
            if (allowed := field.metadata.get("allowed")) is not None:
                value = getattr(self, field.name)
                rules.append(ParameterRule(field.name, value, _RULES[allowed], allowed))
        return tuple(rules)


def check(latency: AbstractLatency) -> None:
    """Checks the values of every parameter of a latency, on the host.

    Constructors check them, too, but values can be changed later, as by `eqx.tree_at`.

    **Arguments:**

    - `latency`: a latency. Latencies that it contains are checked too.

    **Raises:**

    `ValueError` that names the family and the parameter, and says what was given and what is
    allowed.
    """
    check_own(latency)
    parts = jax.tree.leaves(
        latency, is_leaf=lambda leaf: isinstance(leaf, AbstractLatency) and leaf is not latency
    )
    for part in parts:
        if isinstance(part, AbstractLatency):
            check(part)


_PLUGINS = Plugins("families", "latency family", AbstractLatency)


def families() -> dict[str, InFiles]:
    """The families that data files can name, including those that other packages add."""
    classes = all_named(_PLUGINS, _classes())
    return {name: cls.in_files for name, cls in classes.items() if cls.in_files}


def _classes() -> dict[str, type[AbstractLatency]]:
    """The class of each family; one that was defined again counts once."""
    classes: dict[str, type[AbstractLatency]] = {}
    for cls in subclasses(AbstractLatency):
        if cls.in_files is not None:
            first = classes.setdefault(cls.in_files.family, cls)
            if _path(first) != _path(cls):
                raise ValueError(
                    f"The latency family `{cls.in_files.family}` is both `{_path(first)}` and "
                    f"`{_path(cls)}`; give one of them another name."
                )
            classes[cls.in_files.family] = cls
    return classes


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def fit_latency(family: str, samples: Float[np.ndarray, " samples"]) -> dict[str, float] | None:
    """The parameters of a family of data files with the moments of samples; see `fit` of its class.
    `None` if it has none.
    """
    return named(_PLUGINS, _classes(), family).fit(samples)


def make_latency(family: str, parameters: Mapping[str, ArrayLike]) -> AbstractLatency:
    """The latency that a data file names.

    **Arguments:**

    - `family`: the name of a family in data files, its `in_files`.
    - `parameters`: the parameters by name, numbers or arrays without axes, relative to a scale
        that the caller applies with `Scaled`.

    **Returns:**

    A latency without batch axes, of the default dtype.

    **Raises:**

    `ValueError` for an unknown family, an unknown or missing parameter, or a bad value.
    """
    in_files = named(_PLUGINS, _classes(), family).in_files
    if in_files is None:
        raise ValueError(f"The latency family `{family}` has no `in_files`; give its class one.")
    _, names, make = in_files
    for name in parameters:
        if name not in names:
            raise ValueError(unknown_name(f"parameter of `{family}`", name, names))
    missing = [name for name in names if name not in parameters]
    if missing:
        raise ValueError(
            f"The latency family `{family}` lacks `{'` and `'.join(missing)}`; give "
            f"{'it' if len(missing) == 1 else 'them'} a number."
        )
    latency = make(*(parameters[name] for name in names))
    check(latency)
    return latency
