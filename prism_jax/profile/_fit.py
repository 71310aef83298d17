"""Fits a profile to a trace, in six stages, each a function of what the stages before it found."""

import dataclasses
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from .._misc import check_type
from ..data import Variation
from ..program import CONSTANT
from ..trace import Trace
from ._components import Apart, data_of, stall_rate, take_apart
from ._compute import compute_logs, groups, relative_latencies
from ._constant_parts import constant_parts
from ._laws import Sets, law_of_data, laws_of_kernels
from ._match_steps import match_steps
from ._notes import notes_of
from ._observe import Seen, observe
from ._positions import find_positions, position_factors
from ._profile import Fitted, PositionFactor, Profile, WorkerMean
from ._stalls import take_out_stalls


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

    `ValueError` for fewer than four steps, for a step that takes no time, or if ops do not start in
    the order of the job's schedule, so that the error of a replay is above 10 %.
    """
    check_type(trace, Trace, "trace", "use `read_trace` to get one")
    seen = observe(trace)
    clean = clean_up(seen)
    split = split_compute(seen, clean)
    laws = fit_laws(seen, clean, split)
    fitted = describe(seen, clean, split)
    profile = assemble(name or trace.job.name, seen, clean, split, laws, fitted)
    return match_steps(profile, seen.step_times)


@dataclasses.dataclass(frozen=True)
class Clean:
    """Latencies without what is rare or fixed.

    **Attributes:**

    - `constant`: what of each op never varies, in seconds.
    - `positions`: the factors of microbatches by their position in the step.
    - `body`: the latencies without either; `nan` in place of stalls.
    - `stalls`: the laws of stalls.
    """

    constant: Float[np.ndarray, "ops 1"]
    positions: tuple[PositionFactor, ...]
    body: Float[np.ndarray, "ops steps"]
    stalls: tuple[Variation, ...]


def clean_up(seen: Seen) -> Clean:
    """Takes constant parts, the factors of positions and stalls out of the latencies."""
    job, step = seen.trace.job, seen.step
    constant = constant_parts(job, step, seen.latencies)
    varying = seen.latencies - constant
    positions = find_positions(step, varying, job.layout.pp)
    factors = position_factors(step, positions, job.layout.pp)[:, None]
    # The data of microbatches, from latencies that still include stalls.
    data = data_of(compute_logs(job, step, varying / factors))
    relative = relative_latencies(job, step, data)
    body, stalls = take_out_stalls(seen, relative * factors, constant)
    return Clean(constant, positions, body / factors, stalls)


@dataclasses.dataclass(frozen=True)
class Split:
    """The components of the latencies of compute, and the mean of each op, in seconds, at a factor
    of its microbatch's data of one.
    """

    apart: Apart
    mean: Float[np.ndarray, " ops"]


def split_compute(seen: Seen, clean: Clean) -> Split:
    """Splits the latencies of compute into components; the means are those of kinds on workers."""
    job, step = seen.trace.job, seen.step
    apart = take_apart(compute_logs(job, step, clean.body), seen.trace.steps, seen.step_times)
    relative = relative_latencies(job, step, apart.data)
    mean = np.empty(len(clean.body))
    for ops in groups(step).values():
        mean[ops] = np.nanmean(clean.body[ops] / relative[ops])
    return Split(apart, mean)


class Laws(NamedTuple):
    """The laws around the means, and the sets of factors of data in place of a law, if any."""

    variability: tuple[Variation, ...]
    sets: Sets


def fit_laws(seen: Seen, clean: Clean, split: Split) -> Laws:
    """Fits the laws of components, of the residual of each kind of op, and of the data."""
    of_data, sets = law_of_data(split.apart, seen.trace.steps, seen.source)
    of_kernels = laws_of_kernels(seen, clean.body, split.mean, split.apart)
    return Laws((*of_data, *of_kernels, *clean.stalls), sets)


def describe(seen: Seen, clean: Clean, split: Split) -> Fitted:
    """The components with their errors, and notes on what is wrong or cannot be known."""
    compute = seen.step.computes
    number = int(np.count_nonzero(np.isnan(clean.body[compute])))
    rate = stall_rate(number, int(np.count_nonzero(seen.latencies[compute] > 0)))
    notes, components = notes_of(seen, clean.constant), (*split.apart.components, rate)
    return Fitted(len(seen.trace.steps), seen.trace.dropped, notes, components)


def assemble(
    name: str, seen: Seen, clean: Clean, split: Split, laws: Laws, fitted: Fitted
) -> Profile:
    """The profile with these parts."""
    job, phases, data = seen.trace.job, seen.step.phases, split.apart.data
    means, constants = [], []
    for (kind, worker), (op, *_) in groups(seen.step).items():
        place = divmod(worker, job.layout.pp)
        loading = data.loadings[place[1], phases.index(kind)] if kind in phases else 1.0
        means.append(WorkerMean(kind, *place, float(split.mean[op]), float(loading)))
        if seconds := float(clean.constant[op, 0]):
            constants.append(WorkerMean(CONSTANT + kind, *place, seconds))
    return Profile(
        name,
        job.layout,
        job.schedule,
        seen.outline,
        (*means, *constants),
        laws.variability,
        fitted,
        laws.sets,
        clean.positions,
    )
