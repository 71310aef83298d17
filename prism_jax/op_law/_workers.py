"""Factors of the workers of a group that meets.

A worker is the GPUs of a pipeline rank that run the same microbatch. Where workers wait for one
another within a microbatch, each has the factor of its slowest GPU, its own in the step, and that
of its microbatch's data, and the slowest product decides. A product is taken along the line of
steepest ascent, as in the first-order reliability method (Hasofer and Lind, "Exact and invariant
second-moment code format", 1974): with the spreads `s` of the factors, a worker at the score `z`
has the product of the factors at `z s / |s|`, which is exact for log-normal laws, and for one law.

The slowest product of one op and of another are correlated, as they share factors, by less than
the products themselves, because another worker may be the slowest: see `_correlation`. So the score
of the slowest product is a sum of three, of the rank, of the step and of the microbatch, whose
variances have these correlations, and the product is taken to be that of a factor of each.
"""

import functools as ft
from collections.abc import Sequence

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import ndtr
from jaxtyping import Array, Float

from ..latency import AbstractLatency, root, score_of_maximum
from ._segment import GroupFactors, gpu_factors, relative_factor, slowest_and_others


# Scores of a law at which its spread is taken, and a grid of scores for correlations.
_FAR = 2.0
_GRID = np.linspace(-5.0, 5.0, 41)
_ANGLES, _ANGLE_WEIGHTS = np.polynomial.legendre.leggauss(24)


class Slowest(eqx.Module):
    """The factor of a group's slowest worker.

    **Attributes:**

    - `groups`, `at_scores`: as of `gpu_factors`; the first is the part of the rank.
    - `in_step`, `of_data`: the parts of the step and of the microbatch, at the same scores.
    - `persistent`, `shared_by_data`: factors on the deviation that ops share because of the other
        workers: of the first two parts; and of the microbatches, over the spread of `of_data`.
    """

    groups: GroupFactors
    at_scores: Float[Array, "groups scores"]
    in_step: Float[Array, " scores"]
    of_data: Float[Array, " scores"]
    persistent: Float[Array, ""]
    shared_by_data: Float[Array, ""]


def slowest_workers(
    laws: Sequence[AbstractLatency | None],
    worker: Float[Array, ""],
    counts: Float[Array, " groups"],
    sizes: Float[Array, " groups"],
    lines: Float[Array, " groups"],
    scores: Float[Array, " scores"],
) -> Slowest:
    """The factors of groups whose workers differ.

    **Arguments:**

    - `laws`: of the factors of a GPU, of a worker in a step, and of a microbatch; `None` for equal.
    - `worker`: how many GPUs a worker has.
    - `counts`, `sizes`, `lines`, `scores`: as of `gpu_factors`. The first group is that of a rank,
        whose members are taken to be the GPUs of one worker; the second that of all GPUs, after
        the pipeline, where only GPUs differ.
    """
    rank, in_step, of_data = laws
    dtype, number = scores.dtype, counts[0] / worker

    def factor(law, z):
        return jnp.ones_like(z) if law is None else relative_factor(law, z).astype(dtype)

    def of_gpus(z):
        return factor(rank, score_of_maximum(z, worker))

    factors = [of_gpus, ft.partial(factor, in_step), ft.partial(factor, of_data)]
    ends = jnp.asarray([-_FAR, 0.0, _FAR], dtype)
    spreads = jnp.stack([(low - high) / middle for high, middle, low in (f(ends) for f in factors)])
    squares = spreads**2 / jnp.maximum(jnp.sum(spreads**2), jnp.finfo(dtype).tiny)
    along = root(squares)

    def product(z):
        return jnp.prod(jnp.stack([f(c * z) for f, c in zip(factors, along, strict=True)]), axis=0)

    alone, at_scores = gpu_factors(rank, jnp.stack([worker, counts[1]]), scores)
    of_workers = jnp.broadcast_to(number, counts.shape)
    # Members that are single GPUs: those of a worker differ as far as the factor of GPUs decides.
    waiting = (sizes / worker) ** jnp.where(sizes < worker, squares[0], 1)
    # All GPUs of a line have the factor of the microbatch.
    lines = 1 / (squares[2] + (1 - squares[2]) / lines)
    groups, _ = slowest_and_others(product, of_workers, scores, waiting, lines)
    slowest = groups.slowest.at[1].set(alone.slowest[1])
    below = slowest[:2, :, None] * alone.others / alone.slowest[:, :, None]
    # What neither the rank nor its step shares is taken to be the microbatch's, on all ranks.
    shares = jnp.append(_correlation(jnp.cumsum(squares)[:2], number), 1)
    shares = jnp.diff(shares, prepend=0)
    parts = [product(score_of_maximum(root(share) * scores, number)) for share in shares]
    low, middle, high = product(score_of_maximum(root(shares[2]) * ends / _FAR, number))
    spread = (high - low) / (2 * middle)
    return Slowest(
        groups=GroupFactors(slowest, groups.others.at[:2].set(below)),
        at_scores=at_scores.at[0].set(parts[0]),
        in_step=parts[1] / middle,
        of_data=parts[2] / middle,
        persistent=root(squares[0] + squares[1]),
        shared_by_data=jnp.where(spread > 0, along[2] / jnp.where(spread > 0, spread, 1), 0),
    )


def _correlation(
    shared: Float[Array, " shares"], number: Float[Array, ""]
) -> Float[Array, " shares"]:
    """The correlation of the scores of the slowest of so many workers in two ops, where a worker's
    scores in both have the correlation `shared`: Hoeffding's integral, with the bivariate normal
    law by Plackett's (1954).
    """
    dtype = shared.dtype
    grid = jnp.asarray(_GRID, dtype)
    scores = score_of_maximum(grid, number)
    x, y = scores[None, :, None, None], scores[None, None, :, None]
    end = jnp.arcsin(jnp.clip(shared, 0, 1 - 1e-6))[:, None, None, None]
    angle = end * jnp.asarray((_ANGLES + 1) / 2, dtype)[None, None, None]
    weights = end * jnp.asarray(_ANGLE_WEIGHTS / 2, dtype)[None, None, None]
    power = (x**2 + y**2 - 2 * x * y * jnp.sin(angle)) / (2 * jnp.cos(angle) ** 2)
    joint = jnp.sum(weights * jnp.exp(-power), axis=-1) / (2 * np.pi)
    excess = jnp.expm1(number * jnp.log1p(joint / jnp.outer(ndtr(scores), ndtr(scores))[None]))
    weight = jnp.outer(ndtr(grid), ndtr(grid)) * (grid[1] - grid[0]) ** 2
    return jnp.clip(jnp.einsum("xy,ixy->i", weight, excess), 0, 1)
