"""The effects of variability that PRISM (arXiv:2510.15596) reports, measured on shipped jobs.

    python benchmarks/findings.py              # tables in Markdown (some ten minutes)
    python benchmarks/findings.py --prism      # its headlines, and those of its neighbours

The share of a group of parts in the spread of the step time is its Shapley value among two groups,
this group and all other parts: the mean of the gain of removing it first and of removing it last.
"""

import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from scipy.stats import spearmanr


sys.path.insert(0, __file__.rpartition("/benchmarks/")[0])
import prism_jax as prism
from benchmarks.placement import figures_of, program_of
from prism_jax.analysis._figure import figure
from prism_jax.analysis._knobs import ELEMENTARY, varied, varying_parts
from prism_jax.cluster import COLLECTIVES
from tests import test_trends as toy
from validation.prism import NAMES, headlines_text
from validation.tables import options, table, use_all_cores


JOBS = ("gpt3-175b-h100-4096", "gpt3-175b-h100-768", "megatron-175b-a100-64")
_PLACED = ("megatron-175b-a100-64", "gpt3-175b-h100-768")
_SPREADS = (0.02, 0.05, 0.1, 0.14)


def _sampled() -> Any:
    return {"num_samples": 40_000, "key": jax.random.key(0)}


def communication() -> str:
    """The share of communication kernels and of the network in the spread of a job's step, with
    all of their own noise made wider."""
    header = ("job", "noise of communication", "p95", "spread", "share of p95", "share of spread")
    return table(header, (_communication(job, by) for job in JOBS for by in (1, 3, 10)))


def _communication(job: str, wider: float) -> tuple[str, ...]:
    program = prism.compile_job(prism.load_job(job))
    groups = varying_parts(program)
    parts = {name for group in ELEMENTARY for name in groups[group]}
    kernels = {name for name in parts if name.removeprefix("stalls of ") in COLLECTIVES}
    mine = {*kernels, "send_recv", "network"} & parts
    own = mine - {"network"}

    def of(without: set[str]) -> np.ndarray:
        """The spread and p95."""
        factors = dict.fromkeys(own, wider) | dict.fromkeys(without, 0.0)
        changed = varied(program, factors)
        value, simulated, _ = figure(changed, prism.Std(), **_sampled())
        return np.array([value, prism.Quantile(0.95).value(simulated.steps)])

    whole, rest, alone, none = of(set()), of(mine), of(parts - mine), of(parts)
    of_std, of_p95 = ((whole - rest) + (alone - none)) / (2 * (whole - none))
    shares = f"{of_p95:.0%}", f"{of_std:.0%}"
    return job, f"x {wider:g}", f"{whole[1]:.4f} s", f"{1e3 * whole[0]:.2f} ms", *shares


def ranks() -> str:
    """Kernels by their coefficient of variation, and by the cost of their variability at p95."""
    header = ("job", "kernels", "rank correlation", "p", "highest CV", "highest cost at p95")
    return table(header, map(_ranks, JOBS))


def _ranks(job: str) -> tuple[Any, ...]:
    program = prism.compile_job(prism.load_job(job))
    parts = prism.sensitivity(program, prism.Quantile(0.95), parts=[], **_sampled()).parts
    cost = {one.name: one.spread.value for one in parts if one.group == "kernel" and one.spread}
    laws = program.variability.residual
    cv = {kind: float(np.sqrt(law.variance()) / law.mean()) for kind, law in laws.items()}
    kinds = [kind for kind in cost if cv.get(kind)]
    found: Any = spearmanr([cv[kind] for kind in kinds], [cost[kind] for kind in kinds])
    first = (sorted(kinds, key=lambda kind: -of[kind])[:3] for of in (cv, cost))
    figures = f"{found.statistic:+.2f}", f"{found.pvalue:.2f}"
    return job, len(kinds), *figures, *map(", ".join, first)


def slow_stages() -> str:
    """By how much p95 rises in percent, for a slow stage at each position."""
    law = prism.latency.Normal(1.0, 0.02)
    at = toy._program_of_costs(16, prism.Variability(residual={"gemm": law}))
    options: Any = _sampled() | {"num_samples": 1_000_000}
    cells = []
    for last, others in ((1.0, toy._EVEN), (1.1, toy._HEAVY_END)):
        stages = (None, *range(8))
        even, *laws = (prism.simulate(at(toy._slow(one, 1.2, last)), **options) for one in stages)
        base = even.quantile(0.95)
        low, high = laws[0].quantile_interval(0.95)
        error = 100 * float(np.hypot(1, 1) * (high - low) / 3.92 / base)
        rises = (f"{100 * (law.quantile(0.95) / base - 1):.2f}" for law in laws)
        cells.append((f"x {last}", "another program", *(f"{x:.1f}" for x in others)))
        cells.append((f"x {last}", f"found +- {error:.3f}", *rises))
    return table(("last stage", "source", *(f"stage {i}" for i in range(8))), cells)


def placements() -> str:
    """The gain of placement for several kinds of nodes."""
    header = ("job", "nodes", "as given", "placed", "worst", "bound", "worst over placed")
    return table(header, _placements())


def _placements() -> Iterator[tuple[str, ...]]:
    even = [(f"normal, CV {cv:.0%}", cv, 1.0) for cv in _SPREADS]
    even += [(f"one node {factor} times slower", 0.0, factor) for factor in (1.2, 1.35, 2.0)]
    cases = [(name, prism.compile_job(prism.load_job(name)), even) for name in _PLACED]
    # A pipeline whose last stage takes longer, so that it matters who runs it.
    for last in (1.1, 1.26, 1.5):
        forward = np.array([1.0] * 7 + [last])
        schedule, costs = prism.schedules.OneFOneB(8, 64), {"forward": forward}
        program = program_of(schedule, 4, 8, backward=2 * forward, **costs)
        nodes = [(f"one node x {factor}", 0.0, factor) for factor in (1.1, 1.26, 1.5)]
        cases.append((f"1f1b 8 x 64, 4 replicas, last stage x {last}", program, nodes))
    for name, program, nodes in cases:
        number = program.group_size * program.num_replicas * program.num_ranks // 8
        for label, cv, factor in nodes:
            factors = np.exp(cv * np.random.default_rng(0).standard_normal(number))
            factors[0] *= factor
            found = prism.place(program, factors, devices_per_node=8, key=jax.random.key(0))
            gain = f"{found.worst.value / found.after.value:.3f}"
            yield name, label, *figures_of(found), gain


if __name__ == "__main__":
    parts = {one.__name__: one for one in (communication, ranks, slow_stages, placements)}
    only: dict[str, Any] = {"choices": [*parts, *NAMES], "help": "one table or headline only"}
    given = options(__doc__, prism=(False, "headlines, as docs/prism.md has them"), only=only)
    use_all_cores()
    if given.prism or given.only in NAMES:
        print(headlines_text(given.only))
    else:
        for name, text_of in parts.items():
            if given.only in (None, name):
                print(text_of(), end="\n\n", flush=True)
