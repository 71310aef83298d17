"""Matches the level and the spread of the steps of a fitted profile to those that were traced."""

import jax
import msgspec
import numpy as np
from jaxtyping import Float

from ..data import Variation, replace_variations
from ..engine import simulate
from ..law import Law
from ._compile import compile_profile
from ._profile import Component, Profile


_NUM_SAMPLES = 20_000
# How many standard errors of the variance of step times must be unexplained to widen the law, and
# how many of their median to give a note.
_SEEN = 3.0
# Standard errors for normal steps, times the root of their number: of the square of half the
# distance of the outer quantiles, relative to it; and of the distance of the median from that of a
# law with the mean of the same steps, (pi / 2 - 1)^0.5 standard deviations (1.25 for a median).
_OF_VARIANCE, _OF_MEDIAN = 1.92, 0.756
# A smaller error of the level or the median gets no note, however well it is known.
_NOTED = 0.01


def match_steps(profile: Profile, step_times: Float[np.ndarray, " steps"]) -> Profile:
    """A profile whose steps have the mean and the spread of step times, where chance does not
    explain the difference.

    - The mean is off if latencies depend on each other in a way that no component has, as with
      processes that share cores. All mean latencies are then scaled by a level. It corrects the
      share `1 - (standard error / difference)^2` of the difference, and nothing where that is
      negative, for chance explains the rest. A correction of more than 1 % gets a note.
    - Variation that no component explains, such as uneven work of whole replicas, is attributed to
      the factor of a step: both to the component and to its law, which stay equal.
    - If the median is off by more than the noise and more than 1 %, there is a note.
    """
    law = simulate(
        compile_profile(profile), num_samples=_NUM_SAMPLES, key=jax.random.key(0), sampling="plain"
    )
    levels, root = np.array([0.1587, 0.5, 0.8413]), float(np.sqrt(len(step_times)))
    quantiles, predicted = np.quantile(step_times, levels), np.asarray(law.quantile(levels))
    measured, known = _variance(quantiles), _variance(predicted)
    off, level = _off_and_level(step_times, law)
    notes = list(profile.fitted.notes)
    if abs(level - 1) > _NOTED:
        notes.append(
            f"the mean of the fitted law was {100 * off:+.2g} % off that of the steps, by more "
            f"than chance explains, so all latencies are scaled by {level:.4g}"
        )
    of_median = float(level * predicted[1] / quantiles[1]) - 1
    if abs(of_median) > max(_SEEN * _OF_MEDIAN * np.sqrt(max(measured, known)) / root, _NOTED):
        notes.append(
            f"the median of the fitted law is {100 * of_median:+.2g} % off that of the steps"
        )
    means = tuple(msgspec.structs.replace(m, mean_s=m.mean_s * level) for m in profile.means)
    level_now = level * profile.fitted.level
    fitted = msgspec.structs.replace(profile.fitted, level=level_now, notes=tuple(notes))
    scaled = msgspec.structs.replace(profile, means=means, fitted=fitted)
    missing, error = measured - known, measured * _OF_VARIANCE / root
    return (
        _wider(scaled, missing, error) if missing > _SEEN * known * _OF_VARIANCE / root else scaled
    )


def _off_and_level(step_times: Float[np.ndarray, " steps"], law: Law) -> tuple[float, float]:
    """How far the mean of a law is off that of steps, and the factor on its latencies."""
    measured = float(step_times.mean())
    off = law.mean / measured - 1
    chance = max(float(np.std(step_times, ddof=1)), law.std) ** 2 / len(step_times) / measured**2
    return off, 1 / (1 + off * (1 - chance / off**2)) if off**2 > chance else 1.0


def _wider(profile: Profile, missing: float, error: float) -> Profile:
    """The profile with a wider factor of a step, by a variance that has this standard error."""
    (step,) = (c for c in profile.fitted.components if c.name == "step")
    sigma = float(np.sqrt((step.value or 0.0) ** 2 + missing))
    note = f"{step.value or 0.0:.3g} for compute alone; step times spread more than it explains"
    wider = Component("step", sigma, error / (2 * sigma), note)
    components = tuple(wider if c is step else c for c in profile.fitted.components)
    source = f"{profile.fitted.num_steps} traced steps"
    shared = Variation("", "step", "lognormal", {"sigma": sigma}, source)
    return msgspec.structs.replace(
        profile,
        variability=replace_variations(profile.variability, [shared]),
        fitted=msgspec.structs.replace(profile.fitted, components=components),
    )


def _variance(quantiles: Float[np.ndarray, "3"]) -> float:
    """The square of half the distance of the two outer quantiles, relative to the middle."""
    return float((quantiles[2] - quantiles[0]) / (2 * quantiles[1])) ** 2
