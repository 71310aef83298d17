"""The factor of a step: its spread and autocorrelation, by restricted maximum likelihood."""

import dataclasses
import functools as ft
import itertools as it
import math

import numpy as np
from jaxtyping import Float, Int

from .._estimate import in_core, slope_of
from .._misc import plural
from ._effects import ALIKE, OfSteps, Variance
from ._profile import Component


# The fewest pairs of neighbouring steps from which an autocorrelation is estimated.
_FEWEST_PAIRS = 20
# The weight of the logarithm of `1 - autocorrelation**2` in the likelihood.
_OFF_ONE = 0.5
# The log-likelihood that a step's factor must add to be significant: two standard errors.
_SEEN = 2.0
# A slope this many standard errors below one contradicts a factor on every op.
_CONTRADICTED = 3.0


def of_steps(
    factor: OfSteps,
    noise: OfSteps,
    steps: Int[np.ndarray, " steps"],
    step_times: OfSteps | None = None,
) -> tuple[Component, Component]:
    """The spread and the autocorrelation of the factor of a step.

    **Arguments:**

    - `factor`, `noise`: the logarithm of the factor that the compute of a step has in common, and
        the variance of its noise.
    - `steps`: the number of each step, increasing.
    - `step_times`: if they are known, the factor is reduced where they contradict that it acts on
        every op. Steps far from the others, because of a stall or because the job was in another
        state, are left out.
    """
    name = "step_autocorrelation"
    chosen = np.ones(len(steps), bool) if step_times is None else in_core(np.log(step_times))
    factor, noise, steps = factor[chosen], noise[chosen], steps[chosen]
    scale = float(np.var(factor, ddof=1)) if len(factor) > 2 else 0.0
    if scale <= ALIKE**2:
        note = "fewer than three steps" if len(factor) < 3 else "all steps are equal"
        return Component("step", None, None, note), Component(name, None, None, note)
    variance, memory = _maximum_likelihood(factor, noise, steps, scale)
    if step_times is not None:
        variance = _in_step_times(variance, factor, noise, np.log(step_times[chosen]))
    if out := int(np.sum(~chosen)):
        note = f"without {plural(out, 'step')} far from the others"
        note = "; ".join(filter(None, (variance.note, note)))
        variance = dataclasses.replace(variance, note=note)
    return variance.component("step"), memory


def _in_step_times(variance: Variance, factor: OfSteps, noise: OfSteps, logs: OfSteps) -> Variance:
    """The part of the factor's variance that step times show, if they do not show all of it.

    The noise of an op affects both the factor and the step time: with a weight of one over the
    number of ops in the mean of all ops, and with the op's share of the critical path in the step
    time. Both kinds of weights add up to one. So the slope of the logarithms of step times over the
    factor is one, with or without noise, if the factor acts on every op, and lower if it does not
    act on ops that steps wait for.
    """
    slope, of_slope = slope_of(logs, factor)
    if not variance.known or slope + _CONTRADICTED * of_slope >= 1:
        return variance
    # The slope of the factor alone; that of the noise is one.
    noise_level = float(np.mean(noise))
    stretch = (variance.known + noise_level) / variance.known
    share = max(slope * stretch - (stretch - 1), 0.0)
    error = np.hypot(share**2 * variance.error, 2 * share * variance.known * stretch * of_slope)
    note = f"{np.sqrt(variance.known):.3g} for compute alone; step times show only a part of it"
    return Variance(share**2 * variance.known, float(error), note)


