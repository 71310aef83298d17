"""What all families of latencies have: parameters, whose values are checked, and what follows from
the two directions of their map.
"""

import abc
import dataclasses
import functools as ft
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax.core import Tracer
from jax.scipy.special import ndtr, ndtri
from jax.typing import ArrayLike
from jaxtyping import Array, Float


class InFiles(NamedTuple):
    """How data files write a latency family: as a factor on a mean that stands elsewhere in them.

    **Attributes:**

    - `family`: the name of the family.
    - `parameters`: the names of its shape parameters, all of which are required.
    - `make`: makes a latency from their values, in that order; its scale does not matter.
    """

    family: str
    parameters: tuple[str, ...]
    make: Callable[..., "AbstractLatency"]


class ParameterRule(NamedTuple):
    """A rule by which `check` tests one parameter."""

    name: str
    value: Array
    holds: Callable[[np.ndarray], np.ndarray]
    allowed: str


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


def _text(value: object) -> str:
    """A field of a latency: of an array its values, or the first and last if there are many."""
    if not isinstance(value, jax.Array) or isinstance(value, Tracer):
        return repr(value)
    if value.ndim == 0:
        return str(np.asarray(value)[()])
    options: dict[str, Any] = {"separator": ", ", "threshold": 8, "max_line_width": 10**6}
    return " ".join(np.array2string(np.asarray(value), **options).split())


