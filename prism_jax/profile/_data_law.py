"""The law of the factor of microbatches' data: of each microbatch, or of a step's microbatches."""

import numpy as np
from jaxtyping import Float, Int

from ..analysis import crps
from ..data import Variation
from ._components import Apart
from ._family import BETTER, LEVELS, best_family, halves_of, held_score, score_of_family


# The number of values in a table of quantiles, and the most factors in sets.
_QUANTILES = 1024
_MOST_FACTORS = 2**17
# The parts into which steps are divided to estimate the scatter of a score.
_BLOCKS = 10
# The standard errors from which a difference is significant.
_SEEN = 3.0

Sets = tuple[tuple[float, ...], ...]


def law_of_data(
    apart: Apart, steps: Int[np.ndarray, " steps"], source: str
) -> tuple[tuple[Variation, ...], Sets]:
    """The law of the factor of a microbatch, or sets of factors instead; see `Profile`.

    - Microbatches of a replica's step are drawn together, as traced, if this predicts the sum over
        a held-out step better than independent draws do, by one standard error of the CRPS.
    - Otherwise, the family that best predicts the factors of held-out steps is used, or a table of
        their quantiles.
    """
    sigma = apart.value("microbatch")
    if not sigma:
        return (), ()
    factor = np.moveaxis(apart.data.factor[:, 0, 0], 1, 2)  # Replicas, steps, microbatches.
    if _depend(factor):
        return (), _stretches(factor, steps)
    values = np.moveaxis(factor, 1, 2).reshape(-1, factor.shape[1])
    halves = halves_of(values)
    family, parameters = best_family(values)
    if min(map(len, halves)) >= _QUANTILES // 2:
        table = held_score(halves, lambda fitted: np.quantile(fitted, LEVELS))
        if table < score_of_family(halves, family) * (1 - BETTER):
            return (), _table(values.reshape(-1))
    if family in ("lognormal", "constant"):
        family, parameters = "lognormal", {"sigma": sigma}
    return (Variation("", "microbatch", family, parameters, source),), ()


def _depend(factor: Float[np.ndarray, "replicas steps microbatches"]) -> bool:
    """Whether other sums over a replica's step predict such sums better than independent draws."""
    if factor.shape[2] < 2 or factor.shape[0] * factor.shape[1] < 2 * _BLOCKS:
        return False
    rng, worse = np.random.default_rng(0), []
    for fitted, held in ((factor[:, ::2], factor[:, 1::2]), (factor[:, 1::2], factor[:, ::2])):
        mixed = rng.permutation(fitted.reshape(-1)).reshape(fitted.shape)
        together, apart = (np.quantile(x.sum(axis=2), LEVELS) for x in (fitted, mixed))
        blocks = np.array_split(held.sum(axis=2).T.reshape(-1), _BLOCKS)
        worse += [crps(apart, block) - crps(together, block) for block in blocks]
    return bool(np.mean(worse) > np.std(worse, ddof=1) / np.sqrt(len(worse)))


def _stretches(
    factor: Float[np.ndarray, "replicas steps microbatches"], steps: Int[np.ndarray, " steps"]
) -> Sets:
    """Stretches of consecutive factors: those of each step or, if data continue from one step to
    the next as they do within a step, those of all steps of a replica.
    """
    replicas, number, microbatches = factor.shape
    length = microbatches
    if number > 1 and np.all(np.diff(steps) == 1) and _goes_on(factor):
        most = max(_MOST_FACTORS // (replicas * microbatches), 1)
        length *= number if number <= most else min(16, number)
    rows = factor.reshape(replicas, -1)
    rows = rows[:, : rows.shape[1] // length * length].reshape(-1, length)
    rows = rows[:: -(-rows.size // _MOST_FACTORS)]
    return tuple(tuple(np.round(row, 6).tolist()) for row in rows)


def _goes_on(factor: Float[np.ndarray, "replicas steps microbatches"]) -> bool:
    """Whether the halves of neighbouring steps are as correlated as those of one step, and the law
    of a microbatch does not depend on its place in a step.
    """
    number = factor.shape[2]
    centred = factor - factor.mean()
    first, last = (
        centred[..., : number // 2].sum(axis=2),
        centred[..., -(number // 2) :].sum(axis=2),
    )
    inside, across = first * last, last[:, :-1] * first[:, 1:]
    error = np.sqrt(inside.var() / inside.size + across.var() / across.size)
    places = factor.mean(axis=(0, 1)) - factor.mean()
    off = np.sum(places**2) / (factor.var() / (factor.shape[0] * factor.shape[1]))
    alike = off < number - 1 + _SEEN * np.sqrt(2 * (number - 1))
    return bool(alike and abs(across.mean() - inside.mean()) < error)


def _table(values: np.ndarray) -> Sets:
    """Means of the values of equal shares, from the smallest to the largest."""
    sums = np.concatenate([[0.0], np.cumsum(np.sort(values))])
    ends = np.linspace(0, len(values), min(len(values), _QUANTILES) + 1)
    means = np.diff(np.interp(ends, np.arange(len(sums)), sums)) / np.diff(ends)
    return tuple((round(mean, 6),) for mean in means.tolist())
