"""How often 95 % intervals over allocations of GPUs contain the truth.

    python -m benchmarks._allocation_coverage 1000   # so many repetitions

To simulate all allocations anew for each repetition would take over an hour. So a population of
allocations is simulated once, and each repetition draws some of them with replacement. These are
independent, and the truth is the law of the whole population, exactly.
"""

import jax
import numpy as np

from prism_jax.engine import prepare
from prism_jax.engine._explicit import explicit
from prism_jax.engine._pools import drawn_pools, pool_draws, pool_of, pooled_steps, room_of
from prism_jax.law import Law, counted, figures, law_of, merge_allocations, merge_chunks
from prism_jax.program import Variability
from prism_jax.schedule import OneFOneB
from tests.helpers import lognormal, made_law, pipeline_program
from validation.tables import options

from ._coverage import coverage, repeated


_POPULATION, _STEPS = 4_000, 8
_ALLOCATIONS = (4, 20, 100, 400)
_QUANTILES = {"p50": 0.5, "p95": 0.95}


def main() -> None:
    """For each number of allocations K and each figure, how often an interval that is given
    contains the truth, and how often none is."""
    repetitions = options(__doc__, repetitions={"dest": "repetitions", "type": int}).repetitions
    population = _population()
    truth = figures(merge_chunks(population), quantiles=_QUANTILES)
    for number in _ALLOCATIONS:
        rng = np.random.default_rng(number)

        def drawn(_, number=number, rng=rng):
            some = [population[i] for i in rng.integers(len(population), size=number)]
            found = figures(merge_allocations(some), quantiles=_QUANTILES)
            return {name: (value, *interval) for name, (value, interval) in found.items()}

        for name, found in repeated(drawn, range(repetitions)).items():
            held, withheld = coverage(found, truth[name][0])
            print(
                f"{f'allocations, K = {number}: {name}':<28} {held:.3f} {withheld:.3f}", flush=True
            )


def _population() -> list[Law]:
    """The laws of allocations: four replicas of one op, whose GPUs differ more than its calls."""
    laws = Variability(residual={"gemm": lognormal(0.01)}, rank=lognormal(0.03))
    program = pipeline_program(OneFOneB(1, 1), variability=laws, num_replicas=4)
    run = explicit(prepare(program, jax.random.key(0)), _POPULATION)
    draws, steps = pool_draws(run, _POPULATION * _STEPS), []
    room = room_of(run, draws)
    for drawn in drawn_pools(run, draws):
        steps.append(pooled_steps(run, (pool_of(run, drawn, 1, room),), _STEPS).of("times"))
    steps = np.stack(steps)
    about = {"program": "", "keys": ((0, 0),), "compile_s": 0.0, "run_s": 0.0}
    about |= {"requested": _STEPS, "effective_samples": float(_STEPS)}
    # The law of several allocations takes nothing from the errors of each.
    errors, population = made_law().errors, []
    for mine in steps:
        population.append(law_of(counted(mine, _STEPS, np), _STEPS, errors, **about))
    return population


if __name__ == "__main__":
    main()
