"""Finds the law that fits worst: replays steps of a trace with measured ops, then draws one part
after the other from its law.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np
from jaxtyping import Float

from ..program import CONSTANT, StepGraph, op_latencies, replay, step_graph
from ..trace import Trace
from ._compute import compute_logs, groups, places, relative_latencies
from ._data_factor import find_factor
from ._family import factors_at
from ._positions import position_factors
from ._profile import Profile, WorkerMean


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
    for name, latencies in _Parts(trace, profile, step).drawn_in_turn():
        steps = replay(step, latencies)
        rungs.append(Rung(name, float(steps.mean()), float(np.quantile(steps, 0.95))))
    return rungs


class _Parts:
    """Latencies, split into a constant part, a mean, the effect of data, and the rest, each
    `(ops, steps)`.
    """

    def __init__(self, trace: Trace, profile: Profile, step: StepGraph):
        self.profile, self.step = profile, step
        self.rng = np.random.default_rng(0)
        self.kinds = np.array(step.kind)
        self.compute = step.computes
        self.laws = {(v.kernel, v.component): v for v in profile.variability}
        self.mean, self.constant, loadings = _means(profile, step)
        latencies = op_latencies(trace, step) - self.constant
        logs = compute_logs(profile.job, step, latencies / np.where(self.mean > 0, self.mean, 1))
        self.relative = relative_latencies(profile.job, step, find_factor(logs, loadings))
        whole = self.mean * self.relative
        self.rest = np.where(whole > 0, latencies / np.where(whole > 0, whole, 1), 0)
        self.loading = np.ones((len(self.kinds), 1))
        ops, place = places(profile.job, step)
        self.loading[ops, 0] = loadings[place[1:3]]
        times = max(-(-_STEPS // latencies.shape[1]), 1)
        self.relative, self.rest = (np.tile(x, times) for x in (self.relative, self.rest))

    def drawn_in_turn(self) -> Iterator[tuple[str, Float[np.ndarray, "ops steps"]]]:
        """The names of parts, and latencies with these parts drawn from their laws."""
        yield "measured ops", self._latencies
        self._draw_residuals(~self.compute)
        yield "all except compute", self._latencies
        self.relative = np.where(self.compute[:, None], self._data(), 1)
        yield "data of microbatches", self._latencies
        self._draw_residuals(self.compute)
        yield "residuals of compute", self._latencies
        worker = np.array([members[0] for members in self.step.members])
        factor = self._factor("worker_step", int(worker.max()) + 1)
        self.rest = np.where(self.compute[:, None], self.rest * factor[worker], self.rest)
        yield "a worker's step", self._latencies
        self.rest = self.rest * self._factor("step", 1)
        yield "steps", self._latencies
        stalls = self._stalls()
        yield "stalls", self._latencies + stalls
        if self.profile.fitted.level != 1:
            yield "level", self.profile.fitted.level * self._latencies + stalls

    @property
    def _latencies(self) -> Float[np.ndarray, "ops steps"]:
        return self.constant + self.mean * self.relative * self.rest

    @property
    def _shape(self) -> tuple[int, int]:
        return self.rest.shape

    def _draw_residuals(self, mine: np.ndarray) -> None:
        for kind in dict.fromkeys(self.kinds[mine].tolist()):
            ops, law = np.flatnonzero(self.kinds == kind), self.laws.get((kind, "residual"))
            self.rest[ops] = 1.0 if law is None else self._drawn(law, (len(ops), self._shape[1]))
        self.rest[np.array(self.step.twin)] = 0  # The time of the pair is in the other op.

    def _drawn(self, law, shape: tuple[int, int]) -> np.ndarray:
        return factors_at(law.family, law.parameters, self.rng.uniform(size=shape))

    def _factor(self, name: str, number: int) -> Float[np.ndarray, "number steps"]:
        law = self.laws.get(("", name))
        shape = (number, self._shape[1])
        return np.ones(shape) if law is None else self._drawn(law, shape)

    def _data(self) -> Float[np.ndarray, "ops steps"]:
        """The effect of drawn data on ops."""
        number = self.profile.schedule.num_microbatches
        shape = (self.profile.layout.dp * number, self._shape[1])
        factor = self._factor("microbatch", shape[0])
        if self.profile.sets:
            sets = np.array(self.profile.sets)
            length = min(sets.shape[1], number)
            microbatch = np.arange(shape[0])
            drawn = (microbatch[-1] // length + 1, shape[1])
            row = self.rng.integers(len(sets), size=drawn)[microbatch // length]
            first = self.rng.integers(sets.shape[1] - length + 1, size=drawn)[microbatch // length]
            factor = sets[row, first + (microbatch % length)[:, None]] / sets.mean()
        of_op = factor[np.maximum(self.step.graph.microbatch, 0)]
        return np.maximum(1 + self.loading * (of_op - 1), 0)

    def _stalls(self) -> Float[np.ndarray, "ops steps"]:
        seconds = np.zeros(self._shape)
        for (kind, component), law in self.laws.items():
            if component == "stall":
                ops, p = np.flatnonzero(self.kinds == kind), law.parameters
                shape = (len(ops), self._shape[1])
                sizes = p["median_s"] * np.exp(p["sigma"] * self.rng.standard_normal(shape))
                seconds[ops] = np.where(self.rng.uniform(size=shape) < p["rate"], sizes, 0)
        return seconds


def _means(
    profile: Profile, step: StepGraph
) -> tuple[
    Float[np.ndarray, "ops 1"], Float[np.ndarray, "ops 1"], Float[np.ndarray, "stages phases"]
]:
    """For each op the mean of its varying part and its constant part, both without the level, and
    its loading.
    """
    pp, level = profile.layout.pp, profile.fitted.level
    means = {(m.kind, m.dp_rank * pp + m.stage): m for m in profile.means}
    mean: Float[np.ndarray, "ops 1"] = np.empty((len(step.kind), 1))
    constant = np.zeros_like(mean)
    none = WorkerMean("", 0, 0, 0.0)  # No constant part, or no op of this kind on the stage.
    for (kind, worker), ops in groups(step).items():
        mean[ops] = means[kind, worker].mean_s / level
        constant[ops] = means.get((CONSTANT + kind, worker), none).mean_s / level
    mean *= position_factors(step, profile.positions, pp)[:, None]
    loadings = np.array(
        [[means.get((kind, s), none).loading for kind in step.phases] for s in range(pp)]
    )
    return mean, constant, loadings
