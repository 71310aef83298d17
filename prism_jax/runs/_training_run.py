"""How long a whole training run takes."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from .._interrupt import interruptible
from .._misc import check_type, whole_number
from .._progress import progress_bar
from ..data import Failures, load_failures
from ..engine import gpu_set_factors, prepare, simulate
from ..law import FEWEST, Law
from ..program import Program
from ..random import key_data
from ._cycles import PARTS, RunCosts, Runs, check_costs, run_cycles
from ._rates import (
    Hazards,
    check_failures,
    check_slow,
    draw_counts,
    draw_hazards,
    per_second,
    slowed,
)
from ._run_law import (
    DAY,
    RunLaw,
    best_interval,
    check_ends,
    mean_of,
    never_waits,
    of_costs,
    of_rates,
)


# Runs side by side, few enough for what they are to stay in a core's cache.
_BLOCK = 4096
# Sets of GPUs whose steps are simulated, the steps of each, and how many sets a run has in turn.
# The variance between them then has a standard error of an eighth of itself.
_GPU_SETS = 128
_STEPS_OF_SET = 8
_SETS = 32
# When each spare comes back is held for every run.
_MOST_SPARES = 4096
# For how long the steps of a run drift, in seconds.
_DRIFTING = 3600.0
_WORK, _LOST, _DOWN, _SLOW = map(PARTS.index, ("work", "lost", "down", "slow"))


def training_run(
    program: Program,
    *,
    num_steps: int,
    key: "jax.Array",
    failures: Failures | str = "llama-3",
    costs: RunCosts | None = None,
    num_spares: int | None = None,
    autocorrelation_time: float = 1.0,
    level: float = 0.0,
    drift: float = 0.0,
    known_rates: bool = False,
    find_slow_s: float | None = None,
    num_runs: int = 100_000,
    num_samples: int = 8_192,
    derivatives: bool = False,
    progress: bool = False,
) -> RunLaw:
    """Simulates whole training runs: their steps, on GPUs that they keep, and their interruptions.

    The total time of the steps of a run is normal around the mean on its GPUs. Interruptions come
    at a constant rate for each cause, even while the run restarts or waits for a spare. Each loses
    the work since the last finished checkpoint, unless it is announced. Nodes that it takes are in
    repair for `costs.repair_s`; the run waits while they are more than `num_spares`. Where
    `failures` says that nodes or weeks differ, each run has its own nodes, and weeks of its own.
    Its slow events make steps longer for a while.

    **Arguments:**

    - `program`: the step.
    - `num_steps`: the number of steps in a run.
    - `key`: a `jax.random` key.
    - `failures`: counts of interruptions, from [`load_failures`][], or the name of shipped counts.
    - `costs`: the costs of checkpoints and restarts. By default those of `failures`, with the
        interval that minimises the mean time of a run.
    - `num_spares`: the number of spare nodes; `None` if there is always one more.
    - `autocorrelation_time`: the integrated autocorrelation time of steps on the same GPUs; see
        `Law.run_mean_std`.
    - `level`: the standard deviation of the logarithm of a run's level: all steps of a run take as
        many times longer or shorter as it draws, by one on average.
    - `drift`: how much longer the first step of a run takes than the steps after an hour, as a
        share; 0.02 adds 36 s. `level_of_runs` of `prism_jax.calibration` has what other systems do.
    - `known_rates`: whether the rates are exactly those that were counted. By default, each run
        draws its rates from their posterior given the counts (a gamma law, with Jeffreys' prior of
        the rate of all causes together). Nodes and weeks differ in either case.
    - `find_slow_s`: after how many seconds a slow node is found and replaced, which takes a
        checkpoint and a restart; `None` if never. The runs are then simulated without as well.
    - `num_runs`: how many runs to simulate.
    - `num_samples`: how many steps to simulate for the law of a step.
    - `derivatives`: whether to compute the derivatives of the mean as well.
    - `progress`: whether to show a progress bar.

    **Returns:**

    A [`RunLaw`][]. Ctrl-C ends the simulation early; the law is then of the runs so far, without
    derivatives.

    **Raises:**

    `ValueError` for numbers that are not positive, for checkpoints that take longer than the work
    between them, for interruptions so frequent that a run would not end, and for more slow events
    than can be held.
    """
    check_type(program, Program, "program", "use `compile_job` to get one")
    failures = load_failures(failures) if isinstance(failures, str) else failures
    _check_numbers(num_steps, num_runs, num_spares, level, drift, autocorrelation_time)
    check_failures(failures, costs is not None, find_slow_s)
    if costs is not None:
        check_costs(costs)
    losing = sum(cause.count for cause in failures.causes if not cause.announced)
    blocking = (failures if costs is None else costs).blocking_s
    best = best_interval(per_second(losing, program.world_size, failures), blocking)
    law = _law_of_step(program, num_samples, key, progress)
    work = num_steps * law.mean
    if costs is None:
        repair = {"repair_s": failures.repair_s, "repair_power": failures.repair_power}
        costs = RunCosts(min(best, work), failures.blocking_s, failures.restart_s, **repair)
        check_costs(costs)
    factors = np.ones(1)
    if program.variability.rank is not None:
        factors = gpu_set_factors(prepare(program, key), _GPU_SETS, _STEPS_OF_SET)
    within = math.sqrt(max(law.std**2 - law.mean**2 * factors.var(), 0.0))
    # A drift falls evenly over an hour, and a shorter run keeps what is left of it.
    early = min(work, _DRIFTING)
    simulation = _Simulation(
        work=work,
        step=law.mean,
        drifted=drift * early * (1 - early / _DRIFTING / 2),
        factors=factors,
        noise=within * math.sqrt(min(autocorrelation_time, num_steps)),
        level=level,
        failures=failures,
        devices=program.world_size,
        num_spares=num_spares,
        known_rates=known_rates,
        find_s=math.inf if find_slow_s is None else find_slow_s,
        seeds=np.asarray(key_data(key)).tolist(),
    )
    with progress_bar(num_runs, progress, "runs", "run") as bar:
        runs = simulation.runs(costs, num_runs, bar)
    error = law.errors.mean / law.mean if law.errors.known else math.nan
    return _law_of_runs(simulation, costs, runs, num_runs, derivatives, best, error)


def _check_numbers(num_steps, num_runs, num_spares, level, drift, autocorrelation_time) -> None:
    whole_number(num_steps, "num_steps")
    whole_number(num_runs, "num_runs", 2)
    if num_spares is not None:
        whole_number(num_spares, "num_spares", 0, _MOST_SPARES)
    for name, value, least in (("level", level, 0), ("drift", drift, -1)):
        if not least <= value <= 1:
            raise ValueError(
                f"`{name}={value}` must be a share from {least} to 1; give 0 for runs that do not "
                "differ in it."
            )
    if not 1 <= autocorrelation_time < math.inf:
        raise ValueError(
            f"`autocorrelation_time={autocorrelation_time}` must be finite and at least 1; give 1 "
            "for independent steps."
        )


def _law_of_runs(
    simulation: "_Simulation",
    costs: RunCosts,
    runs: Runs,
    num_runs: int,
    derivatives: bool,
    best: float,
    step_error: float,
) -> RunLaw:
    """What the runs show, and what others show that differ from them in one number."""
    names, slopes, saves = [cause.name for cause in simulation.failures.causes], {}, None
    if simulation.find_s < math.inf:
        never = dataclasses.replace(simulation, find_s=math.inf).runs(costs, len(runs.parts))
        saves = mean_of((never.seconds - runs.seconds[: len(never.parts)]) / DAY)
    if derivatives and len(runs.parts) == num_runs:
        slopes = of_rates(runs, names) | of_costs(simulation.runs, costs, num_runs)
    return RunLaw(
        days=np.sort(runs.seconds) / DAY,
        parts=dict(zip(PARTS, (runs.parts.mean(axis=0) / DAY).tolist(), strict=True)),
        interruptions=dict(zip(names, runs.interruptions.mean(axis=0).tolist(), strict=True)),
        interval_s=costs.interval_s,
        best_interval_s=best,
        derivatives=slopes,
        num_runs=len(runs.parts),
        requested=num_runs,
        step_error=step_error,
        finding_saves_days=saves,
    )


def _law_of_step(program: Program, num_samples: int, key: "jax.Array", progress: bool) -> Law:
    """The law of a step. Only its mean and its spread count, which plain samples give unless they
    are few.
    """
    plain = program.num_replicas * FEWEST <= num_samples
    options: dict[str, Any] = {"key": key, "sampling": "plain" if plain else "auto"}
    law = simulate(program, num_samples=num_samples, progress=progress, **options)
    if law.interrupted:
        raise KeyboardInterrupt("interrupted before the first run.")
    return law


@dataclasses.dataclass(frozen=True)
class _Simulation:
    """All of a run that its costs do not change.

    **Attributes:**

    - `work`, `step`, `drifted`: the seconds of all steps on GPUs of mean speed, of one of them, and
        what a drift adds to all.
    - `factors`: what sets of GPUs take for a step, over the mean.
    - `noise`: the error of the sum of the steps, in seconds for each root of a step.
    - `find_s`: after how many seconds a slow node is found; infinite if never.
    - `seeds`: two words from which all random numbers are drawn.
    """

    work: float
    step: float
    drifted: float
    factors: Float[np.ndarray, " sets"]
    noise: float
    level: float
    failures: Failures
    devices: int
    num_spares: int | None
    known_rates: bool
    find_s: float
    seeds: list[int]

    def runs(
        self, costs: RunCosts, number: int, advance: Callable[[float], object] = lambda count: None
    ) -> Runs:
        """Runs, each time of the same random numbers; after Ctrl-C the first."""
        sequence = np.random.SeedSequence(self.seeds)
        options = {"num_spares": self.num_spares, "known_rates": self.known_rates}
        blocks = []
        with interruptible() as interrupt:
            for begin in range(0, number, _BLOCK):
                rng = np.random.default_rng(sequence.spawn(1)[0])
                count = min(_BLOCK, number - begin)
                hazards = draw_hazards(self.failures, self.devices, count, rng, **options)
                blocks.append(self._block(costs, hazards, rng))
                advance(count)
                if interrupt.take():  # The law says how many runs it has.
                    break
        fields = zip(*(vars(runs).values() for runs in blocks), strict=True)
        return Runs(*map(np.concatenate, fields))

    def _block(self, costs: RunCosts, hazards: Hazards, rng: np.random.Generator) -> Runs:
        number = len(hazards.rates)
        slowness, noise = self._steps(number, rng)
        share, number_found = np.zeros(number), np.zeros(number)
        if kinds := self.failures.slow:
            counts = draw_counts(kinds, number, rng, self.known_rates)
            rates = per_second(counts, self.devices, self.failures)
            check_slow(self.work, self.failures, rates)
            added, number_found = slowed(self.work, kinds, rates, self.find_s, rng)
            share = added / self.work
        check_ends(self.work, costs, hazards, 1 + float(share.max()))
        if never_waits(hazards, costs.repair_s):  # So none needs to be followed.
            hazards = dataclasses.replace(hazards, num_spares=None)
        slowness = slowness * (1 + share)[:, None]
        runs = run_cycles(np.full(number, self.work), slowness, hazards, costs, rng)
        runs.parts[:, _SLOW] = runs.parts[:, _WORK] * share / (1 + share)
        runs.parts[:, _WORK] -= runs.parts[:, _SLOW]
        runs.parts[:, _DOWN] += number_found * (costs.blocking_s + costs.restart_s)
        executed = runs.parts[:, [_WORK, _LOST]].sum(axis=1)
        runs.parts[:, _WORK] += self.drifted + noise * np.sqrt(executed / self.step)
        return runs

    def _steps(self, number: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Of so many runs: the factors of the sets of GPUs that they have one after the other, and
        the error of the sum of their steps, as `noise`.
        """
        factors = rng.integers(len(self.factors), size=(number, _SETS))
        noise = self.noise * rng.normal(size=number)
        # By a generator of their own: the other random numbers are the same whatever the level.
        levels = np.exp(self.level * rng.spawn(1)[0].normal(size=(number, 1)))
        return self.factors[factors] * levels * np.exp(-(self.level**2) / 2), noise
