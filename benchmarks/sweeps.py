"""How long a sweep over many points takes: python benchmarks/sweeps.py [--points N] [--json]

Points differ in a spread, so that all share their compiled code. Prints, for each program,

- `seconds`: those of the whole sweep, compilation included, on all cores;
- `host_s`: of these the seconds of the host where devices take no time, as in `host_part.py`, as
    many for each row as after the first 16, for which all is traced;
- `equal`: whether the mean and p95 of three points are those of `simulate` with plain sampling.
"""

import json
import multiprocessing
import sys
import time
from collections.abc import Iterator
from typing import Any


sys.path.insert(0, __file__.rpartition("/benchmarks/")[0])
from validation.tables import Row, options, table_of, use_all_cores


_PROGRAMS = ("gpt3-175b-h100-4096", "megatron-22b-a100-8")
_SAMPLES, _PARAMETER = 1000, "variability.step.sigma"
_FEW = 16


def main() -> None:
    """Prints a table in Markdown."""
    given = options(
        __doc__, points=(1000, "how many points"), json=(False, "print the rows as JSON")
    )
    rows = list(sweep_rows(given.points))
    columns = {"program": "{program}", "points": "{points}", "samples": "{samples}"}
    columns |= {"seconds": "{seconds:.1f}", "points a second": "{rate:.1f}"}
    columns |= {"host, ms a point": "{host_ms:.2f}", "equal": "{equal}"}
    if given.json:
        print(json.dumps(rows, indent=1))
        return
    for row in rows:
        points = row["points"]
        row |= {"rate": points / row["seconds"], "host_ms": 1e3 * row["host_s"] / points}
    print(table_of(rows, columns))


def sweep_rows(points: int) -> Iterator[Row]:
    """A row for each program; each measurement in a process of its own."""
    spawned = multiprocessing.get_context("spawn")
    for name in _PROGRAMS:
        with spawned.Pool(1) as pool:
            seconds, equal = pool.apply(_seconds, (name, points))
        with spawned.Pool(1) as pool:
            host_s = pool.apply(_host_seconds, (name, points))
        row = {"program": name, "points": points, "samples": _SAMPLES, "seconds": seconds}
        yield row | {"host_s": host_s, "equal": equal}


def _sweep(name: str, points: int) -> tuple[Any, list[float]]:
    """The frame of a sweep, and the values of its points."""
    import jax
    import numpy as np

    import prism_jax as prism

    values = np.linspace(0.005, 0.03, points).tolist()
    program: Any = prism.compile_job(prism.load_job(name))
    options = {"num_samples": _SAMPLES, "key": jax.random.key(0)}
    return prism.sweep(program, {_PARAMETER: values}, **options), values


def _seconds(name: str, points: int) -> tuple[float, bool]:
    import equinox as eqx
    import jax
    import jax.numpy as jnp

    import prism_jax as prism

    use_all_cores()
    start = time.perf_counter()
    frame, values = _sweep(name, points)
    seconds, equal = time.perf_counter() - start, True
    program: Any = prism.compile_job(prism.load_job(name))
    for number in {0, points // 2, points - 1}:
        sigma = jnp.full_like(program.variability.step.sigma, values[number])
        point = eqx.tree_at(lambda of: of.variability.step.sigma, program, sigma)
        options = {"num_samples": _SAMPLES, "key": jax.random.key(0), "sampling": "plain"}
        law, row = prism.simulate(point, **options), frame.row(number, named=True)
        equal &= (row["mean_s"], row["p95_s"]) == (law.mean, law.quantile(0.95))
    return seconds, equal


def _host_seconds(name: str, points: int) -> float:
    """The CPU time of the calling thread, by the points beyond the first few."""
    from benchmarks import host_part

    host_part.as_for_an_accelerator()
    _sweep(name, _FEW)
    start = time.thread_time()
    _sweep(name, _FEW)
    few = time.thread_time() - start
    start = time.thread_time()
    _sweep(name, points)
    return (time.thread_time() - start - few) * points / (points - _FEW)


if __name__ == "__main__":
    main()