def _maximum_likelihood(
    factor: OfSteps, noise: OfSteps, steps: Int[np.ndarray, " steps"], scale: float
) -> tuple[Variance, Component]:
    """The variance, and the autocorrelation if it can be known; `scale` is near the variance."""
    from scipy.optimize import minimize

    name = "step_autocorrelation"
    gaps, gap_numbers = np.unique(np.diff(steps, prepend=steps[0]), return_inverse=True)
    # One at a time, Python's numbers are many times faster than elements of arrays.
    rows = (factor.tolist(), (noise + 1e-9 * scale).tolist(), gap_numbers.tolist())
    likelihood = ft.partial(minus_log_likelihood, rows, gaps.astype(float))

    def objective(point) -> float:
        # The last term excludes a random walk, whose spread is unbounded.
        decay = _decay(point[1])
        return likelihood(_variance(point[0]), decay) - _OFF_ONE * math.log1p(-(decay**2))

    def _variance(x: float) -> float:
        return scale * math.exp(min(max(x, -30.0), 30.0))

    # The error of the variance if the true variance were zero.
    chance = float(np.sqrt(2 / np.sum(np.asarray(rows[1]) ** -2.0)))
    best = None
    pairs = int(np.sum(np.diff(steps) == 1))
    if pairs < _FEWEST_PAIRS:
        note = f"{pairs} pairs of neighbouring steps; at least {_FEWEST_PAIRS} are needed"
    else:
        fits = [minimize(objective, [x, 1.0], method="Nelder-Mead") for x in (0.0, -2.0)]
        best = min(fits, key=lambda fit: fit.fun)
        seen = likelihood(0.0, 0.0) - best.fun > _SEEN
        seen = seen and not Variance(_variance(best.x[0]), chance=chance).by_chance
        note = "" if seen else "no factor of steps is seen"
    if best is None or note:
        # For independent steps, the information about the variance is known.
        alone = minimize(lambda x: likelihood(_variance(x[0]), 0.0), [-1.0], method="Nelder-Mead")
        variance = _variance(alone.x[0]) if alone.fun < likelihood(0.0, 0.0) else 0.0
        total = variance + np.asarray(rows[1])
        error = float(np.sqrt(2 / np.sum(total**-2.0) * len(total) / (len(total) - 1)))
        return Variance(variance, error, chance=chance), Component(name, None, None, note)
    variance, decay = _variance(best.x[0]), _decay(best.x[1])
    errors = _errors(lambda x, r: likelihood(variance * math.exp(x), r), decay)
    note = "too low in a trace of so few steps" if len(factor) * (1 - decay) < 20 else ""
    step = Variance(variance, variance * errors[0], chance=chance)
    return step, Component(name, decay, errors[1], note)


def minus_log_likelihood(
    rows: tuple[list[float], list[float], list[int]],
    gaps: Float[np.ndarray, " gaps"],
    variance: float,
    decay: float,
) -> float:
    """Minus the restricted log-likelihood, up to a constant, of an autoregressive process with a
    mean that is observed with noise, by a Kalman filter of the values and of ones, with the same
    gains.

    **Arguments:**

    - `rows`: for each step, its value, the variance of its noise, and the position in `gaps` of its
        distance from the step before it.
    - `gaps`: the distances; the first is zero.
    - `variance`, `decay`: the variance of the process, and its autocorrelation after one step.
    """
    decays = (decay**gaps).tolist()
    value = unit = 0.0  # The expectations for the next step.
    spread = variance
    logs = of_values = cross = of_units = 0.0
    for measured, noise, gap in zip(*rows, strict=True):
        decayed = decays[gap]
        value, unit = decayed * value, decayed * unit
        spread = decayed * decayed * spread + variance * (1 - decayed * decayed)
        total = spread + noise
        gain = spread / total
        new, new_unit = measured - value, 1 - unit
        logs += math.log(total)
        of_values += new * new / total
        cross += new * new_unit / total
        of_units += new_unit * new_unit / total
        value += gain * new
        unit += gain * new_unit
        spread *= 1 - gain
    return (logs + math.log(of_units) + of_values - cross**2 / of_units) / 2


def _decay(x: float) -> float:
    return 1 / (1 + math.exp(-min(max(x, -13.8), 13.8)))  # From 1e-6 to 1 - 1e-6.


def _errors(likelihood, decay: float) -> tuple[float, float]:
    """Standard errors of the logarithm of the variance, at zero, and of the decay, from the
    curvature by differences. That of the decay is at most that of its prior range.
    """
    # The decay may pass zero, but not one.
    steps = np.diag([1e-2, min(1e-2, (1 - decay) / 10)])
    point = np.array([0.0, decay])

    def second(i: int, j: int) -> float:
        signs = it.product((-1, 1), repeat=2)
        corners = (a * b * likelihood(*(point + a * steps[i] + b * steps[j])) for a, b in signs)
        return sum(corners) / (4 * steps[i, i] * steps[j, j])

    curvature = np.array([[second(i, j) for j in (0, 1)] for i in (0, 1)])
    nothing = 12**-0.5
    if np.min(np.linalg.eigvalsh(curvature)) <= 0:
        return 1.0, nothing
    of_variance, of_decay = np.sqrt(np.diag(np.linalg.inv(curvature)))
    return float(of_variance), min(float(of_decay), nothing)
