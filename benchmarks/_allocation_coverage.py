"""How often 95 % intervals over allocations of GPUs contain the truth.

    python -m benchmarks._allocation_coverage 1000   # so many repetitions

To simulate all allocations anew for each repetition would take over an hour. So a population of
allocations is simulated once, and each repetition draws some of them with replacement. These are
independent, and the truth is the law of the whole population, exactly.
"""

import dataclasses
import sys

import jax
import numpy as np

from prism_jax.engine import prepare
from prism_jax.engine._explicit import Explicit
from prism_jax.engine._run import all_draws, decided_chunks, errors_of, step_times
from prism_jax.law import Accumulator, Law, figures, grid_of, merge_allocations, merge_chunks
from prism_jax.program import Variability
from prism_jax.schedule import OneFOneB
from tests.helpers import lognormal, pipeline_program


_POPULATION, _STEPS = 4_000, 8
_ALLOCATIONS = (4, 20, 100, 400)
_QUANTILES = {"p50": 0.5, "p95": 0.95}


def main(repetitions: int) -> None:
    """For each number of allocations K and each figure, how often an interval that is given
    contains the truth, and how often none is."""
    population = _population()
    truth = figures(merge_chunks(population), quantiles=_QUANTILES)
    for number in _ALLOCATIONS:
        rng = np.random.default_rng(number)
        held: dict[str, list[bool]] = {name: [] for name in truth}
        for _ in range(repetitions):
            drawn = [population[i] for i in rng.integers(len(population), size=number)]
            found = figures(merge_allocations(drawn), quantiles=_QUANTILES)
            for name, (_, (low, high)) in found.items():
                if low == low:
                    held[name].append(low <= truth[name][0] <= high)
        for name, mine in held.items():
            coverage = np.mean(mine) if mine else np.nan
            label = f"allocations, K = {number}: {name}"
            print(f"{label:<28} {coverage:.3f} {1 - len(mine) / repetitions:.3f}", flush=True)


def _population() -> list[Law]:
    """The laws of allocations: four replicas of one op, whose GPUs differ more than its calls."""
    laws = Variability(residual={"gemm": lognormal(0.01)}, rank=lognormal(0.03))
    program = pipeline_program(OneFOneB(1, 1), variability=laws, num_replicas=4)
    run = dataclasses.replace(prepare(program, jax.random.key(0)), sampling=Explicit(_POPULATION))
    chunks = list(decided_chunks(run, all_draws(run, _POPULATION * _STEPS)))
    steps = np.concatenate(list(step_times(run, chunks))).reshape(_POPULATION, _STEPS)
    errors = errors_of(chunks[0].decision, steps[0].copy())
    about = {"program": "", "keys": ((0, 0),), "compile_s": 0.0, "run_s": 0.0}
    grid, population = grid_of(steps.ravel()), []
    for mine in steps:
        accumulator = Accumulator(grid)
        accumulator.add(mine)
        law = accumulator.law(errors, requested=_STEPS, effective_samples=float(_STEPS), **about)
        population.append(law)
    return population


if __name__ == "__main__":
    main(int(sys.argv[1]))
