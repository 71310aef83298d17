"""The law of an op's latency, given everything that it shares with other ops."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from ..latency import cube_normal, cube_normal_score
from ..maxplus import AbstractOpLaw
from ..random import exp


# Quantile tables are uniform in the standard-normal score, which keeps their error small in tails.
SCORE_RANGE = 6.0
NUM_SCORES = 2049

Table = Float[Array, " scores"]
# Tables of laws, `(kinds, scores)`: an array, or in a kernel what reads one in its memory.
Residuals = Any


class Collapsed(eqx.Module):
    """The law of several kernels that were collapsed: its first three moments."""

    mean: Shaped[Array, "..."]
    std: Shaped[Array, "..."]
    skewness: Shaped[Array, "..."]


class Single(eqx.Module):
    """The law of one kernel.

    **Attributes:**

    - `mean`: the mean latency, in seconds.
    - `sigma`: `sigma` of a log-normal or constant law, else `None`.
    - `kind`: the number of the table of any other law, else `None`.
    """

    mean: Shaped[Array, "..."]
    sigma: Shaped[Array, "..."] | None
    kind: Shaped[Array, "..."] | None


class ClassLaw(eqx.Module):
    """The law of the latency of a class of ops in a sample. Fields that no class needs are `None`,
    and cost nothing.

    **Attributes:**

    - `collapsed`: the law of several kernels; zero for single kernels.
    - `single`: the law of a single kernel; its mean is zero for others.
    - `spread`: a factor on the deviation of the op from its mean by its own draw.
    """

    collapsed: Collapsed | None
    single: Single | None
    spread: Shaped[Array, "..."] | None = None

    def latency(self, z: Float[Array, "*shape"], residuals: Residuals) -> Float[Array, "*shape"]:
        """Latencies at scores `z`, in seconds: the Wilson-Hilferty cube of `ThreeMoment` for
        collapsed kernels; a log-normal or a table for single kernels.
        """
        seconds = jnp.zeros((), z.dtype)
        if self.collapsed is not None:
            law = self.collapsed
            std = law.std if self.spread is None else law.std * self.spread
            seconds = jnp.maximum(law.mean + std * cube_normal(z, law.skewness), 0)
        if self.single is not None:
            if self.single.sigma is not None:
                sigma = self.single.sigma
                sigma = sigma if self.spread is None else sigma * self.spread
                shape = exp(sigma * (z - sigma / 2))
            else:
                shape = look_up(residuals, self.single.kind, z)
                shape = shape if self.spread is None else 1 + self.spread * (shape - 1)
            seconds = seconds + self.single.mean * shape
        return seconds

    def score(
        self, seconds: Float[Array, "*shape"], residuals: Float[Array, "kinds scores"] | None
    ) -> Float[Array, "*shape"]:
        """The score at which an op of one class has a given latency: the inverse of `latency`."""
        if self.collapsed is not None:
            standard = (seconds - self.collapsed.mean) / self.collapsed.std
            score = cube_normal_score(standard, self.collapsed.skewness)
            return jnp.where(seconds > 0, score, -SCORE_RANGE)
        assert self.single is not None
        ratio = seconds / self.single.mean
        if self.single.sigma is not None:
            positive, sigma = ratio > 0, self.single.sigma
            score = jnp.log(jnp.where(positive, ratio, 1)) / sigma + sigma / 2
            return jnp.where(positive, score, -SCORE_RANGE)
        assert residuals is not None
        assert self.single.kind is not None
        return table_score(residuals[self.single.kind.reshape(-1)[0]], ratio)


class Pause(eqx.Module):
    """One stall of each sample: the op that it pauses, or -2 for none, and how long it lasts."""

    op: Int[Array, "1 samples"]
    seconds: Float[Array, "1 samples"]


class Common(eqx.Module):
    """Data that the laws of all ops share.

    **Attributes:**

    - `residuals`: tables of laws that have no cheap closed form.
    - `pauses`: the stalls of each sample.
    """

    residuals: Float[Array, "kinds scores"] | None
    pauses: tuple[Pause, ...]


class OpLaw(AbstractOpLaw):
    """The law of an op in a sample.

    **Attributes:**

    - `class_law`: the law of its class, given the slowest GPU and the regime of the network.
    - `microbatch`: the factor of its microbatch's data.
    - `loading`: its loading on that factor.
    - `factor`: the factor of the program's adjustment.
    - `score`: its score if this is given, or `nan`.
    - `load`: by how many standard deviations the loads of its layers are above the mean.
    - `sway`: how long one of them takes, in seconds.
    """

    class_law: ClassLaw
    microbatch: Shaped[Array, "..."] | None = None
    factor: Shaped[Array, "..."] | None = None
    score: Shaped[Array, "..."] | None = None
    loading: Shaped[Array, "..."] | None = None
    load: Shaped[Array, "..."] | None = None
    sway: Shaped[Array, "..."] | None = None

    def latency(self, op, z, common: Common):
        if self.score is not None:
            z = jnp.where(jnp.isnan(self.score), z, self.score)
        seconds = self.class_law.latency(z, common.residuals)
        if self.load is not None:
            assert self.sway is not None
            seconds = jnp.maximum(seconds + self.sway * self.load, 0)
        if self.microbatch is not None:
            assert self.loading is not None
            factor = self.microbatch
            # As `1 + loading (f - 1)`, and to the last bit `f` where the loading is one.
            seconds = seconds * jnp.maximum(factor + (self.loading - 1) * (factor - 1), 0)
        if self.factor is not None:
            seconds = seconds * self.factor
        for pause in common.pauses:
            seconds = seconds + jnp.where(op == pause.op, pause.seconds, 0)
        return seconds


def look_up(tables: Residuals, which: Any, z: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The quantile of the law `tables[which]` at the score `z`, linear between nodes."""
    step = 2 * SCORE_RANGE / (NUM_SCORES - 1)
    position = (z + z.dtype.type(SCORE_RANGE)) / z.dtype.type(step)
    low = jnp.clip(jax.lax.stop_gradient(jnp.floor(position)), 0, NUM_SCORES - 2)
    index = low.astype(jnp.int32) + which.astype(jnp.int32) * NUM_SCORES
    flat = tables.reshape(-1)
    below, above = flat[index], flat[index + 1]
    return below + (position - low) * (above - below)


def look_up_one(table: Table, z: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """`look_up` in a single table."""
    return look_up(table[None, :], jnp.zeros((1,) * z.ndim, jnp.int32), z)


def table_score(table: Table, value: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The score at which a table has a value, within its range: the inverse of `look_up_one`."""
    scores = jnp.linspace(-SCORE_RANGE, SCORE_RANGE, NUM_SCORES, dtype=table.dtype)
    return jnp.interp(value, table, scores)
