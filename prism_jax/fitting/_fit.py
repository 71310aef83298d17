"""Fitting the laws of a traced job: what its ops take, and what they share."""

import jax
import msgspec
import numpy as np
from jaxtyping import Float

from .._misc import counted
from ..analysis import crps
from ..data import Fitted, Profile, Variation, WorkerMean
from ..engine import simulate
from ..program import StepGraph, compile_profile, op_latencies, replay, step_graph
from ..trace import Trace, outline
from ._components import fit_components
from ._stall_prior import size_spread, stall_share


# An op that is so many robust standard deviations beyond the median of its worker's has stalled, if
# that delays a step by this share at all.
_STALL_DEVIATIONS = 8.0
_STALL_SHARE = 1e-3
# What happens in more than this share of steps is no stall.
_STALL_MOST = 0.2
_NUM_LEVELS = 201
_STEP_SAMPLES = 20_000
# A replay that is off by more than the first is a reader's to know, by more than the second no fit.
_REPLAY_NOTED = 0.005
_REPLAY_MOST = 0.1


def fit_profile(trace: Trace, *, name: str = "") -> Profile:
    """Fits the latencies of a traced job.

    - The mean of each kind of op on each worker, without what it waited for others.
    - Stalls, which are taken out first: how often a step has one, and how long it is.
    - The factor of a microbatch's data, shared by all stages and phases of its replica.
    - What is left of each kind of op: of several families, that which predicts held-out steps best
      (CRPS).
    - The factor of a step, which is what the spread of the step times has beyond all of these.

    `fitted.components` says how much of the spread of compute is due to what; see `components`.

    **Arguments:**

    - `trace`: from `read_trace`.
    - `name`: of the profile; by default that of the job.

    **Returns:**

    A [`Profile`][].

    **Raises:**

    `ValueError` for fewer than four steps, a step that takes no time, or ops that do not start in
    the order of the job's schedule, so that their replay is off by more than a tenth.
    """
    if len(trace.steps) < 4:
        raise ValueError(
            f"The trace has {counted(len(trace.steps), 'whole step')}; at least 4 are needed to "
            "tell what varies from step to step."
        )
    step_times = trace.step_times()
    if not np.all(step_times > 0):
        number = trace.steps[np.argmin(step_times)]
        raise ValueError(
            f"Step {number} of the trace takes no time; give the starts and durations of its ops."
        )
    shape = outline(trace)
    step = step_graph(trace.job, shape)
    latencies = op_latencies(trace, step)
    off = float(np.max(np.abs(replay(step, latencies) / step_times - 1)))
    if not off <= _REPLAY_MOST:
        raise ValueError(
            f"The starts of the trace's ops do not fit the order of the job's schedule, for their "
            f"replay is off by {100 * off:.3g} %, where {100 * _REPLAY_MOST:.0f} % are allowed; "
            "give the job that was traced and starts on one clock."
        )
    body, stalls = _without_stalls(step, latencies, step_times)
    groups = _groups(step)
    mean = np.empty((len(latencies), 1))
    for ops in groups.values():
        mean[ops] = np.nanmean(body[ops])
    kinds, microbatch = np.array(step.kind), step.graph.microbatch
    factor, sigma = _microbatch_factor(kinds, microbatch, body, mean)
    source = f"{len(trace.steps)} traced steps"
    variability = [
        *([Variation("", "microbatch", "lognormal", {"sigma": sigma}, source)] if sigma else []),
        *_residuals(kinds, body, mean * factor, source),
        *stalls,
    ]
    pp = trace.job.layout.pp
    means = tuple(
        WorkerMean(kind, worker // pp, worker % pp, float(mean[ops[0], 0]))
        for (kind, worker), ops in groups.items()
    )
    job = trace.job
    profile = Profile(
        name or job.name,
        job.layout,
        job.schedule,
        shape,
        means,
        tuple(variability),
        Fitted(len(trace.steps), trace.dropped, _notes(trace, off), fit_components(trace)),
    )
    return _with_step_factor(profile, step_times, source)


def _without_stalls(
    step: StepGraph, latencies: np.ndarray, step_times: np.ndarray
) -> tuple[np.ndarray, list[Variation]]:
    """Latencies with `nan` in place of stalls, and the laws of the stalls that delay steps.

    What a stall costs is seen by replaying the step without it. Ops of one kind that stall in the
    same step count as one stall: they delay it together. The rate is the posterior mean, for one
    stall in a dozen steps does not make one in twelve.
    """
    kinds = np.array(step.kind)
    typical = np.empty_like(latencies)
    limit = np.empty(len(latencies))
    for members in _groups(step).values():
        centre = np.median(latencies[members])
        deviation = 1.4826 * np.median(np.abs(latencies[members] - centre))
        typical[members] = centre
        limit[members] = max(_STALL_DEVIATIONS * deviation, _STALL_SHARE * np.median(step_times))
    stalled = latencies - typical > limit[:, None]
    body = latencies.copy()
    found = []
    for kind in dict.fromkeys(step.kind):
        mine = (kinds == kind)[:, None] & stalled
        if not 0 < np.mean(mine.any(axis=0)) < _STALL_MOST:
            continue  # None, or so many that they belong to the body.
        body[mine] = np.nan
        without = replay(step, np.where(mine, typical, latencies))
        cost = step_times - without
        delayed = cost > _STALL_SHARE * np.median(step_times)
        if not delayed.any():
            continue
        # How many ops the workers that were seen to delay a step have of this kind.
        workers = {step.members[op] for op in np.flatnonzero(mine[:, delayed].any(axis=1))}
        pairs = zip(step.kind, step.members, strict=True)
        number = sum(k == kind and members in workers for k, members in pairs)
        logs = np.log(cost[delayed])
        parameters = {
            "sigma": size_spread(cost[delayed]),
            "rate": stall_share(len(logs), len(step_times)) / number,
            "median_s": float(np.exp(logs.mean())),
        }
        source = f"{len(logs)} of {len(step_times)} traced steps"
        found.append(Variation(kind, "stall", "lognormal", parameters, source))
    return body, found


def _groups(step: StepGraph) -> dict[tuple[str, int], np.ndarray]:
    """The ops of each kind on each worker."""
    found: dict[tuple[str, int], list[int]] = {}
    for op, (kind, members) in enumerate(zip(step.kind, step.members, strict=True)):
        found.setdefault((kind, members[0]), []).append(op)
    return {key: np.array(ops) for key, ops in found.items()}


def _microbatch_factor(
    kinds: np.ndarray, microbatch: np.ndarray, body: np.ndarray, mean: np.ndarray
) -> tuple[np.ndarray, float]:
    """The factor of each op's microbatch, `(ops, steps)`, and the spread of its logarithm.

    A microbatch's factor is what its compute takes over all stages and phases, in seconds, over the
    mean of that. Its spread is less what the noise of single ops adds.
    """
    compute = np.char.endswith(kinds.astype(str), "-compute")
    number = int(microbatch.max()) + 1
    known = compute[:, None] & ~np.isnan(body)

    def total(values):
        sums = np.zeros((number, body.shape[1]))
        np.add.at(sums, microbatch[compute], np.where(known, values, 0)[compute])
        return sums

    expected = total(mean)
    ratio = np.where(expected > 0, total(body) / np.where(expected > 0, expected, 1), 1)
    # What a whole step has in common is not the microbatch's.
    ratio /= ratio.mean(axis=0)
    factor = np.where(compute[:, None], ratio[np.where(compute, microbatch, 0)], 1.0)
    noise = np.where(known, body - mean * factor, 0.0) ** 2
    of_noise = np.mean(total(noise) / np.where(expected > 0, expected, 1) ** 2)
    ratio = np.where(ratio > 0, ratio, 1.0)  # All that was computed for it has stalled.
    variance = max(float(np.var(np.log(ratio))) - float(of_noise), 0.0)
    return factor, float(np.sqrt(variance))


def _residuals(
    kinds: np.ndarray, body: np.ndarray, expected: np.ndarray, source: str
) -> list[Variation]:
    """The law of what is left of each kind of op, relative to what is expected of it."""
    ratios = np.where(expected > 0, body / np.where(expected > 0, expected, 1), np.nan)
    found = []
    for kind in dict.fromkeys(kinds.tolist()):
        mine = ratios[kinds == kind]
        mine = mine[:, ~np.isnan(mine).all(axis=0)]
        if kind.endswith("-compute"):
            mine = mine / np.nanmean(mine, axis=0)  # The step's factor has its own law.
        family, parameters = _best_family(mine)
        if family != "constant":
            found.append(Variation(kind, "residual", family, parameters, source))
    return found


def _best_family(ratios: Float[np.ndarray, "ops steps"]) -> tuple[str, dict[str, float]]:
    """The family that predicts the odd steps best from the even ones, and the reverse."""
    halves = [ratios[:, ::2], ratios[:, 1::2]]
    halves = [half[np.isfinite(half) & (half > 0)] for half in halves]
    everything = np.concatenate(halves)
    if len(everything) < 4 or np.std(everything) < 1e-6 or min(map(len, halves)) < 2:
        return "constant", {}
    levels = (np.arange(_NUM_LEVELS) + 0.5) / _NUM_LEVELS
    best: tuple[float, str, dict[str, float]] | None = None
    for family in _FAMILIES:
        found = _moments(family, everything)
        if found is None:
            continue
        total = 0.0
        for fitted, held in (halves, halves[::-1]):
            parameters = _moments(family, fitted)
            if parameters is None:
                total = np.inf
                break
            quantiles = _quantiles(family, parameters, levels) * fitted.mean()
            total += crps(quantiles, held[:: max(len(held) // 2000, 1)])
        if best is None or total < best[0] * (1 - 1e-3):
            best = (total, family, found)
    return best[1:] if best else ("constant", {})


def _quantiles(family: str, parameters: dict[str, float], levels: np.ndarray) -> np.ndarray:
    """Of a factor of mean one. As of `latency`, without compiling anything."""
    from scipy import stats

    if family == "gamma":
        shape = parameters["cv"] ** -2
        return stats.gamma.ppf(levels, shape, scale=1 / shape)
    if family == "weibull":
        law = stats.weibull_min(parameters["shape"])
        return law.ppf(levels) / law.mean()
    scores = stats.norm.ppf(levels)
    if family == "normal":
        return 1 + parameters["std"] * scores
    sigma, shift = parameters["sigma"], parameters.get("shift", 0.0)
    return (shift + np.exp(sigma * scores)) / (shift + np.exp(sigma**2 / 2))


# The simplest first: another must be better by a thousandth.
_FAMILIES = ("lognormal", "normal", "gamma", "shifted-lognormal", "weibull")


def _moments(family: str, ratios: np.ndarray) -> dict[str, float] | None:
    """The parameters of a family, by moments; `None` where it cannot have these."""
    values = ratios / ratios.mean()
    cv = float(np.std(values))
    if cv <= 0:
        return None
    if family == "lognormal":
        return {"sigma": float(np.sqrt(np.log1p(cv**2)))}
    if family == "normal":
        return {"std": cv} if cv < 0.2 else None
    if family == "gamma":
        return {"cv": cv}
    if family == "weibull":
        shape = cv**-1.086  # Of small error from cv 0.01 to 1; Justus et al. (1978).
        return {"shape": shape}
    skewness = float(np.mean((values - 1) ** 3)) / cv**3
    if not 0.05 < skewness < 20:
        return None
    # The skewness of a log-normal is (w + 2) sqrt(w - 1), w = exp(sigma^2).
    low, high = 1e-6, 4.0
    for _ in range(60):
        middle = (low + high) / 2
        w = np.exp(middle**2)
        low, high = (middle, high) if (w + 2) * np.sqrt(w - 1) < skewness else (low, middle)
    w = np.exp(low**2)
    median = cv / np.sqrt(w * (w - 1))
    shift = 1 - median * np.sqrt(w)
    if shift < 0 or median <= 0:
        return None
    return {"sigma": low, "shift": shift / median}


def _with_step_factor(profile: Profile, step_times: np.ndarray, source: str) -> Profile:
    """Adds what the body of the step times spreads beyond what the profile says."""
    law = simulate(
        compile_profile(profile), num_samples=_STEP_SAMPLES, key=jax.random.key(0), sampling="plain"
    )
    predicted = np.asarray(law.quantile(np.array([0.1587, 0.5, 0.8413])))
    measured = np.quantile(step_times, [0.1587, 0.5, 0.8413])
    variance = _spread(measured) ** 2 - _spread(predicted) ** 2
    if variance <= 0:
        return profile
    step = Variation("", "step", "lognormal", {"sigma": float(np.sqrt(variance))}, source)
    return msgspec.structs.replace(profile, variability=(step, *profile.variability))


def _spread(quantiles: np.ndarray) -> float:
    """Half the distance of the two outer quantiles, relative to the middle."""
    return float((quantiles[2] - quantiles[0]) / (2 * quantiles[1]))


def _notes(trace: Trace, off: float) -> tuple[str, ...]:
    """What a reader should know, and what the trace cannot tell; `off` is the error of a replay."""
    steps, dp = len(trace.steps), trace.job.layout.dp
    notes = []
    if off > _REPLAY_NOTED:
        notes.append(
            f"the replay is off by {100 * off:.2g} %: some ops do not start where the schedule says"
        )
    compute = [op for op in trace.start if op.endswith("-compute")]
    seconds = [trace.end[op] - trace.start[op] for op in compute]
    if idle := sum(int(np.sum(x <= 0)) for x in seconds):
        ops = counted(sum(x.size for x in seconds), "op")
        notes.append(f"{idle} of {ops} of compute take no time: the components are of the others")
    gaps = np.diff(trace.steps)
    if len(gaps) and np.mean(gaps == 1) < 0.8:
        notes.append("the traced steps have gaps: the autocorrelation of steps is not identified")
    if dp * trace.job.layout.pp < 64:
        notes.append(
            f"{counted(dp * trace.job.layout.pp, 'worker')}: their own means are known, the law "
            "that they are drawn from is not"
        )
    if steps < 100:
        notes.append(f"{steps} steps: stalls rarer than one in {steps} steps are not seen")
    return tuple(notes)
