"""Fits a profile to a trace, in six stages, each a function of what the stages before it found."""

import jax
import msgspec
import numpy as np
from jaxtyping import Float

from .._misc import check_type
from ..data import Variation, replace_variations
from ..engine import simulate
from ..trace import Trace
from ._clean import Clean, clean_up
from ._compile import compile_profile
from ._components import Split, split_compute
from ._effects import OfSteps
from ._laws import fit_laws
from ._observe import Seen, notes_of, observe
from ._profile import Component, Fitted, PositionFactor, Profile, WorkerMean
from ._step_graph import CONSTANT


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
# A larger correction of the level would hide that ops are missing, or are not those of the job.
_MOST_CORRECTED = 0.1


def fit_profile(trace: Trace, *, name: str = "") -> Profile:
    """Fits a profile to a trace: the mean latencies of its ops, and the laws around them.

    - Stalls are removed from the latencies first. Their laws have a rate and a size.
    - A worker of the slower half whose compute spreads relatively less than that of the faster
      half, by more than chance, has a constant part in it, such as a sleep, on which no factor
      acts.
    - The mean latency of each kind of op on each worker excludes the time spent waiting for others.
      If it depends on the position of the microbatch in the step by more than chance, each position
      has a factor.
    - The variability of compute is split into components, among them the factors of a step, of a
      worker in one step and of a microbatch's data. The laws have the components in `fitted`.
    - For the residual of each kind of op, several families are fitted, and the one that predicts
      held-out steps best (by CRPS) is taken. For compute it gets the spread of its component.
    - The factor of the data of microbatches has a law of its own, and each kind of op of a stage
      has a loading on it.
    - If the mean of step times is off the mean of this law by more than chance explains, all mean
      latencies are scaled; if step times spread more than the law, by three standard errors, the
      law of the factor of a step is widened.

    **Arguments:**

    - `trace`: from [`read_trace`][].
    - `name`: the name of the profile; by default that of the job.

    **Returns:**

    A [`Profile`][].

    **Raises:**

    `ValueError` for fewer than four steps, for a step that takes no time, if ops do not start in
    the order of the job's schedule, so that the error of a replay is above 10 %, or if the mean of
    the fitted law is further off the mean of the steps than that.
    """
    check_type(trace, Trace, "trace", "use `read_trace` to get one")
    seen = observe(trace)
    clean = clean_up(seen)
    split = split_compute(seen, clean)
    variability, sets = fit_laws(seen, clean, split)
    profile = Profile(
        name=name or trace.job.name,
        layout=trace.job.layout,
        schedule=trace.job.schedule,
        outline=seen.outline,
        means=means_of(seen, clean, split),
        variability=variability,
        fitted=describe_components(seen, clean, split),
        sets=sets,
        positions=positions_of(clean),
    )
    return match_steps(profile, seen.step_times)


def describe_components(seen: Seen, clean: Clean, split: Split) -> Fitted:
    """The components with their errors, and notes on what is wrong or cannot be known."""
    pairs = [(clean.body[kind], seen.latencies[kind]) for kind in seen.step.phases]
    number = sum(int(np.sum(np.isnan(body) & ~np.isnan(x))) for body, x in pairs)
    rate = stall_rate_component(number, sum(int(np.sum(x > 0)) for _, x in pairs))
    notes, components = notes_of(seen, clean.constant), (*split.apart.components, rate)
    return Fitted(len(seen.trace.steps), seen.trace.dropped, notes, components)


def stall_rate_component(number: int, of: int) -> Component:
    """The component of the rate of stalls, from `number` stalls in `of` ops."""
    if not of:
        return Component("stall_rate", None, None, "no op takes any time")
    # The error of a count as if there had been one more, because a count of zero has an error, too.
    return Component("stall_rate", number / of, float(np.sqrt(number + 1)) / of)


