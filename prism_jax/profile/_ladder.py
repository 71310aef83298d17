"""Finds the law that fits worst: replays steps of a trace with measured ops, then draws one part
after the other from its law.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Float

from ..trace import Trace
from ._compile import means_of_ops
from ._data_factor import Loadings, compute_logs, find_factor
from ._laws import factors_at
from ._profile import Profile
from ._step_graph import (
    CONSTANT,
    ByKind,
    StepGraph,
    replayed_step_times,
    traced_graph,
)


# The least number of steps that are replayed for each rung.
_STEPS = 300


@dataclasses.dataclass(frozen=True)
class Rung:
    """The steps of a trace with this part and all parts before it drawn from their laws.

    **Attributes:**

    - `name`: the name of the part.
    - `mean_s`, `p95_s`: the mean and the p95 of the steps, in seconds.
    """

    name: str
    mean_s: float
    p95_s: float


def ladder(trace: Trace, profile: Profile) -> list[Rung]:
    """Replays a trace, first with measured ops, then with one part after the other drawn from its
    profile.

    **Arguments:**

    - `trace`: the trace that the profile was fitted to.
    - `profile`: from `fit_profile`.

    **Returns:**

    The rungs. The first has measured ops, the last the whole profile, up to the noise of some
    hundred steps.
    """
    step, measured = traced_graph(trace, profile.outline)
    rungs = []
    for name, latencies in _drawn_in_turn(measured, profile, step):
        steps = replayed_step_times(step, latencies)
        rungs.append(Rung(name, float(steps.mean()), float(np.quantile(steps, 0.95))))
    return rungs


def _drawn_in_turn(
    measured: ByKind, profile: Profile, step: StepGraph
) -> Iterator[tuple[str, ByKind]]:
    """The names of parts, and latencies with these parts drawn from their laws. A latency is
    `constant + mean * relative * residual`, where `relative` is the effect of data.
    """
    mean, constant, loadings = _means(profile, step)
    num_steps = measured[step.phases[0]].shape[3]
    times = max(-(-_STEPS // num_steps), 1)
    varying = {kind: np.tile(x, times) - constant[kind] for kind, x in measured.items()}
    compute = [_ratio(varying[kind], mean[kind]) for kind in step.phases]
    of_data = np.moveaxis(find_factor(compute_logs(compute), loadings).relative, 2, 0)
    relative = dict.fromkeys(mean, np.ones(1)) | dict(zip(step.phases, of_data, strict=True))
    residuals = {kind: _ratio(x, mean[kind] * relative[kind]) for kind, x in varying.items()}
    laws = _Laws(profile, step, times * num_steps)

    def latencies() -> ByKind:
        return {k: constant[k] + mean[k] * relative[k] * residuals[k] for k in mean}

    yield "measured ops", latencies()
    residuals |= laws.residuals([kind for kind in mean if kind not in step.phases])
    yield "all except compute", latencies()
    relative |= laws.data(loadings)
    yield "data of microbatches", latencies()
    residuals |= laws.residuals(step.phases)
    yield "residuals of compute", latencies()
    of_workers = laws.factors("worker_step", (profile.layout.dp, profile.layout.pp, 1))
    residuals |= {kind: residuals[kind] * of_workers for kind in step.phases}
    yield "a worker's step", latencies()
    of_steps = laws.factors("step", ())
    residuals |= {kind: x * of_steps for kind, x in residuals.items()}
    yield "steps", latencies()
    stalls = laws.stalls()
    yield "stalls", {kind: x + stalls[kind] for kind, x in latencies().items()}
    if (level := profile.fitted.level) != 1:
        yield "level", {kind: level * x + stalls[kind] for kind, x in latencies().items()}


def _ratio(latencies: np.ndarray, means: np.ndarray) -> np.ndarray:
    """The latencies over means; zero for ops that take no time."""
    return np.where(means > 0, latencies / np.where(means > 0, means, 1), 0)


class _Laws:
    """Draws for some steps from the laws of a profile, one after the other."""

    def __init__(self, profile: Profile, step: StepGraph, steps: int):
        self.profile, self.phases, self.steps = profile, step.phases, steps
        self.rng = np.random.default_rng(0)
        self.laws = {(v.kernel, v.component): v for v in profile.variability}
        # The latency of twins is in the other op.
        self.twins = step.by_kind(np.array(step.twin, float)[:, None])

    def factors(
        self, component: str, shape: tuple[int, ...], kernel: str = ""
    ) -> Float[np.ndarray, "*shape steps"]:
        """Factors of mean one; ones without a law."""
        law, shape = self.laws.get((kernel, component)), (*shape, self.steps)
        if law is None:
            return np.ones(shape)
        return factors_at(law.family, law.parameters, self.rng.uniform(size=shape))

    def residuals(self, kinds: Sequence[str]) -> ByKind:
        """The residuals of some kinds of ops."""
        twins = {kind: self.twins[kind] for kind in kinds}
        return {k: self.factors("residual", x.shape[:3], k) * (x != 1) for k, x in twins.items()}

    def data(self, loadings: Loadings) -> ByKind:
        """The effect of data on compute."""
        number, sets = self.profile.schedule.num_microbatches, np.array(self.profile.sets)
        microbatch = np.arange(self.profile.layout.dp * number)
        factor = self.factors("microbatch", microbatch.shape)
        if len(sets):
            length = min(sets.shape[1], number)
            drawn = (microbatch[-1] // length + 1, self.steps)
            row = self.rng.integers(len(sets), size=drawn)[microbatch // length]
            first = self.rng.integers(sets.shape[1] - length + 1, size=drawn)[microbatch // length]
            factor = sets[row, first + (microbatch % length)[:, None]] / sets.mean()
        more = factor.reshape(-1, 1, number, self.steps) - 1
        pairs = zip(self.phases, loadings.T[:, :, None, None], strict=True)
        return {kind: np.maximum(1 + loading * more, 0) for kind, loading in pairs}

    def stalls(self) -> ByKind:
        """The time that stalls add, in seconds."""
        seconds = {kind: np.zeros((*x.shape[:3], self.steps)) for kind, x in self.twins.items()}
        for (kind, component), law in self.laws.items():
            if component == "stall" and kind in seconds:
                shape, p = seconds[kind].shape, law.parameters
                sizes = p["median_s"] * np.exp(p["sigma"] * self.rng.standard_normal(shape))
                seconds[kind] = np.where(self.rng.uniform(size=shape) < p["rate"], sizes, 0)
        return seconds


def _means(profile: Profile, step: StepGraph) -> tuple[ByKind, ByKind, Loadings]:
    """The means of the varying parts of ops and their constant parts, both without the level, and
    the loadings of compute.
    """
    level, rows = profile.fitted.level, list(means_of_ops(profile, step))
    mean = step.by_kind(np.array([[row.mean_s * factor / level] for row, factor in rows]))
    loading = step.by_kind(np.array([[row.loading] for row, _ in rows]))
    constant = {kind: np.zeros((*x.shape[:2], 1, 1)) for kind, x in mean.items()}
    for row in profile.means:
        if row.kind.startswith(CONSTANT):
            constant[row.kind.removeprefix(CONSTANT)][row.dp_rank, row.stage] = row.mean_s / level
    return mean, constant, np.stack([loading[kind][0, :, 0, 0] for kind in step.phases], axis=1)
