"""The families of latencies that data files name."""

from collections.abc import Mapping

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Float

from .._installed import Plugins, all_named, named
from .._misc import subclasses, unknown_name
from ._base import AbstractLatency, InFiles, check


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
