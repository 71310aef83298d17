"""How good placements are, and how long they take.

    python benchmarks/placement.py         # tables in Markdown (some ten minutes)
    python benchmarks/placement.py --json  # one JSON object

Twenty jobs have random schedules, sizes, nodes and factors: the p95 of the placement found and of
the best of 1,000 random placements (chosen by 512 steps of each), on 16,384 steps that neither
search saw. Small jobs: the figure that the search minimises, and its minimum over all placements.
Large jobs: seconds for all of `place`.
"""

import argparse
import itertools as it
import json
import os
import pathlib
import sys
import time
from typing import Any

import numpy as np


ROOT = pathlib.Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

INSTANCES = 20
RANDOM = 1000
CHOSEN_BY = 512
FRESH = 16384


def program_of(schedule, num_replicas: int, group_size: int = 1, **options) -> Any:
    """A program whose ops vary by 3 %, and whose step and microbatches do, too."""
    from prism_jax.program import Variability
    from tests.helpers import lognormal, pipeline_program

    variability = Variability(
        residual={"gemm": lognormal(0.03)},
        rank=lognormal(0.02),
        step=lognormal(0.005),
        microbatch=lognormal(0.01),
    )
    return pipeline_program(
        schedule,
        variability=variability,
        num_replicas=num_replicas,
        group_size=group_size,
        **options,
    )


def instance(seed: int) -> tuple[dict[str, Any], Any, np.ndarray, int]:
    """A random job: its description, its program, the factors of its GPUs, and GPUs per node."""
    from prism_jax.schedule import GPipe, InterleavedOneFOneB, OneFOneB

    rng = np.random.default_rng(seed)
    ranks, replicas = int(rng.choice([2, 4, 8])), int(rng.choice([2, 4, 8]))
    microbatches = ranks * int(rng.choice([1, 2, 4]))
    kind = str(rng.choice(["1f1b", "gpipe", "interleaved"]))
    schedule = {
        "1f1b": lambda: OneFOneB(ranks, microbatches),
        "gpipe": lambda: GPipe(ranks, microbatches),
        "interleaved": lambda: InterleavedOneFOneB(ranks, microbatches, 2),
    }[kind]()
    forward = 1 + 0.3 * rng.random(schedule.num_stages)
    # Nodes of one rank of a replica, of half of one, and of two.
    group, devices = [(1, 1), (2, 1), (1, 2)][int(rng.integers(3))]
    cv = float(rng.choice([0.01, 0.03, 0.1]))
    factors = np.exp(cv * rng.standard_normal(group * replicas * ranks))
    if rng.random() < 0.3:
        factors[rng.integers(len(factors))] *= 1.3
    about = {
        "instance": seed,
        "job": f"{kind} {ranks} x {microbatches}, {replicas} replicas",
        "nodes": len(factors) // devices,
        "cv": cv,
    }
    program = program_of(schedule, replicas, group, forward=forward, backward=2 * forward)
    return about, program, factors, devices


def against_random(seed: int) -> dict[str, Any]:
    import jax

    from prism_jax.analysis import Quantile, bandwidth
    from prism_jax.placement import place
    from prism_jax.placement._nodes import nodes_of
    from prism_jax.placement._placed import placed
    from prism_jax.placement._placement import _step_times, _with_known_gpus

    about, program, factors, devices = instance(seed)
    key = jax.random.key(seed)
    found = place(program, factors, devices_per_node=devices, key=key)
    nodes = nodes_of(program, factors, devices)
    known = _with_known_gpus(program, nodes)
    p95 = Quantile(0.95)
    rng = np.random.default_rng(seed)
    others = [rng.permutation(len(nodes.factors)) for _ in range(RANDOM)]
    chosen_by = placed(known, num_samples=CHOSEN_BY, key=jax.random.key(1000 + seed))
    values = np.array([p95.value(_step_times(chosen_by, nodes, order)) for order in others])
    steps = placed(known, num_samples=FRESH, key=jax.random.key(100 + seed))
    ours, theirs = (
        _step_times(steps, nodes, order) for order in (found.order, others[int(values.argmin())])
    )
    one, other = (p95.influence(steps, bandwidth(steps)) for steps in (theirs, ours))
    influence = one - other
    row = {
        **about,
        "before": found.before.value,
        "placed": p95.value(ours),
        "best_random": p95.value(theirs),
        "less": p95.value(theirs) - p95.value(ours),
        "less_error": float(np.std(influence) / np.sqrt(FRESH)),
        "bound": found.bound.value if found.bound else None,
    }
    print(json.dumps(row), file=sys.stderr, flush=True)  # Some take a while.
    return row


