"""The law of an op's latency in a sample, given everything that it shares with other ops: looked up
in the tables of its class.
"""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from ..latency import cube_normal, cube_normal_score
from ..maxplus import AbstractOpLaw
from ..random import exp
from ._classes import Classes, Mixed
from ._segment import NODE_SCORES
from ._tables import SCORE_RANGE, Residuals, Tables, look_up, table_score


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

    def latency(self, op: Any, z: Any, common: Common) -> Any:
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


def class_laws(
    classes: Classes,
    tables: Tables,
    numbers: Int[Array, " rows"],
    mixed: Mixed,
    slowest: Float[Array, "rows samples"],
    nodes: Float[Array, " nodes"],
    regimes: Int[Array, " samples"],
    worker_step: Float[Array, "rows samples"] | None = None,
    other_gpus: Float[Array, "rows samples"] | None = None,
) -> ClassLaw:
    """The laws of some classes in each sample, given the factor of the slowest GPU.

    **Arguments:**

    - `classes`, `tables`: of a plan.
    - `numbers`: the numbers of the classes; the result for -1 has no meaning.
    - `mixed`: the kinds of law among them.
    - `slowest`: the factor of the slowest GPU of each.
    - `nodes`: the factors at which moments are known, of the same group of GPUs.
    - `regimes`: the regimes of the network.
    - `worker_step`: a further factor on the compute of each; it is one for communication.
    - `other_gpus`: the score of the other GPUs of each, if several ops share them.

    **Returns:**

    A law of arrays of shape `(rows, samples)`, or `(rows, 1)` if samples do not differ.
    """
    alone = classes.blocks.direct[numbers] >= 0
    collapsed = single = None
    if mixed.collapsed:
        moments = _moments(tables, numbers, alone, slowest, nodes, regimes, worker_step, other_gpus)
        collapsed = Collapsed(moments[0], moments[1], moments[2])
    if mixed.single:
        compute = classes.blocks.compute[numbers][:, None]
        mean = tables.mean[numbers][:, regimes] * jnp.where(compute, slowest, 1)
        mean = mean if worker_step is None else mean * worker_step
        single = single_laws(classes, tables, numbers, mean)
    return ClassLaw(collapsed, single)


def single_laws(
    classes: Classes,
    tables: Tables,
    numbers: Int[Array, " rows"],
    mean: Float[Array, "rows samples"],
) -> Single:
    """The laws of classes of one kernel; without a meaning for others."""
    direct = classes.blocks.direct[numbers]
    kinds = jnp.where(direct >= 0, classes.kind[direct], 0)[:, None]
    if tables.residuals is None:
        return Single(mean, tables.sigmas[kinds], None)
    return Single(mean, None, kinds)


def _moments(
    tables: Tables, numbers, alone, slowest, nodes, regimes, worker_step, other_gpus
) -> Float[Array, "3 rows samples"]:
    """Mean, standard deviation and skewness, interpolated between nodes; zero if single."""
    reached = slowest[None] >= nodes[1:-1, None, None]
    position = jnp.sum(reached, axis=0, dtype=jnp.int32)
    low, high = nodes[position], nodes[position + 1]
    flat = high <= low
    share = jnp.where(flat, 0, (slowest - low) / jnp.where(flat, 1, high - low))
    moments = tables.moments[:, numbers].reshape(3, len(numbers), -1)
    index = regimes[None, :] * len(NODE_SCORES) + position
    collapsed = _between(moments, index[None], share[None])
    if tables.shared is not None:
        shared = tables.shared[numbers].reshape(len(numbers), -1)
        shared = _between(shared, index, share)
        if other_gpus is None:
            # These GPUs run no other op, so their shared part is drawn with the rest.
            there = shared > 0  # The derivative of `hypot` is not a number at zero.
            root = jnp.hypot(collapsed[1], jnp.where(there, shared, 1))
            collapsed = collapsed.at[1].set(jnp.where(there, root, collapsed[1]))
        else:
            collapsed = collapsed.at[0].add(other_gpus * shared)
    if worker_step is not None:
        assert tables.communication is not None
        communication = tables.communication[:, numbers][:, :, regimes]
        collapsed = _with_factor(collapsed, communication, worker_step)
    return jnp.where(alone[None, :, None], 0, collapsed)


def _between(tables: Float[Array, "... nodes"], low: Int[Array, "... samples"], share):
    """Linear interpolation between a node and the next."""
    below = jnp.take_along_axis(tables, low, axis=-1)
    above = jnp.take_along_axis(tables, low + 1, axis=-1)
    return below + share * (above - below)


def _with_factor(
    moments: Float[Array, "3 rows samples"],
    communication: Float[Array, "3 rows samples"],
    factor: Float[Array, "rows samples"],
) -> Float[Array, "3 rows samples"]:
    """The moments of compute and communication together, if all compute takes `factor` times as
    long. Exact, because the cumulants of both add up.
    """
    mean, std, skewness = moments
    mean_apart, std_apart, skewness_apart = communication
    # In units of the standard deviation, for single precision does not hold cubes of seconds.
    varies = std > 0
    part = jnp.where(varies, std_apart / jnp.where(varies, std, 1), 0)
    third_apart = part**3 * skewness_apart
    # A factor of nothing leaves nothing, and a derivative.
    variance = jnp.maximum(part**2 + factor**2 * (1 - part**2), 1e-12)
    third = third_apart + factor**3 * (skewness - third_apart)
    return jnp.stack(
        [
            mean_apart + factor * (mean - mean_apart),
            std * jnp.sqrt(variance),
            third / variance**1.5,
        ]
    )
