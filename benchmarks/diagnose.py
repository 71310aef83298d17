"""Does `diagnose` find causes that are known?

    python benchmarks/diagnose.py --seeds 30           # by simulation
    python benchmarks/diagnose.py --traces --seeds 30  # by traces of jobs trained here
    python benchmarks/diagnose.py --large --seeds 10   # steps 3, 6 and 12 times as long

By simulation: 200 steps of a job with a slow rank in one replica, without overlap, with stalls, or
as predicted, times an error of the level, drawn from nine in ten of such predictions' errors. By
traces: `ddp` of `own_traces.py` with a rank that sleeps, with gradients that are reduced after the
backward, or with steps in which a rank sleeps; needs the extra `torch`. `found`: the cause is first
or among the indistinguishable. With `--large`, the outermost links, a rank, launches, or the input
make the mean step of a series of 200 that many times as long. `--json` prints a row for each cause,
factor and seed: `first`, the name of the first cause, and `not_told_apart`, those like it.
"""

import json
import pathlib
import sys
import tempfile
from typing import Any

import jax
import numpy as np


sys.path.insert(0, __file__.rpartition("/benchmarks/")[0])
import prism_jax as prism
from benchmarks.own_traces import record_jobs
from prism_jax.data import Variation, replace_variations
from prism_jax.diagnosis import diagnose, diagnose_ranks, hypotheses
from prism_jax.diagnosis._changes import EFFECTS, scenario_of, simulated
from prism_jax.prediction import expected_error, levels_of_law
from prism_jax.trace import contents, read_rank_traces
from validation.rows import with_kernels
from validation.tables import Row, Rows, by, options, table


CAUSES = ("slow-rank", "no-overlap", "stalls", "nothing")
_LARGE = ("congested-link", "slow-rank", "launch-bound", "input")
_FACTORS = (3, 6, 12)
_JOB, _STEPS = "gpt3-175b-h100-4096", 200
_TOGETHER = 24  # Jobs recorded by the same processes, as most of the time is their start.


def main() -> None:
    about = {"seeds": (30, "of each cause (30)"), "first": (0, "the first seed (0)")}
    about |= {"traces": (False, "by traces of jobs trained here"), "json": (False, "print rows")}
    about["large"] = (False, "steps that are several times as long")
    given = options(__doc__, **about)
    rows_of = _by_traces if given.traces else _large if given.large else _by_simulation
    rows = rows_of(range(given.first, given.first + given.seeds))
    if given.json:
        names = ("cause", "factor", "seed", "first", "not_told_apart", "normal")
        print(json.dumps([{name: row[name] for name in names} for row in rows]))
        return
    header = ("cause", "seeds", "found", "normal", "wrong_above_0.8", "most_wrong", "rank_named")
    print(table(header, (_sums(*one) for one in by("cause", rows).items())))


def _by_simulation(seeds: range) -> Rows:
    """A row for each cause and seed. How strong a cause is follows from the seed."""
    job: Any = prism.load_job(_JOB)
    of = hypotheses(job, key=jax.random.key(7))
    program = prism.compile_job(job)
    off = ("overlap_grad_reduce=false", "overlap_param_gather=false", "tp_overlap=false")
    late = prism.load_job(_JOB, [f"training.{text}" for text in off])

    def stalling(share: float, calls: int = 1) -> Any:
        """The program in which so many steps stall, given how many calls may stall."""
        pause = {"rate": share / calls, "median_s": 0.5, "sigma": 0.8}
        law = Variation("gemm", "stall", "lognormal", pause, "")
        laws = replace_variations(job.kernels.variability, [law])
        return prism.compile_job(with_kernels(job, variability=laws))

    calls = int(stalling(1e-9).stall_counts.sum()) * program.num_replicas
    usual = simulated(job, 8192, jax.random.key(1))
    scenarios = {"slow-rank": [prism.slow_rank(usual.run.program, 1, x) for x in (1.15, 1.3, 1.6)]}
    scenarios["no-overlap"] = [prism.Scenario(prism.compile_job(late))]
    scenarios["stalls"] = [prism.Scenario(stalling(x, calls)) for x in (0.05, 0.1)]
    scenarios["nothing"] = [prism.Scenario(program)]
    for cause, of_cause in scenarios.items():
        simulated_steps = [usual.of(scenario) for scenario in of_cause]
        for seed in seeds:
            rng = np.random.default_rng([seed, CAUSES.index(cause)])
            steps = rng.choice(simulated_steps[seed % len(of_cause)], _STEPS)
            level = float(levels_of_law(expected_error(job), rng.uniform(0.05, 0.95)))
            factor = float(np.mean(steps) / np.mean(usual.steps))
            yield _row(cause, factor, seed, diagnose(of, [steps * level]))


