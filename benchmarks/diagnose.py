"""Does `diagnose` find causes that are known?

    python benchmarks/diagnose.py --seeds 30           # by simulation; --json for one object
    python benchmarks/diagnose.py --traces --seeds 30  # by traces of jobs trained here

By simulation: 200 steps of a job with a slow rank in one replica, without overlap, with stalls, or
as predicted, times an error of the level, drawn from nine in ten of such predictions' errors. By
traces: `ddp` of `own_traces.py` with a rank that sleeps, with gradients that are reduced after the
backward, or with steps in which a rank sleeps; needs the extra `torch`. `found`: the cause is first
or among the indistinguishable.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np


ROOT = pathlib.Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

CAUSES = ("slow-rank", "no-overlap", "stalls", "nothing")
_JOB, _STEPS = "gpt3-175b-h100-4096", 200
_TOGETHER = 24  # Jobs recorded by the same processes, as most of the time is their start.


def main() -> None:
    parser = argparse.ArgumentParser(description="Known causes, diagnosed.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--seeds", type=int, default=30, help="of each cause (30)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (0)")
    parser.add_argument("--traces", action="store_true", help="by traces of jobs trained here")
    parser.add_argument("--job", default=_JOB, help=f"the simulated job ({_JOB})")
    given = parser.parse_args()
    seeds = range(given.first, given.first + given.seeds)
    rows = [*(by_traces(seeds) if given.traces else by_simulation(seeds, given.job))]
    found = {"by": "traces" if given.traces else "simulation", "causes": summary(rows)}
    print(json.dumps(found) if given.json else table(found["causes"]))


def by_simulation(seeds: range, name: str) -> Iterator[dict[str, Any]]:
    """A row for each cause and seed. How strong a cause is follows from the seed."""
    import jax
    import msgspec

    import prism_jax as prism
    from prism_jax.data import Variation, replace_variations
    from prism_jax.diagnosis import diagnose, hypotheses
    from prism_jax.diagnosis._causes import simulated
    from prism_jax.prediction import expected_error, levels_of_law
    from prism_jax.program import parts_of

    job = prism.load_job(name)
    of = hypotheses(job, key=jax.random.key(7))
    program = prism.compile_job(job)
    off = ("overlap_grad_reduce=false", "overlap_param_gather=false", "tp_overlap=false")
    late = prism.load_job(name, [f"training.{text}" for text in off])

    def stalling(share: float, calls: int = 1) -> Any:
        """The program in which so many steps stall, given how many calls may stall."""
        pause = {"rate": share / calls, "median_s": 0.5, "sigma": 0.8}
        law, kernels = Variation("gemm", "stall", "lognormal", pause, ""), parts_of(job)[3]
        laws = replace_variations(kernels.variability, [law])
        kernels = msgspec.structs.replace(kernels, variability=laws)
        return prism.compile_job(msgspec.structs.replace(job, kernels=kernels))

    calls = int(stalling(1e-9).stall_counts.value.sum()) * program.num_replicas
    usual = simulated(job, 8192, jax.random.key(1))
    scenarios = {
        "slow-rank": [prism.slow_rank(usual.run.program, 1, x) for x in (1.15, 1.3, 1.6)],
        "no-overlap": [prism.Scenario(prism.compile_job(late))],
        "stalls": [prism.Scenario(stalling(x, calls)) for x in (0.05, 0.1)],
        "nothing": [prism.Scenario(program)],
    }
    for cause, of_cause in scenarios.items():
        simulated_steps = [usual.of(scenario) for scenario in of_cause]
        for seed in seeds:
            rng = np.random.default_rng([seed, CAUSES.index(cause)])
            steps = rng.choice(simulated_steps[seed % len(of_cause)], _STEPS)
            level = float(levels_of_law(expected_error(job), rng.uniform(0.05, 0.95)))
            yield _row(cause, diagnose(of, [steps * level]))


def by_traces(seeds: range) -> Iterator[dict[str, Any]]:
    """A row for each cause and seed, of jobs that are trained and traced here."""
    from benchmarks._own_jobs import OwnJob
    from benchmarks.own_traces import record_jobs
    from prism_jax import load_job
    from prism_jax.diagnosis import diagnose_ranks
    from prism_jax.trace import rank_times, read_ranks

    sound = OwnJob("ddp", 3, False, False, 30, 2, layers=3, sleep_s=0.05, bucket_mb=0.2)
    changes: dict[str, dict[str, Any]] = {"slow-rank": {"slow": True}, "no-overlap": {"late": True}}
    changes |= {"stalls": {"stalls": 3, "stall_s": 1.0}, "nothing": {}}
    pairs = [(cause, seed) for seed in seeds for cause in CAUSES]
    for start in range(0, len(pairs), _TOGETHER):
        with tempfile.TemporaryDirectory() as temporary:
            jobs = {}
            for cause, seed in pairs[start : start + _TOGETHER]:
                job = dataclasses.replace(sound, seed=seed, **changes[cause])
                jobs[pathlib.Path(temporary) / f"{cause}-{seed}"] = job
            record_jobs(jobs)
            for folder in jobs:
                times = rank_times(read_ranks(folder))
                found = diagnose_ranks(load_job(folder / "job.toml"), times)
                yield _row(folder.name.rpartition("-")[0], found)


def _row(cause: str, found: Any) -> dict[str, Any]:
    of = {one.name: round(one.probability, 3) for one in found.causes}
    alike = [one.name for one in found.causes if one.indistinguishable]
    wrong = [one.probability for one in found.causes if one.name != cause]
    rank = None if found.ranks is None else found.ranks.rank
    row = {"cause": cause, "normal": found.normal, "rank": rank, "wrong": max(wrong, default=0.0)}
    row |= {"found": cause in alike, "first": next(iter(of), ""), "nothing": found.nothing}
    row["of"] = of
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


def summary(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Of each cause: how often it is found, normal, or another is above 0.8."""
    found = {}
    for cause in CAUSES:
        mine = [row for row in rows if row["cause"] == cause]
        found[cause] = {
            "seeds": len(mine),
            "found": sum(row["found"] for row in mine),
            "normal": sum(row["normal"] for row in mine),
            "wrong_above_0.8": sum(row["wrong"] > 0.8 for row in mine),
            "most_wrong": max((row["wrong"] for row in mine), default=0.0),
            "rank_named": sum(row["rank"] == 1 for row in mine),
        }
    return found


def table(causes: dict[str, dict[str, Any]]) -> str:
    """A table in Markdown."""
    names = [*next(iter(causes.values()))]
    rows = [["cause", *names], ["---"] * (len(names) + 1)]
    rows += [[cause, *(f"{x:.3g}" for x in of.values())] for cause, of in causes.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    main()
