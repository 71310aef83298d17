"""What JAX itself makes of a whole function, where NumPy cannot: in double precision, too."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ._operations import in_double_precision


def values_by_jax(function: Callable[..., Any], args: Any) -> list[np.ndarray]:
    """The arrays that a function returns, in their order."""
    args = in_double_precision(args)
    with jax.enable_x64(True):
        results = eqx.filter_jit(function)(*args)
    return [np.asarray(x) for x in jax.tree.leaves(eqx.filter(results, eqx.is_array))]


def derivatives_by_jax(
    function: Callable[..., Any], args: Any, of_results: Sequence[np.ndarray | None]
) -> list[np.ndarray | None]:
    """The derivatives of figures with respect to the arrays in the last argument, in their order,
    from those with respect to the arrays that the function returns; `None` stands for those that
    are not real numbers.
    """
    *earlier, last = in_double_precision(args)
    with jax.enable_x64(True):
        real, fixed = eqx.partition(last, eqx.is_inexact_array)
        cotangents = [None if x is None else jnp.asarray(x) for x in of_results]

        @eqx.filter_jit
        def back(real, fixed, earlier, cotangents):
            def real_results(real):
                arrays = eqx.filter(function(*earlier, eqx.combine(real, fixed)), eqx.is_array)
                pairs = zip(jax.tree.leaves(arrays), cotangents, strict=True)
                return [x for x, of_x in pairs if of_x is not None]

            values, pull_back = jax.vjp(real_results, real)
            of_values = [x for x in cotangents if x is not None]
            pairs = zip(of_values, values, strict=True)
            return jax.vmap(pull_back)([of_x.astype(x.dtype) for of_x, x in pairs])[0]

        derivatives = jax.tree.leaves(back(real, fixed, earlier, cotangents))
    of_reals = iter(derivatives)
    every = jax.tree.leaves(eqx.filter(last, eqx.is_array))
    return [np.asarray(next(of_reals)) if eqx.is_inexact_array(x) else None for x in every]