def _large(seeds: range) -> Rows:
    """A row for each cause, factor and seed of steps that are several times as long."""
    job: Any = prism.load_job(_JOB)
    of = hypotheses(job, key=jax.random.key(7))
    usual = simulated(job, 8192, jax.random.key(1))
    for explained in of.causes:
        for factor in _FACTORS if explained.name in _LARGE else ():
            effects = EFFECTS[: len(explained.values)]
            value = float(np.interp(factor - 1, effects, explained.values))
            for seed in seeds:
                rng = np.random.default_rng([seed, factor, _LARGE.index(explained.name)])
                if explained.name == "input":  # Waits of another law than the cause has.
                    waits = rng.lognormal(-0.08, 0.4, _STEPS) * (factor - 1) * usual.steps.mean()
                    steps = rng.choice(usual.steps, _STEPS) + waits
                else:
                    scenario = scenario_of(explained.name, value, usual)
                    assert scenario is not None
                    steps = rng.choice(usual.of(scenario), _STEPS)
                level = float(levels_of_law(expected_error(job), rng.uniform(0.05, 0.95)))
                yield _row(explained.name, factor, seed, diagnose(of, [steps * level]))
    for seed in seeds:
        rng = np.random.default_rng([seed, 1])
        level = float(levels_of_law(expected_error(job), rng.uniform(0.05, 0.95)))
        yield _row("nothing", 1, seed, diagnose(of, [rng.choice(usual.steps, _STEPS) * level]))


def _by_traces(seeds: range) -> Rows:
    """A row for each cause and seed, of jobs that are trained and traced here."""
    from benchmarks._own_jobs import OwnJob

    sound = OwnJob("ddp", 3, False, False, 30, 2, layers=3, sleep_s=0.05, bucket_mb=0.2)
    changes: dict[str, dict[str, Any]] = {"slow-rank": {"slow": True}, "no-overlap": {"late": True}}
    changes |= {"stalls": {"stalls": 3, "stall_s": 1.0}, "nothing": {}}
    pairs = [(cause, seed) for seed in seeds for cause in CAUSES]
    for start in range(0, len(pairs), _TOGETHER):
        with tempfile.TemporaryDirectory() as temporary:
            jobs = {}
            for cause, seed in pairs[start : start + _TOGETHER]:
                folder = pathlib.Path(temporary) / f"{cause}-{seed}"
                jobs[folder] = sound._replace(seed=seed, **changes[cause])
            record_jobs(jobs)
            for folder in jobs:
                ranks = contents(read_rank_traces(folder)).by_rank
                found = diagnose_ranks(prism.load_job(folder / "job.toml"), ranks)
                cause, _, seed = folder.name.rpartition("-")
                yield _row(cause, None, int(seed), found)


def _row(cause: str, factor: float | None, seed: int, found: Any) -> Row:
    alike = [one.name for one in found.causes if one.indistinguishable]
    wrong = max((one.probability for one in found.causes if one.name != cause), default=0.0)
    row = {"cause": cause, "factor": factor, "seed": seed, "found": cause in alike}
    row |= {"first": found.causes[0].name if found.causes else None, "not_told_apart": alike}
    row |= {"normal": found.normal, "wrong": wrong}
    row["rank"] = None if found.ranks is None else found.ranks.rank
    print(*row.values(), file=sys.stderr, flush=True)
    return row


def _sums(cause: str, mine: list[Row]) -> list[str]:
    """Of how many, and how often a cause is found, normal, or another is above 0.8."""
    found, normal = (sum(row[name] for row in mine) for name in ("found", "normal"))
    wrong = [row["wrong"] for row in mine]
    above, named = sum(x > 0.8 for x in wrong), sum(row["rank"] == 1 for row in mine)
    return [cause, *(f"{x:.3g}" for x in (len(mine), found, normal, above, max(wrong), named))]


if __name__ == "__main__":
    main()