class AbstractLatency(eqx.Module):
    r"""Abstract base class for all latency distributions.

    A latency is a monotone function of a standard normal score: $x = F^{-1}(\Phi(z))$. The two
    directions of this map, `from_normal` and `to_normal`, define a family, and are accurate in both
    tails. Derivatives with respect to every parameter are pathwise (equivalently, implicit), and
    remain finite at zero variance.

    Parameters are array leaves of one dtype. Each is a scalar or has the same rank as the others,
    and all broadcast to `batch_shape`. A parameter that is the mean is called `location` in every
    family, because `mean` is a method.

    Beyond the abstract methods, a family may set `in_files`, its name in data files; and have a
    static method `from_moments`, by which it is fitted to samples: from a mean, a variance and a
    skewness to the shape parameters in files, or to `None` if it has no such law. It may register
    with `log_sigma.register`, if it is log-normal, and with `scale_spread.register`, which
    parameter is its spread.
    """

    in_files: ClassVar[InFiles | None] = None
    from_moments: ClassVar[Callable[[float, float, float], dict[str, float] | None] | None] = None

    def __check_init__(self) -> None:
        _ = self.batch_shape  # Raises if parameters do not broadcast.
        check_own(self)

    def __repr__(self) -> str:
        fields = (f"{f.name}={_text(getattr(self, f.name))}" for f in dataclasses.fields(self))
        return f"{type(self).__name__}({', '.join(fields)})"

    @property
    @abc.abstractmethod
    def batch_shape(self) -> tuple[int, ...]:
        """The shape to which the parameters broadcast: one latency for each element."""

    @abc.abstractmethod
    def from_normal(self, z: ArrayLike) -> Float[Array, "..."]:
        r"""The latency whose standard normal score is `z`: $F^{-1}(\Phi(z))$.

        **Arguments:**

        - `z`: standard normal scores, which broadcast against the batch. `z` must have the rank of
            the batch unless one of them is a scalar.

        **Returns:**

        Latencies, in seconds, in the dtype of the parameters. Differentiable with respect to the
        parameters and `z`.
        """

    @abc.abstractmethod
    def to_normal(self, x: ArrayLike) -> Float[Array, "..."]:
        r"""The standard normal score of a latency, $\Phi^{-1}(F(x))$: the inverse of `from_normal`.

        **Arguments:**

        - `x`: latencies, in seconds, which broadcast against the batch. `x` must have the rank of
            the batch unless one of them is a scalar.

        **Returns:**

        Standard normal scores; outside the support they are infinite or very large.
        """

    @abc.abstractmethod
    def mean(self) -> Float[Array, "..."]:
        """The mean, in seconds, of shape `batch_shape`."""

    @abc.abstractmethod
    def variance(self) -> Float[Array, "..."]:
        """The variance, in seconds squared, of shape `batch_shape`."""

    @abc.abstractmethod
    def third_moment(self) -> Float[Array, "..."]:
        """The third central moment (the third cumulant), in seconds cubed."""

    @abc.abstractmethod
    def rules(self) -> tuple[ParameterRule, ...]:
        """The rules by which `check` tests the parameters that this class itself holds."""

    @classmethod
    def fit(cls, samples: Float[np.ndarray, " samples"]) -> dict[str, float] | None:
        """The shape parameters, as in files, with which this family has the moments of some
        samples, relative to their mean. They are Python's numbers, so that files have all their
        digits in every dtype. `None` if the family cannot have these moments, or is not fitted.
        """
        values = samples / samples.mean()
        variance = float(np.var(values))
        if cls.from_moments is None or variance <= 0:
            return None
        skewness = float(np.mean((values - 1) ** 3)) / math.sqrt(variance) ** 3
        return cls.from_moments(1.0, variance, skewness)

    @property
    def dtype(self) -> jnp.dtype:
        """The floating-point dtype of the parameters, in which everything is computed."""
        dtypes = [leaf.dtype for leaf in jax.tree.leaves(eqx.filter(self, eqx.is_inexact_array))]
        return ft.reduce(jnp.promote_types, dtypes) if dtypes else jnp.zeros(()).dtype

    def cdf(self, x: ArrayLike) -> Float[Array, "..."]:
        """The probability of a latency of at most `x`, elementwise; `x` as in `to_normal`."""
        return ndtr(self.to_normal(x))

    def survival(self, x: ArrayLike) -> Float[Array, "..."]:
        """The probability of a latency above `x`, accurate even if tiny; `x` as in `to_normal`."""
        return ndtr(-self.to_normal(x))

    def sample(self, key: "jax.Array", shape: tuple[int, ...] = ()) -> Float[Array, "..."]:
        """Draws latencies.

        **Arguments:**

        - `key`: a PRNG key.
        - `shape`: the sample shape, prepended to the batch shape.

        **Returns:**

        An array of shape `shape + batch_shape`, in seconds. Differentiable with respect to the
        parameters.
        """
        batch = self.batch_shape
        z = jr.normal(key, (math.prod(shape), *batch), self.dtype)
        return jax.vmap(self.from_normal)(z).reshape(shape + batch)

    def quantile(self, q: ArrayLike) -> Float[Array, "..."]:
        """The latency that is not exceeded with probability `q`.

        **Arguments:**

        - `q`: probabilities in the open interval (0, 1), of any shape. For probabilities that round
            to one, use `from_normal`.

        **Returns:**

        An array of shape `q.shape + batch_shape`, in seconds. Differentiable with respect to the
        parameters and `q`.
        """
        z = ndtri(jnp.asarray(q, self.dtype))
        return jax.vmap(self.from_normal)(z.reshape(-1)).reshape(z.shape + self.batch_shape)


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
    laws = jax.tree.leaves(
        latency, is_leaf=lambda leaf: isinstance(leaf, AbstractLatency) and leaf is not latency
    )
    for law in laws:
        if isinstance(law, AbstractLatency):
            check(law)


def check_own(latency: AbstractLatency) -> None:
    """Raises a `ValueError` for a value that a parameter of this latency cannot have; of latencies
    within it, nothing is checked. Traced values are not known.
    """
    # Equinox makes a module of each bound method, which takes longer than to check.
    for name, value, holds, allowed in type(latency).rules(latency):
        if isinstance(value, Tracer):
            continue
        value = np.asarray(value)
        bad = ~np.broadcast_to(holds(value), value.shape)
        if bad.any():
            index = tuple(int(i) for i in np.argwhere(bad)[0])
            place = f"[{', '.join(map(str, index))}]" if index else ""
            raise ValueError(
                f"`{type(latency).__name__}` got `{name}{place}={value[index]!s}`; it must be "
                f"{allowed}."
            )