def against_all(seed: int) -> dict[str, Any]:
    import jax

    from prism_jax.analysis import Quantile
    from prism_jax.placement._exchange import search
    from prism_jax.placement._nodes import nodes_of
    from prism_jax.placement._placement import _with_known_gpus
    from prism_jax.placement._trials import Trials
    from prism_jax.schedule import OneFOneB

    ranks, replicas = [(3, 2), (2, 3), (2, 4), (4, 2), (7, 1)][seed % 5]
    rng = np.random.default_rng(seed)
    program = program_of(OneFOneB(ranks, 4), replicas)
    nodes = nodes_of(program, np.exp(0.05 * rng.standard_normal(ranks * replicas)), 1)
    known = _with_known_gpus(program, nodes)
    trials = Trials(known, nodes, Quantile(0.95), jax.random.key(seed))
    found = float(trials.values([search(trials)])[0])
    every = [np.array(order) for order in it.permutations(range(ranks * replicas))]
    return {
        "job": f"1f1b {ranks} x 4, {replicas} replicas",
        "placements": len(every),
        "found": found,
        "best": float(trials.values(every).min()),
    }


def large() -> list[dict[str, Any]]:
    import jax

    from prism_jax import load_job
    from prism_jax.placement import place
    from prism_jax.program import compile_job
    from prism_jax.schedule import OneFOneB

    jobs = {
        "1f1b 8 x 32, 128 replicas of 8 GPUs": lambda: program_of(OneFOneB(8, 32), 128, 8),
        "1f1b 16 x 64, 64 replicas of 8 GPUs": lambda: program_of(OneFOneB(16, 64), 64, 8),
        "gpt3-175b-h100-4096 with layout.dp=256": lambda: compile_job(
            load_job("gpt3-175b-h100-4096", ["layout.dp=256", "num_nodes=1024"])
        ),
    }
    rows = []
    for name, make in jobs.items():
        program = make()
        rng = np.random.default_rng(0)
        factors = np.exp(0.02 * rng.standard_normal(8192))
        start = time.perf_counter()
        found = place(program, factors, devices_per_node=8, key=jax.random.key(0))
        seconds = time.perf_counter() - start
        row = {"job": name, "ops": program.num_ops, "ranks": 8192, "seconds": seconds}
        figures = ("before", "after", "gain", "worst", "bound")
        row |= {name: getattr(found, name).value for name in figures}
        rows.append(row | {"placements": found.num_placements})
    return rows


def table(result: dict[str, Any]) -> str:
    lines = ["| job | nodes | CV | as given | placed | best of 1,000 | lower by | bound |"]
    lines.append("|" + "---|" * 8)
    lines += [
        f"| {r['job']} | {r['nodes']} | {r['cv']:.0%} | {r['before']:.3f} s | {r['placed']:.3f} s |"
        f" {r['best_random']:.3f} s | {r['less']:+.4f} +- {r['less_error']:.4f} s | "
        f"{r['bound']:.3f} s |"
        for r in result["random"]
    ]
    lines += ["", "| small job | placements | found | best of all |", "|" + "---|" * 4]
    lines += [
        f"| {r['job']} | {r['placements']:,} | {r['found']:.6f} s | {r['best']:.6f} s |"
        for r in result["small"]
    ]
    lines += ["", "| large job | ops | seconds | as given | placed | worst | bound |"]
    lines.append("|" + "---|" * 7)
    lines += [
        f"| {r['job']} | {r['ops']:,} | {r['seconds']:.0f} | {r['before']:.4f} s | "
        f"{r['after']:.4f} s | {r['worst']:.4f} s | {r['bound']:.4f} s |"
        for r in result["large"]
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Placements against random ones, and all.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--only", choices=["random", "small", "large"], help="one table only")
    arguments = parser.parse_args()

    import jax

    jax.config.update("jax_num_cpu_devices", os.cpu_count() or 1)
    parts = {
        "large": large,
        "small": lambda: [against_all(seed) for seed in range(10)],
        "random": lambda: [against_random(seed) for seed in range(INSTANCES)],
    }
    chosen = [arguments.only] if arguments.only else [*parts]
    result = {name: parts[name]() if name in chosen else [] for name in parts}
    print(json.dumps(result) if arguments.json else table(result))


if __name__ == "__main__":
    main()
