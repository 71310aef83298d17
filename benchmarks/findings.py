"""The effects of variability that PRISM (arXiv:2510.15596) reports, measured on shipped jobs.

    python benchmarks/findings.py         # tables in Markdown (some ten minutes)
    python benchmarks/findings.py --json  # one JSON object

The share of a group of parts in the spread of the step time is its Shapley value among two groups,
this group and all other parts: the mean of the gain of removing it first and of removing it last.
"""

import argparse
import json
import os
import pathlib
import sys
from typing import Any

import numpy as np


ROOT = pathlib.Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

JOBS = ("gpt3-175b-h100-4096", "gpt3-175b-h100-768", "megatron-175b-a100-64")
SAMPLES = 40_000
_PLACED = ("megatron-175b-a100-64", "gpt3-175b-h100-768")
_SPREADS = (0.02, 0.05, 0.1, 0.14)


def communication(job: str, wider: float) -> dict[str, Any]:
    """The share of communication kernels and of the network in the spread of a job's step, with
    all of their own noise made wider."""
    import jax

    from prism_jax import Quantile, Std, load_job
    from prism_jax.analysis._estimate import figure
    from prism_jax.analysis._knobs import ELEMENTARY, apply_knobs, neutral, parts_of, scaled
    from prism_jax.cluster import COLLECTIVES
    from prism_jax.program import compile_job

    program = compile_job(load_job(job))
    ones = neutral(program)
    parts = {name for name, (field, _) in parts_of(ones).items() if field in ELEMENTARY}
    kernels = {name for name in parts if name.removeprefix("stalls of ") in COLLECTIVES}
    mine = {*kernels, "send_recv", "network"} & parts
    own = mine - {"network"}

    def of(without: set[str]) -> dict[str, float]:
        factors = {name: 0.0 if name in without else wider for name in own}
        factors |= dict.fromkeys(without, 0.0)
        changed = apply_knobs(program, scaled(ones, factors))
        options: dict[str, Any] = {"num_samples": SAMPLES, "key": jax.random.key(0)}
        value, simulated, _ = figure(changed, Std(), **options)
        return {"std": value, "p95": Quantile(0.95).value(simulated.steps)}

    whole, rest, alone, none = of(set()), of(mine), of(parts - mine), of(parts)
    share = {
        name: ((whole[name] - rest[name]) + (alone[name] - none[name]))
        / (2 * (whole[name] - none[name]))
        for name in whole
    }
    return {"job": job, "wider": wider, **whole, "share_std": share["std"], "share": share["p95"]}


def ranks(job: str) -> dict[str, Any]:
    """Kernels by their coefficient of variation, and by the cost of their variability at p95."""
    import jax
    from scipy.stats import spearmanr

    from prism_jax import Quantile, load_job, sensitivity
    from prism_jax.program import compile_job

    program = compile_job(load_job(job))
    found = sensitivity(
        program, Quantile(0.95), num_samples=SAMPLES, key=jax.random.key(0), parts=[]
    )
    cost = {
        part.name: part.spread.value
        for part in found.parts
        if part.group == "kernel" and part.spread
    }
    laws = program.variability.residual
    cv = {kind: float(np.sqrt(law.variance()) / law.mean()) for kind, law in laws.items()}
    kinds = [kind for kind in cost if cv.get(kind)]
    correlation: Any = spearmanr([cv[kind] for kind in kinds], [cost[kind] for kind in kinds])
    return {
        "job": job,
        "kernels": len(kinds),
        "correlation": float(correlation.statistic),
        "p": float(correlation.pvalue),
        "by_cv": sorted(kinds, key=lambda kind: -cv[kind])[:3],
        "by_cost": sorted(kinds, key=lambda kind: -cost[kind])[:3],
        "cost": {kind: cost[kind] for kind in kinds},
        "cv": {kind: cv[kind] for kind in kinds},
    }


def slow_stages() -> list[dict[str, Any]]:
    """By how much p95 rises in percent, for a slow stage at each position."""
    import jax

    from prism_jax import simulate
    from prism_jax.latency import Normal
    from prism_jax.program import Variability
    from tests import test_trends as toy

    at = toy._program_of_costs(16, Variability(residual={"gemm": Normal(1.0, 0.02)}))
    rows = []
    for last, reported in ((1.0, toy._EVEN), (1.1, toy._HEAVY_END)):
        laws = [
            simulate(at(toy._slow(stage, 1.2, last)), num_samples=1_000_000, key=jax.random.key(0))
            for stage in (None, *range(8))
        ]
        p95 = [law.quantile(0.95) for law in laws]
        low, high = laws[1].quantile_interval(0.95)
        rows.append(
            {
                "last_stage": last,
                "reported": reported,
                "found": [100 * (x / p95[0] - 1) for x in p95[1:]],
                "error": 100 * float(np.hypot(1, 1) * (high - low) / 3.92 / p95[0]),
            }
        )
    return rows


