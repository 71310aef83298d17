"""Finds the law that fits worst: replays steps of a trace with measured ops, then draws one part
after the other from its law.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np
from jaxtyping import Float

from ..trace import Trace
from ._clean import position_factors
from ._effects import Loadings, find_factor
from ._laws import factors_at
from ._mean_squares import Latencies, at_ops, compute_logs, compute_places, kinds, ops_by_kind
from ._op_latencies import op_latencies, replayed_step_times
from ._profile import Profile, WorkerMean
from ._step_graph import CONSTANT, StepGraph, step_graph


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
    step = step_graph(profile.job, profile.outline)
    rungs = []
    for name, latencies in _drawn_in_turn(trace, profile, step):
        steps = replayed_step_times(step, latencies)
        rungs.append(Rung(name, float(steps.mean()), float(np.quantile(steps, 0.95))))
    return rungs


def _drawn_in_turn(
    trace: Trace, profile: Profile, step: StepGraph
) -> Iterator[tuple[str, Latencies]]:
    """The names of parts, and latencies with these parts drawn from their laws. A latency is
    `constant + mean * relative * residual`, where `relative` is the effect of data.
    """
    mean, constant, loadings = _means(profile, step)
    varying = op_latencies(trace, step) - constant
    logs = compute_logs(step, varying / np.where(mean > 0, mean, 1))
    of_data = at_ops(step, find_factor(logs, loadings).relative)
    means = mean * of_data
    cvs = np.where(means > 0, varying / np.where(means > 0, means, 1), 0)
    times = max(-(-_STEPS // cvs.shape[1]), 1)
    relative, residuals = np.tile(of_data, times), np.tile(cvs, times)
    laws, compute = _Laws(profile, step, residuals.shape[1]), step.computes

    def latencies() -> Latencies:
        return constant + mean * relative * residuals

    yield "measured ops", latencies()
    laws.draw_residuals(residuals, ~compute)
    yield "all except compute", latencies()
    relative = np.where(compute[:, None], laws.data(loadings), 1)
    yield "data of microbatches", latencies()
    laws.draw_residuals(residuals, compute)
    yield "residuals of compute", latencies()
    worker = step.graph.rank
    factor = laws.factors("worker_step", int(worker.max()) + 1)
    residuals = np.where(compute[:, None], residuals * factor[worker], residuals)
    yield "a worker's step", latencies()
    residuals = residuals * laws.factors("step", 1)
    yield "steps", latencies()
    stalls = laws.stalls()
    yield "stalls", latencies() + stalls
    if profile.fitted.level != 1:
        yield "level", profile.fitted.level * latencies() + stalls


class _Laws:
    """Draws for some steps from the laws of a profile, one after the other."""

    def __init__(self, profile: Profile, step: StepGraph, steps: int):
        self.profile, self.step, self.steps = profile, step, steps
        self.rng, self.kinds = np.random.default_rng(0), kinds(step)
        self.laws = {(v.kernel, v.component): v for v in profile.variability}

    def factors(
        self, component: str, number: int, kernel: str = ""
    ) -> Float[np.ndarray, "number steps"]:
        """Factors of mean one; ones without a law."""
        law, shape = self.laws.get((kernel, component)), (number, self.steps)
        if law is None:
            return np.ones(shape)
        return factors_at(law.family, law.parameters, self.rng.uniform(size=shape))

    def draw_residuals(self, residuals: Latencies, chosen: np.ndarray) -> None:
        """Writes the residuals of the kinds of the chosen ops to `residuals`."""
        for kind, ops in self.kinds.items():
            if chosen[ops[0]]:
                residuals[ops] = self.factors("residual", len(ops), kind)
        residuals[np.array(self.step.twin)] = 0  # The time of the pair is in the other op.

    def data(self, loadings: Loadings) -> Latencies:
        """The effect of data on ops."""
        number, sets = self.profile.schedule.num_microbatches, np.array(self.profile.sets)
        microbatch = np.arange(self.profile.layout.dp * number)
        factor = self.factors("microbatch", len(microbatch))
        if len(sets):
            length = min(sets.shape[1], number)
            drawn = (microbatch[-1] // length + 1, self.steps)
            row = self.rng.integers(len(sets), size=drawn)[microbatch // length]
            first = self.rng.integers(sets.shape[1] - length + 1, size=drawn)[microbatch // length]
            factor = sets[row, first + (microbatch % length)[:, None]] / sets.mean()
        loading = np.ones((len(self.step.kind), 1))
        ops, place = compute_places(self.step)
        loading[ops, 0] = loadings[place[1:3]]
        of_op = factor[np.maximum(self.step.graph.microbatch, 0)]
        return np.maximum(1 + loading * (of_op - 1), 0)

    def stalls(self) -> Latencies:
        """The time that stalls add, in seconds."""
        seconds = np.zeros((len(self.step.kind), self.steps))
        for (kind, component), law in self.laws.items():
            if component == "stall" and kind in self.kinds:
                ops, p = self.kinds[kind], law.parameters
                shape = (len(ops), self.steps)
                sizes = p["median_s"] * np.exp(p["sigma"] * self.rng.standard_normal(shape))
                seconds[ops] = np.where(self.rng.uniform(size=shape) < p["rate"], sizes, 0)
        return seconds


def _means(profile: Profile, step: StepGraph) -> tuple[np.ndarray, np.ndarray, Loadings]:
    """For each op the mean of its varying part and its constant part, both without the level, and
    its loading.
    """
    pp, level = profile.layout.pp, profile.fitted.level
    means = {(m.kind, m.dp_rank * pp + m.stage): m for m in profile.means}
    mean, constant = np.empty((2, len(step.kind), 1))
    none = WorkerMean("", 0, 0, 0.0)  # No constant part, or no op of this kind on the stage.
    for (kind, worker), ops in ops_by_kind(step).items():
        mean[ops] = means[kind, worker].mean_s / level
        constant[ops] = means.get((CONSTANT + kind, worker), none).mean_s / level
    mean *= position_factors(step, profile.positions)[:, None]
    loadings = np.array(
        [[means.get((kind, s), none).loading for kind in step.phases] for s in range(pp)]
    )
    return mean, constant, loadings
