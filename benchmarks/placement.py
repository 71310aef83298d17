"""How good placements are, and how long they take.

    python benchmarks/placement.py         # tables in Markdown (some ten minutes)

Twenty jobs have random schedules, sizes, nodes and factors: the p95 of the placement found and of
the best of 1,000 random placements (chosen by 512 steps of each), on 16,384 steps that neither
search saw. Small jobs: the figure that the search minimises, and its minimum over all placements.
Large jobs: seconds for all of `place`.
"""

import itertools as it
import sys
import time
from typing import Any

import jax
import numpy as np


sys.path.insert(0, __file__.rpartition("/benchmarks/")[0])
from prism_jax import Quantile, Variability, compile_job, load_job, place
from prism_jax.analysis import bandwidth
from prism_jax.placement._exchange import search
from prism_jax.placement._placed import nodes_of, placed
from prism_jax.placement._placement import _step_times, _with_known_gpus
from prism_jax.placement._trials import Trials
from prism_jax.schedules import GPipe, InterleavedOneFOneB, OneFOneB
from tests.helpers import lognormal, pipeline_program
from validation.tables import print_parts, table


INSTANCES, RANDOM, CHOSEN_BY, FRESH = 20, 1000, 512, 16384
_SMALL = [(3, 2), (2, 3), (2, 4), (4, 2), (7, 1)]  # Ranks and replicas.
_MAIN = "gpt3-175b-h100-4096"
_SCHEDULES = {"1f1b": OneFOneB, "gpipe": GPipe}
_SCHEDULES["interleaved"] = lambda ranks, number: InterleavedOneFOneB(ranks, number, 2)


def program_of(schedule, num_replicas: int, group_size: int = 1, **options) -> Any:
    """A program whose ops vary by 3 %, and whose step and microbatches do, too."""
    laws: Any = {"rank": lognormal(0.02), "step": lognormal(0.005), "microbatch": lognormal(0.01)}
    options["variability"] = Variability(residual={"gemm": lognormal(0.03)}, **laws)
    return pipeline_program(schedule, num_replicas=num_replicas, group_size=group_size, **options)


def figures_of(found: Any) -> list[str]:
    """As given, placed, worst, and the bound."""
    figures = found.before, found.after, found.worst, found.bound
    return [f"{one.value:.4f} s" for one in figures]


def _instance(seed: int) -> tuple[tuple[Any, ...], Any, np.ndarray, int]:
    """A random job: its description, its program, the factors of its GPUs, and GPUs per node."""
    rng = np.random.default_rng(seed)
    ranks, replicas = int(rng.choice([2, 4, 8])), int(rng.choice([2, 4, 8]))
    microbatches = ranks * int(rng.choice([1, 2, 4]))
    kind = str(rng.choice(["1f1b", "gpipe", "interleaved"]))
    schedule = _SCHEDULES[kind](ranks, microbatches)
    forward = 1 + 0.3 * rng.random(schedule.num_stages)
    # Nodes of one rank of a replica, of half of one, and of two.
    group, devices = [(1, 1), (2, 1), (1, 2)][int(rng.integers(3))]
    cv = float(rng.choice([0.01, 0.03, 0.1]))
    factors = np.exp(cv * rng.standard_normal(group * replicas * ranks))
    if rng.random() < 0.3:
        factors[rng.integers(len(factors))] *= 1.3
    job = f"{kind} {ranks} x {microbatches}, {replicas} replicas"
    program = program_of(schedule, replicas, group, forward=forward, backward=2 * forward)
    return (job, len(factors) // devices, f"{cv:.0%}"), program, factors, devices


def _against_random(seed: int) -> tuple[Any, ...]:
    about, program, factors, devices = _instance(seed)
    found: Any = place(program, factors, devices_per_node=devices, key=jax.random.key(seed))
    nodes = nodes_of(program, factors, devices)
    known, p95 = _with_known_gpus(program, nodes), Quantile(0.95)
    rng = np.random.default_rng(seed)
    others = [rng.permutation(len(nodes.factors)) for _ in range(RANDOM)]
    chosen_by = placed(known, num_samples=CHOSEN_BY, key=jax.random.key(1000 + seed))
    values = [p95.value(_step_times(chosen_by, nodes, order)) for order in others]
    steps = placed(known, num_samples=FRESH, key=jax.random.key(100 + seed))
    orders = found.order, others[int(np.argmin(values))]
    ours, theirs = (_step_times(steps, nodes, order) for order in orders)
    one, other = (p95.influence(steps, bandwidth(steps, p95)) for steps in (theirs, ours))
    error = np.std(one - other) / np.sqrt(FRESH)
    less = f"{p95.value(theirs) - p95.value(ours):+.4f} +- {error:.4f} s"
    values = found.before.value, p95.value(ours), p95.value(theirs), found.bound.value
    *seconds, bound = (f"{x:.3f} s" for x in values)
    row = (*about, *seconds, less, bound)
    print(*row, sep=", ", file=sys.stderr, flush=True)  # Some take a while.
    return row


def _against_all(seed: int) -> tuple[Any, ...]:
    ranks, replicas = _SMALL[seed % len(_SMALL)]
    rng, program = np.random.default_rng(seed), program_of(OneFOneB(ranks, 4), replicas)
    nodes = nodes_of(program, np.exp(0.05 * rng.standard_normal(ranks * replicas)), 1)
    trials = Trials(_with_known_gpus(program, nodes), nodes, Quantile(0.95), jax.random.key(seed))
    found = float(trials.values([search(trials)])[0])
    every = [np.array(order) for order in it.permutations(range(ranks * replicas))]
    best = float(trials.values(every).min())
    job = f"1f1b {ranks} x 4, {replicas} replicas"
    return job, f"{len(every):,}", f"{found:.6f} s", f"{best:.6f} s"


def _timed(name: str, program) -> tuple[Any, ...]:
    factors = np.exp(0.02 * np.random.default_rng(0).standard_normal(8192))
    start = time.perf_counter()
    found = place(program, factors, devices_per_node=8, key=jax.random.key(0))
    seconds = time.perf_counter() - start
    return name, f"{program.num_ops:,}", f"{seconds:.0f}", *figures_of(found)


_RANDOM = ("job", "nodes", "CV", "as given", "placed", "best of 1,000", "lower by", "bound")
_ALL = ("small job", "placements", "found", "best of all")


def _large_table() -> str:
    jobs = {"1f1b 8 x 32, 128 replicas of 8 GPUs": program_of(OneFOneB(8, 32), 128, 8)}
    jobs["1f1b 16 x 64, 64 replicas of 8 GPUs"] = program_of(OneFOneB(16, 64), 64, 8)
    main = load_job(_MAIN, ["layout.dp=256", "num_nodes=1024"])
    jobs[f"{_MAIN} with layout.dp=256"] = compile_job(main)
    header = ("large job", "ops", "seconds", "as given", "placed", "worst", "bound")
    return table(header, it.starmap(_timed, jobs.items()))


if __name__ == "__main__":
    parts = {"random": lambda: table(_RANDOM, map(_against_random, range(INSTANCES)))}
    parts["small"] = lambda: table(_ALL, map(_against_all, range(2 * len(_SMALL))))
    print_parts(__doc__, parts | {"large": _large_table})
