"""Variances from mean squares: they are equated with their expectations (Searle, Casella and
McCulloch, "Variance Components", 1992, ch. 5).
"""

import dataclasses

import numpy as np
from jaxtyping import Float

from ..data import Component
from ._means import count, mean
from ._variance import Variance


# Equations of a larger condition number have no solution.
_SINGULAR = 1e8

Logs = Float[np.ndarray, "replicas stages phases microbatches steps"]


def within(rest: Logs) -> tuple[Variance, Variance, Variance]:
    """The variances of the residual, of a worker in one step, and of microbatches, from what steps
    and each worker's means of each phase leave.
    """
    steps = rest.shape[4]
    of_microbatch = mean(rest, (1, 2))
    number = count(rest, (1, 2))
    # What the ops of one microbatch differ by: the residual and the worker's step.
    within = rest - np.where(number > 1, of_microbatch, np.nan)
    means = np.where(number > 0, of_microbatch, np.nan)
    if np.isnan(within).all():
        told = Variance(None, note="a microbatch has one op, from which it is not told")
        both = dataclasses.replace(_of_microbatches(means, 0.0), note="with what its op has")
        return told, told, both if both.value is not None else told
    mine = count(within, (2,))
    cells = count(within, (2, 3))
    total = float(np.nanmean(within**2))
    between = float(np.sum(mean(within, (2, 3)) ** 2) / max(np.sum(cells > 0), 1))
    op_df = max(float(np.sum(np.maximum(number - 1, 0))), 1.0)
    # Workers have lost their mean over the steps, and that of each phase.
    phases = np.count_nonzero(count(rest, (3, 4))) - np.count_nonzero(count(rest, (2, 3, 4)))
    total *= op_df / max(op_df - phases, 1.0)
    if steps > 1:
        total, between = total + between / (steps - 1), between * steps / (steps - 1)
    expected = _expected_squares(mine, np.where(number > 1, number, 0), cells)
    if np.linalg.cond(expected) < _SINGULAR:
        worker_own, own = np.linalg.solve(expected, [between, total])
        df = max(float(np.sum(cells > 0)) * expected[0, 0] - rest.shape[0] * rest.shape[1], 1.0)
        worker_step = Variance(worker_own, between / expected[0, 0] * np.sqrt(2 / df))
    else:
        own = total / expected[1, 1]
        note = "what a worker has in one step is not told from what its replica or its op has"
        worker_step = Variance(None, note=note)
    residual = Variance(own, own * np.sqrt(2 / op_df))
    own = residual.known * float(np.mean(1 / number[number > 0]))
    return residual, worker_step, _of_microbatches(means, own)


def _of_microbatches(means: np.ndarray, noise: float) -> Variance:
    """The variance of microbatches, from their means over the ops of a replica in a step. They
    share all else, but for noise.
    """
    number = count(means, (3,))
    df = float(np.sum(np.maximum(number - 1, 0)))
    if df == 0:
        return Variance(None, note="one microbatch in a step")
    spread = np.where(number > 1, means - mean(means, (3,)), np.nan)
    square = float(np.nansum(spread**2)) / df
    return Variance(square - noise, square * np.sqrt(2 / df))


def _expected_squares(
    mine: np.ndarray, number: np.ndarray, cells: np.ndarray
) -> Float[np.ndarray, "2 2"]:
    """The weights of the variances of a worker's step and of the residual, in the mean square of
    workers and in that of ops, both about the means of their microbatches.

    **Arguments:**

    - `mine`: how many ops a stage has of each microbatch; `number`, all stages together.
    - `cells`: how many a stage has of all microbatches.
    """
    some = np.maximum(number, 1)
    share = mine / some
    # What part the other stages (second axis: of whom, last: of which) have in a worker's means.
    parts = np.einsum("dsfmt,dkfmt->dskt", mine, share)
    parts = parts / np.maximum(cells[:, :, 0, 0, None, :], 1)
    own = np.eye(parts.shape[1])[None, :, :, None]
    there = np.maximum(np.sum(cells > 0), 1)
    of_workers = np.sum(((own - parts) ** 2).sum(axis=2) * (cells[:, :, 0, 0] > 0)) / there
    of_residual = np.sum(mine * (1 - share), axis=3, keepdims=True) / np.maximum(cells, 1) ** 2
    ops = max(float(np.sum(number)), 1.0)
    of_ops = np.sum(number * (1 - np.sum(share**2, axis=1, keepdims=True)) * (number > 0)) / ops
    left = np.sum(np.maximum(number - 1, 0)) / ops
    return np.array([[of_workers, np.sum(of_residual) / there], [of_ops, left]])


def noise_of_means(
    body: Logs, axes: tuple[int, ...], variances: tuple[Variance, ...]
) -> np.ndarray:
    """The variance of means over `axes`, from what varies within them."""
    residual, worker_step, microbatch = (v.known for v in variances)
    there = ~np.isnan(body)

    def repeats(merged: tuple[int, ...]) -> np.ndarray:
        """For each mean, one over the number of different draws of a component in it."""
        counts = np.sum(there, axis=merged, keepdims=True).astype(float)
        rest = tuple(axis for axis in axes if axis not in merged)
        total = np.sum(counts, axis=rest, keepdims=True)
        return np.sum(counts**2, axis=rest, keepdims=True) / np.maximum(total, 1) ** 2

    return (
        residual * repeats(())
        + worker_step * repeats((2, 3))
        + microbatch * repeats(tuple(axis for axis in (1, 2) if axis in axes))
    )


def between_workers(body: Logs, step: np.ndarray, variances: tuple[Variance, ...]) -> Component:
    """How much the workers of a stage differ for good."""
    cells = count(body, (2, 3, 4))
    worker = np.where(cells > 0, mean(body - step, (2, 3, 4)), np.nan)
    number = count(worker, (0,))
    df = float(np.sum(np.maximum(number - 1, 0)))
    if df == 0:
        return Component("rank", None, None, "one replica: workers of a stage cannot be compared")
    deviations = np.where(number > 1, worker - mean(worker, (0,)), np.nan)
    square = float(np.nansum(deviations**2)) / df
    own = float(np.mean(noise_of_means(body, (2, 3, 4), variances)[cells > 0]))
    note = f"from {int(np.sum(cells > 0))} workers" if df < 30 else ""
    return Variance(square - own, square * np.sqrt(2 / df), note).component("rank")
