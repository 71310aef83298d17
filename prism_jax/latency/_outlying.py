from typing import ClassVar

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from ._base import AbstractLatency, InFiles, ParameterRule
from ._lognormal import LogNormal
from ._mixture import Mixture
from ._transform import Shifted


def _outlying(
    sigma: ArrayLike, share: ArrayLike, excess: ArrayLike, outlier_sigma: ArrayLike
) -> "Outlying":
    """A log-normal body of median one, and outliers beyond it."""
    sigma, share, excess, outlier_sigma = (
        jnp.asarray(x, float) for x in (sigma, share, excess, outlier_sigma)
    )
    slow = Shifted(LogNormal(excess, outlier_sigma), 1.0)
    return Outlying(Mixture(jnp.stack([1 - share, share]), (LogNormal(1.0, sigma), slow)))


class Outlying(AbstractLatency):
    r"""A factor that is log-normal around one, except for a share of outliers. An outlier is
    $1 + x$, where $x$ is log-normal and its median is the excess.

    It describes the step times of a run (MLPerf Training logs, v3.0 to v5.1): a narrow body, and
    about one step in a hundred that takes some per cent longer.
    """

    in_files: ClassVar[InFiles] = InFiles(
        "lognormal-outliers",
        ("sigma", "outlier_share", "outlier_excess", "outlier_sigma"),
        _outlying,
    )

    law: Mixture

    def __init__(self, law: Mixture):
        """**Arguments:**

        - `law`: the mixture of the body and the outliers.
        """
        self.law = law

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return self.law.batch_shape

    def from_normal(self, z: ArrayLike) -> Float[Array, "..."]:
        return self.law.from_normal(z)

    def to_normal(self, x: ArrayLike) -> Float[Array, "..."]:
        return self.law.to_normal(x)

    def mean(self) -> Float[Array, "..."]:
        return self.law.mean()

    def variance(self) -> Float[Array, "..."]:
        return self.law.variance()

    def third_moment(self) -> Float[Array, "..."]:
        return self.law.third_moment()

    def rules(self) -> tuple[ParameterRule, ...]:
        return self.law.rules()
