"""Derivatives of figures with respect to the parameters of a program, and without each group of
samples, for their standard errors.
"""

import jax
import numpy as np
from jaxtyping import Float, Int

from ..engine import Derivatives, support, through_paths, through_weights
from ..op_law import Tables
from ..program import Program
from ..replica import gradients_of
from ..step import GROUPS
from ._figure import Dependence, Figure, dependence_of, figure_value
from ._jackknife import without_groups


# Steps are sorted by their time in so many bins of equal weight in a derivative.
_BINS = 16


def figure_gradient(figure: Figure) -> Program:
    """The derivative of a figure with respect to the parameters of its program."""
    rows = gradients_of(figure.simulated.run.program, _derivative(figure, figure.value))
    return jax.tree.map(lambda x: x[0], rows)


def figure_gradients(figure: Figure) -> tuple[Program, float]:
    """The derivative of a figure, then rows of the same without each group of replica samples; and
    how many independent samples it rests on.

    Without a group, the others have their slopes in the law without it; and the steps that it
    decided the slopes of what they would be without the sample that decides them. Of these, and of
    changes of slopes, the derivative of a step is the mean one of steps that take about as long.
    """
    dependence = dependence_of(figure, figure.value)
    simulated, relevance = dependence.simulated, dependence.relevance()
    group, (bins, moved) = simulated.deciders.group, _moved(dependence)
    by_bin = through_paths(simulated, np.abs(dependence.slope), relevance, bins, _BINS)
    by_group = through_paths(simulated, dependence.slope, relevance, group, GROUPS)
    influences = dependence.influence, dependence.lost, np.zeros_like(group), 1
    weights = through_weights(simulated, *influences)
    lost = through_weights(simulated, dependence.lost, dependence.lost, group, GROUPS)

    def rows(by_group, by_bin, weights, lost):
        total = by_group.sum(axis=0) + weights
        without = total - by_group + np.tensordot(moved, by_bin, 1)
        return np.concatenate([total, without - lost + lost.mean(axis=0)])

    derivatives = jax.tree.map(rows, by_group, by_bin, weights, lost)
    tables = _over_density(figure, dependence, derivatives)
    if dependence.simulated is not figure.simulated:
        tables = jax.tree.map(np.add, tables, _with_the_quantile(figure))
    return gradients_of(simulated.run.program, tables), support(simulated, relevance)


def _derivative(figure: Figure, value: float) -> Tables:
    """That of a figure, or of a quantile if it were of this value, with respect to tables."""
    dependence = dependence_of(figure, value)
    simulated, slope, relevance = dependence.simulated, dependence.slope, dependence.relevance()
    all_steps = np.zeros(len(slope), int), 1
    paths = through_paths(simulated, slope, relevance, *all_steps)
    weights = through_weights(simulated, dependence.influence, dependence.lost, *all_steps)
    return _over_density(figure, dependence, jax.tree.map(np.add, paths, weights))


def _over_density(figure: Figure, dependence: Dependence, derivatives: Derivatives) -> Tables:
    """The derivatives of a figure with respect to tables, by segments. That of a quantile is that
    of the probability that a step takes longer, over the density. It may lie in a gap that no step
    reaches, where all derivatives of the probability are zero.
    """
    tables, by_threshold = derivatives
    if dependence.simulated is figure.simulated:
        return tables
    density = np.maximum(-by_threshold, np.finfo(np.float32).tiny)
    return jax.tree.map(lambda x: x / density.reshape(-1, *[1] * (x.ndim - 1)), tables)


def _moved(
    dependence: Dependence,
) -> tuple[Int[np.ndarray, " n"], Float[np.ndarray, "groups bins"]]:
    """The bin of each step by its time, and for each group by how much the sum of slopes in each
    bin differs without it from that of the steps of the other groups, over the bin's relevance.
    """
    simulated, relevance = dependence.simulated, dependence.relevance()
    steps, order = simulated.steps, np.argsort(simulated.steps, kind="stable")
    reached = np.cumsum(relevance[order])
    ends = np.searchsorted(reached, reached[-1] * np.arange(1, _BINS) / _BINS)
    edges = steps[order][np.minimum(ends, len(steps) - 1)]
    bins = np.searchsorted(edges, steps, side="right")
    moved = np.zeros((GROUPS, _BINS))
    for number, others in enumerate(without_groups(simulated)):
        slopes = dependence.unit * dependence.objective.slope(others, dependence.width)
        slopes = slopes * dependence.matters(others)
        moved[number] = np.bincount(np.searchsorted(edges, others, side="right"), slopes, _BINS)
        kept = np.where(simulated.deciders.group == number, 0, dependence.slope)
        kept = kept * dependence.matters(steps)
        moved[number] -= np.bincount(bins, kept, _BINS)
    of_bins = np.bincount(bins, relevance, _BINS)
    return bins, moved / np.maximum(of_bins, np.finfo(float).tiny)


def _with_the_quantile(figure: Figure) -> Tables:
    """By how much the derivatives of a quantile move because it lies elsewhere: for that of all
    steps, which is zero, and without each group.
    """
    value = figure_value(figure)
    by = np.concatenate([[0.0], value.without[:, 0] - value.without[:, 0].mean()])
    error = float(value.scatter[0]) or 1e-6 * figure.value
    high, low = (_derivative(figure, figure.value + sign * error) for sign in (1, -1))

    def moved(high, low):
        return by.reshape(-1, *[1] * (high.ndim - 1)) * (high - low) / (2 * error)

    return jax.tree.map(moved, high, low)
