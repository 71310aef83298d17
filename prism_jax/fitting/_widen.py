"""Widens the factor of a step if step times spread more than the components of compute explain."""

import jax
import msgspec
import numpy as np
from jaxtyping import Float

from ..data import Component, Profile, Variation, replace_variations
from ..engine import simulate
from ..program import compile_profile


_NUM_SAMPLES = 20_000
# So many standard errors of the variance of step times must be unexplained, and of their median to
# be a reader's to know.
_SEEN = 3.0
# The standard errors of the square of half the distance of the outer quantiles, relative to it, and
# of the median from a law whose mean is that of the same steps, (pi / 2 - 1)^0.5 in standard
# deviations: of normal steps, times the root of their number. Of a median alone it is 1.25.
_OF_VARIANCE, _OF_MEDIAN = 1.92, 0.756
# A mean or median that is off by less is not noted, however well it is known.
_NOTED = 0.01


def widen_step(profile: Profile, step_times: Float[np.ndarray, " steps"]) -> Profile:
    """A profile whose steps have the spread of the body of step times, if that can be estimated.

    Variation that no component explains, such as uneven work of whole replicas, is attributed to
    the factor of a step: both to the component and to its law, which stay equal. If the mean or the
    median is off by more than the noise and more than 1 %, there is a note.
    """
    law = simulate(
        compile_profile(profile), num_samples=_NUM_SAMPLES, key=jax.random.key(0), sampling="plain"
    )
    levels = np.array([0.1587, 0.5, 0.8413])
    quantiles, root = np.quantile(step_times, levels), float(np.sqrt(len(step_times)))
    predicted = np.asarray(law.quantile(levels))
    measured, known = _variance(quantiles), _variance(predicted)
    of_median = _OF_MEDIAN * np.sqrt(max(measured, known)) / root
    of_mean = max(float(np.std(step_times)), law.std) / float(step_times.mean()) / root
    profile = _noted(profile, "median", float(predicted[1] / quantiles[1]) - 1, of_median)
    profile = _noted(profile, "mean", law.mean / float(step_times.mean()) - 1, of_mean)
    missing, error = measured - known, measured * _OF_VARIANCE / root
    if missing <= _SEEN * known * _OF_VARIANCE / root:
        return profile
    (step,) = (c for c in profile.fitted.components if c.name == "step")
    sigma = float(np.sqrt((step.value or 0.0) ** 2 + missing))
    note = f"of compute alone {step.value or 0.0:.3g}; step times spread more than it explains"
    wider = Component("step", sigma, error / (2 * sigma), note)
    components = tuple(wider if c is step else c for c in profile.fitted.components)
    source = f"{profile.fitted.num_steps} traced steps"
    shared = Variation("", "step", "lognormal", {"sigma": sigma}, source)
    return msgspec.structs.replace(
        profile,
        variability=replace_variations(profile.variability, [shared]),
        fitted=msgspec.structs.replace(profile.fitted, components=components),
    )


def _noted(profile: Profile, what: str, off: float, error: float) -> Profile:
    """The profile, with a note if this figure of its law is off the steps'."""
    if abs(off) <= max(_SEEN * error, _NOTED):
        return profile
    note = f"the {what} of the fitted law is {100 * off:+.2g} % off that of the steps"
    notes = (*profile.fitted.notes, note)
    return msgspec.structs.replace(
        profile, fitted=msgspec.structs.replace(profile.fitted, notes=notes)
    )


def _variance(quantiles: Float[np.ndarray, "3"]) -> float:
    """The square of half the distance of the two outer quantiles, relative to the middle."""
    return float((quantiles[2] - quantiles[0]) / (2 * quantiles[1])) ** 2
