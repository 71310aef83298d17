"""Standard errors by the bootstrap, for every figure of the step time and its derivatives; and what
analyses refuse, as they could not tell these.

Few replica samples may decide many steps, so samples are drawn anew, not steps: each sample gets a
random weight (Rubin, "The Bayesian bootstrap", 1981), and no replica is simulated again. For
values, steps pick samples anew by these weights, and their own draws are weighted, too. For
derivatives, steps keep their samples and draws, and count by how much likelier their sample is
picked: new picks would count twice what differs between samples of equal rank.
"""

import dataclasses
import functools as ft
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from .._estimate import Estimate
from .._misc import counted
from ..engine import SimulatedSteps, check_num_samples, check_program, resample, support
from ..law import FEWEST, more_steps
from ._objectives import AbstractObjective, bandwidth


# Plain samples are drawn only if so many times fewer would reach the tail: derivatives, changes and
# standard errors need more of them there than a quantile alone.
MARGIN = 16
_FEWEST_STEPS = 32
# With fewer steps than this beyond a quantile, its estimate is biased inwards.
_FEWEST_BEYOND = 3
# Of the steps beyond a quantile, the share that lies next to it.
_NEAR = 1 / 8


@dataclasses.dataclass(frozen=True)
class Bootstrapped:
    """Figures of simulated steps, and the same figures with new weights of the replica samples.

    **Attributes:**

    - `values`: `(figures,)`, the figures themselves.
    - `resampled`: `(resamples, figures)`, with new weights.
    - `support`: `(figures,)`, how many independent replica samples each figure rests on. With too
        few, its standard error is not known.
    """

    values: Float[np.ndarray, " figures"]
    resampled: Float[np.ndarray, "resamples figures"]
    support: Float[np.ndarray, " figures"]

    @property
    def scatter(self) -> Float[np.ndarray, " figures"]:
        """The standard error of each figure, however few samples it rests on."""
        return np.std(self.resampled, axis=0, ddof=1)

    @property
    def standard_error(self) -> Float[np.ndarray, " figures"]:
        """The standard error of each figure; `nan` where it is not known."""
        return np.where(self.support >= FEWEST, self.scatter, np.nan)

    @property
    def degrees(self) -> Float[np.ndarray, " figures"]:
        """The degrees of freedom of each standard error: few resamples and few samples both make it
        uncertain.
        """
        return 1 / (1 / (len(self.resampled) - 1) + 1 / np.maximum(self.support, 1))

    def estimates(self) -> list[Estimate]:
        """An `Estimate` of each figure, in their order."""
        columns = (self.values, self.standard_error, self.degrees)
        return [Estimate(*map(float, row)) for row in zip(*columns, strict=True)]


def combined(function: Callable[..., np.ndarray], *some: Bootstrapped) -> Bootstrapped:
    """Figures computed from others: `function` takes rows of figures, one array of rows for each
    argument, and returns rows. What rests on few samples in one argument does so in the result.
    """
    values = np.asarray(function(*(one.values[None] for one in some))[0])
    fewest = ft.reduce(np.minimum, (one.support for one in some))
    if fewest.shape != values.shape:
        fewest = np.full(values.shape, fewest.min(initial=np.inf))
    resampled = np.asarray(function(*(one.resampled for one in some)))
    return Bootstrapped(values, resampled, sure_of_zeros(values, resampled, fewest))


def sure_of_zeros(values: np.ndarray, resampled: np.ndarray, fewest: np.ndarray) -> np.ndarray:
    """The support of changes and derivatives: those that are zero in all resamples, such as by what
    does not vary, need no samples.
    """
    return np.where((values == 0) & (resampled == 0).all(axis=0), np.inf, fewest)


def stacked(*some: Bootstrapped) -> Bootstrapped:
    """Several figures in one row."""
    return Bootstrapped(
        np.concatenate([one.values for one in some]),
        np.concatenate([one.resampled for one in some], axis=1),
        np.concatenate([one.support for one in some]),
    )


def bootstrapped(
    simulated: SimulatedSteps, objectives: Sequence[AbstractObjective]
) -> Bootstrapped:
    """Figures of simulated steps."""

    values = [objective.value(simulated.steps) for objective in objectives]
    resampled = []
    for again in resample(simulated):
        times, weights = in_order(again.simulated.steps, again.own)
        resampled.append([_value(objective, times, weights) for objective in objectives])
    rests_on = [support_of(simulated, objective) for objective in objectives]
    return Bootstrapped(np.array(values), np.array(resampled), np.array(rests_on))


