"""What pools of samples do, as a rule of replicas and as an error: python benchmarks/pool.py

A prototype, `_pool.py`, on the engine's own tiles. `--only` chooses one of: `coverage`, how often
its intervals hold, by the rows of `intervals.py`; `bias`, by how many standard errors the share of
steps up to the true p5, p50 and p95 is off over many keys, for n = R, 2 R and 8 R samples; `looks`,
the share of steps that the last replica decides, by how many are looked at; `cost`, CPU time.
"""

import dataclasses
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np


sys.path.insert(0, __file__.rpartition("/benchmarks/")[0])
from benchmarks import _pool, _with_engine, intervals
from benchmarks._baselines import reference_graph
from benchmarks._coverage import repeated
from benchmarks._tables import Row, options, table_of
from prism_jax import Program, simulate
from prism_jax._estimate import Estimate
from prism_jax.engine import Plain, prepare
from prism_jax.engine._run import Run
from prism_jax.law import LEVELS, QUANTILES
from prism_jax.random import key_data


def main() -> None:
    """Prints tables in Markdown."""
    kinds: Any = {"coverage": coverage_rows, "bias": bias_rows, "looks": look_rows}
    kinds["cost"] = cost_rows
    many: Any = {"nargs": "+", "type": int, "default": (1, 16, 128, 1024)}
    known: Any = {"keys": (100, "with how many keys (100)"), "replicas": many}
    known |= {"steps": (16_384, "of each simulation (16,384)"), "job": (str, "a job, by name")}
    known["only"] = {"choices": kinds, "nargs": "+", "default": tuple(kinds)}
    known["work"] = {"choices": ("reference", "sinks"), "help": "only this"}
    given = options(__doc__, **known, json=(False, "print the rows as JSON"))
    for name in given.only:
        rows = []
        for row in kinds[name](given):
            print(*row.values(), file=sys.stderr, flush=True)
            rows.append(row)
        columns = {key: f"{{{key}:.3g}}" if isinstance(x, float) else f"{{{key}}}"
                   for key, x in rows[0].items()}  # fmt: skip
        print(json.dumps(rows, indent=1) if given.json else f"{table_of(rows, columns)}\n")


def works(given: Any) -> Iterator[tuple[str, Program, dict[str, float]]]:
    """As of `intervals.py`."""
    if given.job or given.work != "sinks":
        yield from intervals.of_reference(given.job, given.replicas, given.steps)
    if not given.job and given.work != "reference":
        for number in given.replicas:
            yield "sinks", intervals.sinks_that_tie(number), intervals.truth_of_sinks(number)


def run_of(program: Program, seed: int) -> Run:
    """A run by plain samples."""
    return dataclasses.replace(prepare(program, jax.random.key(seed)), sampling=Plain())


def with_key(run: Run, seed: int) -> Run:
    """The same with another key."""
    return dataclasses.replace(run, key=key_data(jax.random.key(seed)))


def coverage_rows(given: Any) -> Iterator[Row]:
    """As of `intervals.py`; and how many replicas steps looked at."""
    for job, program, truth in works(given):
        run = run_of(program, 0)
        most = _pool.looked_at(run)
        samples = max(given.steps, _pool.SAMPLES_A_REPLICA * program.num_replicas)
        about = {"job": job, "replicas": program.num_replicas, "samples": samples, "K": most}

        def found(seed: int, run=run, most=most, samples=samples) -> intervals.Figures:
            mine = with_key(run, seed)
            pooled = _pool.simulate_pool(mine, samples=samples, steps=given.steps, most=most)
            return figures_of(pooled)

        each = repeated(found, range(given.keys))
        for name, value in truth.items():
            yield (
                about | {"figure": name, "keys": given.keys} | intervals.covered(each[name], value)
            )


def figures_of(pooled: _pool.Pooled) -> intervals.Figures:
    """The figures of a pool with their intervals; `nan` where too few groups are behind one."""
    errors, figures = _pool.errors_of(pooled.moved), pooled.moved.figures
    mean = Estimate(float(figures[0]), errors.mean, errors.mean_degrees, errors.mean_skewness)
    std = Estimate(float(figures[1]), errors.std, errors.std_degrees, errors.std_skewness)
    found = {"mean": (mean.value, *mean.interval()), "std": (std.value, *std.interval())}
    times = np.asarray(pooled.steps.times, np.float64)
    for name, q in QUANTILES.items():
        value, low, high = np.quantile(times, [q, *errors.interval_levels(q, 0.95)]).tolist()
        known = np.interp(q, LEVELS, pooled.moved.groups[2:]) >= _pool.FEWEST_GROUPS
        found[name] = (value, low, high) if known else (value, np.nan, np.nan)
    return found


def bias_rows(given: Any) -> Iterator[Row]:
    """By how many standard errors shares are off."""
    for job, program, truth in works(given):
        run, R = run_of(program, 0), program.num_replicas
        at = {name: truth[name] for name in ("p5", "p50", "p95")}
        most = _pool.looked_at(run)
        for times in (1, 2, 8):

            def shares(seed: int, run=run, size=times * R, most=most, at=at) -> np.ndarray:
                options = {"samples": size, "steps": max(512, size // 8), "most": most}
                steps = _pool.simulate_pool(with_key(run, seed), **options).steps.times
                return (np.asarray(steps)[:, None] <= np.array([*at.values()])).mean(axis=0)

            found = np.array([shares(seed) for seed in range(given.keys)])
            error = found.std(axis=0, ddof=1) / np.sqrt(given.keys)
            off = (found.mean(axis=0) - [QUANTILES[name] for name in at]) / error
            about = {"job": job, "replicas": R, "samples over R": times, "K": most}
            yield about | {"keys": given.keys} | dict(zip(at, off.tolist(), strict=True))


def look_rows(given: Any) -> Iterator[Row]:
    """The share of steps that the last replica decides, and figures over the true ones."""
    for job, program, truth in works(given):
        R, run = program.num_replicas, run_of(program, 0)
        for most in (k for k in (1, 2, 4, 8, 16, 32, 64) if k <= R):
            samples = max(given.steps, _pool.SAMPLES_A_REPLICA * R)
            found = _pool.simulate_pool(run, samples=samples, steps=given.steps, most=most)
            mean, std = found.moved.figures[:2].tolist()
            row: Row = {"job": job, "replicas": R, "K": most, "last": found.last}
            yield row | {"mean": mean / truth["mean"] - 1, "std": std / truth["std"] - 1}


def cost_rows(given: Any) -> Iterator[Row]:
    """CPU nanoseconds a step, of pools and of `simulate`."""
    steps = 2**18
    for number in given.replicas:
        program = _with_engine.program(reference_graph(), number)
        run = run_of(program, 0)

        def pooled(seed: int, run=run, number=number) -> None:
            most = min(2, number)
            _pool.simulate_pool(with_key(run, seed), samples=steps, steps=steps, most=most)

        def drawn(seed: int, run=run) -> None:
            _pool.draw(with_key(run, seed), 0, steps)

        def engine(seed: int, program=program) -> None:
            simulate(program, num_samples=steps, key=jax.random.key(seed), sampling="plain")

        parts: Any = {"draw and sort": drawn, "pool": pooled, "simulate": engine}
        yield {"replicas": number} | {name: _ns(run, steps) for name, run in parts.items()}


def _ns(run: Any, steps: int) -> float:
    run(0)
    found = []
    for seed in (1, 2, 3):
        start = time.process_time()
        run(seed)
        found.append(time.process_time() - start)
    return 1e9 * min(found) / steps


if __name__ == "__main__":
    main()