def placements() -> list[dict[str, Any]]:
    """The gain of placement for several kinds of nodes."""
    import jax

    from benchmarks.placement import program_of
    from prism_jax import load_job, place
    from prism_jax.program import compile_job
    from prism_jax.schedule import OneFOneB

    programs = {name: compile_job(load_job(name)) for name in _PLACED}
    cases = [(name, f"normal, CV {cv:.0%}", cv, 1.0) for name in _PLACED for cv in _SPREADS]
    cases += [
        (name, f"one node {f} times slower", 0.0, f) for name in _PLACED for f in (1.2, 1.35, 2.0)
    ]
    # A pipeline whose last stage takes longer, so that it matters who runs it.
    for last in (1.1, 1.26, 1.5):
        name = f"1f1b 8 x 64, 4 replicas, last stage x {last}"
        forward = np.array([1.0] * 7 + [last])
        programs[name] = program_of(OneFOneB(8, 64), 4, 8, forward=forward, backward=2 * forward)
        cases += [(name, f"one node x {factor}", 0.0, factor) for factor in (1.1, 1.26, 1.5)]
    rows = []
    for name, label, cv, factor in sorted(cases, key=lambda case: [*programs].index(case[0])):
        program = programs[name]
        number = program.group_size * program.num_replicas * program.num_ranks // 8
        factors = np.exp(cv * np.random.default_rng(0).standard_normal(number))
        factors[0] *= factor
        found = place(program, factors, devices_per_node=8, key=jax.random.key(0))
        rows.append(
            {
                "job": name,
                "factors": label,
                "before": found.before.value,
                "placed": found.after.value,
                "worst": found.worst.value,
                "bound": found.bound.value if found.bound else None,
                "gain": found.worst.value / found.after.value,
            }
        )
    return rows


def table(result: dict[str, Any]) -> str:
    lines = ["| job | noise of communication | p95 | spread | share of p95 | share of spread |"]
    lines.append("|" + "---|" * 6)
    lines += [
        f"| {r['job']} | x {r['wider']:g} | {r['p95']:.4f} s | {1e3 * r['std']:.2f} ms | "
        f"{r['share']:.0%} | {r['share_std']:.0%} |"
        for r in result["communication"]
    ]
    lines += ["", "| job | kernels | rank correlation | p | highest CV | highest cost at p95 |"]
    lines.append("|" + "---|" * 6)
    lines += [
        f"| {r['job']} | {r['kernels']} | {r['correlation']:+.2f} | {r['p']:.2f} | "
        f"{', '.join(r['by_cv'])} | {', '.join(r['by_cost'])} |"
        for r in result["ranks"]
    ]
    lines += ["", "| last stage | source | " + " | ".join(f"stage {i}" for i in range(8)) + " |"]
    lines.append("|" + "---|" * 10)
    for r in result["slow_stages"]:
        for label, row in (("reported", r["reported"]), ("found", r["found"])):
            cells = " | ".join(f"{x:.{1 if label == 'reported' else 2}f}" for x in row)
            error = f" +- {r['error']:.3f}" if label == "found" else ""
            lines.append(f"| x {r['last_stage']} | {label}{error} | {cells} |")
    lines += ["", "| job | nodes | as given | placed | worst | bound | worst over placed |"]
    lines.append("|" + "---|" * 7)
    lines += [
        f"| {r['job']} | {r['factors']} | {r['before']:.4f} s | {r['placed']:.4f} s | "
        f"{r['worst']:.4f} s | {r['bound']:.4f} s | {r['gain']:.3f} |"
        for r in result["placements"]
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="PRISM's findings, on shipped jobs.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parts = {
        "communication": lambda: [communication(job, by) for job in JOBS for by in (1, 3, 10)],
        "ranks": lambda: [ranks(job) for job in JOBS],
        "slow_stages": slow_stages,
        "placements": placements,
    }
    parser.add_argument("--only", choices=list(parts), help="one table only")
    arguments = parser.parse_args()

    import jax

    jax.config.update("jax_num_cpu_devices", os.cpu_count() or 1)
    chosen = [arguments.only] if arguments.only else [*parts]
    result = {name: parts[name]() if name in chosen else [] for name in parts}
    print(json.dumps(result) if arguments.json else table(result))


if __name__ == "__main__":
    main()