def _value(objective: AbstractObjective, times: np.ndarray, weights: np.ndarray) -> float:
    """A figure of weighted times, in ascending order."""
    if objective.level is not None:
        from scipy.ndimage import uniform_filter1d

        # Weights act on the distances of steps, whose own scatter would count a second time.
        near = int(objective.share * len(times) * _NEAR) + 1
        times = uniform_filter1d(times, near, mode="nearest")
    return objective.value(evenly(times, weights))


def support_of(simulated: SimulatedSteps, objective: AbstractObjective) -> float:
    """How many independent replica samples a figure rests on. For a quantile far out, it is about
    the number beyond it.
    """
    influence = objective.influence(simulated.steps, bandwidth(simulated.steps, objective))
    largest = np.abs(influence).max()
    if largest > 0:
        return support(simulated, (influence / largest) ** 2)
    # Steps that are all equal are known; of steps that vary, none lies beyond the figure.
    return math.inf if np.ptp(simulated.steps) == 0 else 0.0


def in_order(steps: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Steps in ascending order of their times, and their weights; equal steps in their order. Few
    are, and to sort these by themselves is several times faster than a stable sort of all.
    """
    order = np.argsort(steps)
    times = steps[order]
    equal = times[1:] == times[:-1]
    some = np.flatnonzero(np.append(equal, False) | np.append(False, equal))
    order[some] = order[some][np.lexsort((order[some], times[some]))]
    return times, weights[order]


def evenly(times: np.ndarray, weights: np.ndarray) -> Float[np.ndarray, " n"]:
    """As many times as are given, evenly spaced in the law of the weighted times, in ascending
    order. They may lie between two that are given: quantiles of programs that hardly differ must
    not differ by the distance of two steps.
    """
    weights = weights * (len(times) / weights.sum())
    return np.interp(np.arange(len(times)) + 0.5, np.cumsum(weights) - weights / 2, times)


def check_objective(objective: Any) -> None:
    """Raises a `ValueError` unless `objective` is an objective."""
    if not isinstance(objective, AbstractObjective):
        raise ValueError(
            f"The objective {objective!r} must be an `AbstractObjective`, such as `Mean()` or "
            "`Quantile(0.95)`."
        )


def check_reached(objective: AbstractObjective, value: float) -> None:
    """Raises a `ValueError` where a probability is zero or one: its derivative would be zero."""
    if objective.exceeds is not None and not 0 < value < 1:
        raise ValueError(
            f"{objective} is {value:g}; give a threshold that some steps exceed and others do not."
        )


def check_steps(objective: AbstractObjective, num_samples: int) -> None:
    """Raises a `ValueError` if there are too few steps to estimate the figure."""
    each = check_num_samples(num_samples)
    share = objective.share
    if share < 1 and share * each < _FEWEST_BEYOND:
        do = "does" if num_samples == 1 else "do"
        raise ValueError(
            f"{counted(num_samples, 'step')} {do} not reach as far as "
            f"{objective}; simulate at least {math.ceil(_FEWEST_BEYOND / share):,}."
        )


def check_figure(program: Any, objective: Any, num_samples: Any, key: Any) -> int:
    """`num_samples` as an `int`. Raises a `ValueError` unless a figure of simulated steps of a
    program can be had from so many, with its standard error.
    """
    check_program(program, key)
    check_objective(objective)
    check_steps(objective, num_samples)
    return check_num_steps(num_samples)


def check_num_steps(num_samples: int) -> int:
    """`num_samples` as an `int`.

    **Raises:**

    `ValueError` for too few steps.
    """
    num_samples = check_num_samples(num_samples)
    if num_samples < _FEWEST_STEPS:
        raise ValueError(
            f"`num_samples={num_samples}` must be at least {_FEWEST_STEPS} for standard errors."
        )
    return num_samples


def withheld(what: str, rests_on: float) -> tuple[str, ...]:
    """A note for a figure whose standard error is not known; empty if it is."""
    if rests_on >= FEWEST:
        return ()
    few = counted(round(rests_on), "independent replica sample")
    return (
        f"{what} rests on {few}, and a standard error needs {FEWEST}: simulate "
        f"{more_steps(rests_on)}.",
    )