def means_of(seen: Seen, clean: Clean, split: Split) -> tuple[WorkerMean, ...]:
    """The means of kinds on workers with their loadings, then their constant parts."""
    loadings = dict(zip(seen.step.phases, split.apart.data.loadings.T.tolist(), strict=True))
    means, constants = [], []
    for kind, x in seen.latencies.items():
        for d, s in np.argwhere(~np.isnan(x[..., 0]).all(axis=2)).tolist():
            loading = loadings[kind][s] if kind in loadings else 1.0
            means.append(WorkerMean(kind, d, s, float(split.mean[kind][d, s, 0, 0]), loading))
        for d, s, *_ in np.argwhere(clean.constant[kind]).tolist():
            seconds = float(clean.constant[kind][d, s, 0, 0])
            constants.append(WorkerMean(CONSTANT + kind, d, s, seconds))
    return (*means, *constants)


def positions_of(clean: Clean) -> tuple[PositionFactor, ...]:
    """The factors of positions that are not one."""
    return tuple(
        PositionFactor(kind, s, m, float(factors[0, s, m, 0]))
        for kind, factors in clean.positions.items()
        for _, s, m, _ in np.argwhere(factors != 1).tolist()
    )


def match_steps(profile: Profile, step_times: OfSteps) -> Profile:
    """A profile whose steps have the mean and the spread of step times, where chance does not
    explain the difference.

    - The mean is off if latencies depend on each other in a way that no component has, as with
      processes that share cores. All mean latencies are then scaled by a level. It corrects the
      share `1 - (standard error / difference)^2` of the difference, and nothing where that is
      negative, for chance explains the rest. A correction of more than 1 % gets a note, and one of
      more than 10 % a `ValueError`.
    - Variation that no component explains, such as uneven work of whole replicas, is attributed to
      the factor of a step: both to the component and to its law, which stay equal.
    - If the median is off by more than the noise and more than 1 %, there is a note.
    """
    program, key = compile_profile(profile), jax.random.key(0)
    law = simulate(program, num_samples=_NUM_SAMPLES, key=key, sampling="plain")
    shares, root = np.array([0.1587, 0.5, 0.8413]), float(np.sqrt(len(step_times)))
    quantiles, predicted = np.quantile(step_times, shares), np.asarray(law.quantile(shares))
    measured_variance, law_variance = _variance(quantiles), _variance(predicted)
    mean, level = float(step_times.mean()), 1.0
    mean_error = law.mean / mean - 1
    mean_variance = max(float(np.std(step_times, ddof=1)), law.std) ** 2 / len(step_times) / mean**2
    if mean_error**2 > mean_variance:
        level = 1 / (1 + mean_error * (1 - mean_variance / mean_error**2))
    if abs(level - 1) > _MOST_CORRECTED:
        raise ValueError(
            f"The ops of the trace make a step of {law.mean:.4g} s, but its steps take {mean:.4g} "
            f"s on average, and a difference of more than {100 * _MOST_CORRECTED:.0f} % is not "
            "corrected; trace all ops of whole steps, and give the job that was traced."
        )
    notes = list(profile.fitted.notes)
    if abs(level - 1) > _NOTED:
        notes.append(
            f"the mean of the fitted law was {100 * mean_error:+.2g} % off that of the steps, by "
            f"more than chance explains, so all latencies are scaled by {level:.4g}"
        )
    median_error = float(level * predicted[1] / quantiles[1]) - 1
    if abs(median_error) > max(
        _SEEN * _OF_MEDIAN * np.sqrt(max(measured_variance, law_variance)) / root, _NOTED
    ):
        notes.append(
            f"the median of the fitted law is {100 * median_error:+.2g} % off that of the steps"
        )
    means = tuple(msgspec.structs.replace(m, mean_s=m.mean_s * level) for m in profile.means)
    level_now = level * profile.fitted.level
    fitted = msgspec.structs.replace(profile.fitted, level=level_now, notes=tuple(notes))
    scaled = msgspec.structs.replace(profile, means=means, fitted=fitted)
    missing_variance = measured_variance - law_variance
    if missing_variance <= _SEEN * law_variance * _OF_VARIANCE / root:
        return scaled
    return _wider(scaled, missing_variance, measured_variance * _OF_VARIANCE / root)


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
