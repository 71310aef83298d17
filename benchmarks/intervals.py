"""How honest confidence intervals are: python benchmarks/intervals.py

Simulates with many keys. For each figure of the law it prints how often the 95 % interval contains
the truth, and the mean width of the intervals over the width that the scatter of the estimates
calls for. Intervals that say "unknown" are counted as withheld, and left out of both.

Three kinds of work: the reference step of `_baselines.py` with a step factor; a replica of eight
sinks that end at the same time on average, and whose reductions vary by 10 %; and with `--job`, in
place of these, a job. The truth of the sinks is an integral, that of the others a long run.
"""

import json
import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from scipy.optimize import brentq
from scipy.special import log_ndtr


sys.path.insert(0, __file__.rpartition("/benchmarks/")[0])
from benchmarks import _baselines, _with_engine
from benchmarks._coverage import repeated
from prism_jax import Program, compile_job, load_job, simulate
from prism_jax.law import QUANTILES, figures
from prism_jax.lowering._sinks import Sink
from prism_jax.program import Variability
from prism_jax.program._assemble import assemble
from tests.helpers import graph_of, lognormal, one_kernel
from validation.tables import Row, options, table_of


# The step factor of the reference; the ends of sinks, and their reductions: mean and sigma.
STEP, END, REDUCTION, SINKS = 0.01, (1.0, 0.05), (0.5, 0.1), 8
# The truth is of so many times as many steps.
_LONGER = 256
_COLUMNS = {name: f"{{{name}}}" for name in ("job", "replicas", "sampling", "figure", "keys")}
_COLUMNS |= {name: f"{{{name}:.3f}}" for name in ("withheld", "coverage", "width")}

Figures = dict[str, tuple[float, float, float]]  # A value, and the ends of its interval.


def main() -> None:
    """Prints a table in Markdown."""
    many: Any = {"nargs": "+", "type": int, "default": (1, 16, 128, 1024, 8192)}
    known: Any = {"keys": (400, "with how many keys (400)"), "replicas": many}
    known |= {"steps": (16_384, "of each simulation (16,384)"), "job": (str, "a job, by name")}
    known["sampling"] = {"nargs": "+", "default": ("plain", "auto")}
    given = options(__doc__, **known, json=(False, "print the rows as JSON"))
    rows = list(interval_rows(given))
    print(json.dumps(rows, indent=1) if given.json else table_of(rows, _COLUMNS))


def interval_rows(given: Any) -> Iterator[Row]:
    """A row for each work, number of replicas, way of sampling and figure."""
    for job, program, truth in works(given.job, given.replicas, given.steps):
        for sampling in given.sampling:
            about = {"job": job, "replicas": program.num_replicas, "sampling": sampling}
            for row in cell_rows(program, truth, given.keys, given.steps, sampling):
                print(*about.values(), *row.values(), file=sys.stderr, flush=True)
                yield about | row


def cell_rows(
    program: Program, truth: dict[str, float], keys: int, steps: int, sampling: Any = "auto"
) -> Iterator[Row]:
    """A row for each figure of a program, simulated with many keys."""

    def found(seed: int) -> Figures:
        key = jax.random.key(seed)
        return figures_of(simulate(program, num_samples=steps, key=key, sampling=sampling))

    by_figure = repeated(found, range(keys))
    for name, value in truth.items():
        yield {"figure": name, "keys": keys} | covered(by_figure[name], value)


def works(
    job: str | None, replicas: list[int], steps: int
) -> Iterator[tuple[str, Program, dict[str, float]]]:
    """Programs, by name, with the true figures of each."""
    yield from of_reference(job, replicas, steps)
    for number in replicas if job is None else ():
        yield "sinks", sinks_that_tie(number), truth_of_sinks(number)


def of_reference(
    job: str | None, replicas: list[int], steps: int
) -> Iterator[tuple[str, Program, dict[str, float]]]:
    """A job, or the reference step, with the figures of a long run."""
    if job:
        program = compile_job(load_job(job))
        yield job, program, _long_run(program, steps)
        return
    for number in replicas:
        program = reference(number)
        yield "reference", program, _long_run(program, steps)


def covered(found: np.ndarray, truth: float) -> Row:
    """The columns of a row that are counted, from a value and the ends of its interval by key."""
    value, low, high = found.T
    known = ~np.isnan(low)
    row: Row = {"withheld": float(1 - known.mean()), "coverage": np.nan, "width": np.nan}
    if known.any():
        row["coverage"] = float(np.mean(((low <= truth) & (truth <= high))[known]))
        half = np.mean((high - low)[known]) / 2
        row["width"] = float(half / (1.96 * np.std(value, ddof=1)))
    return row


def figures_of(law: Any) -> Figures:
    """Of a law."""
    return {name: (value, *interval) for name, (value, interval) in figures(law).items()}


def reference(num_replicas: int) -> Program:
    """The reference step with a step factor."""
    return _with_engine.program(_baselines.reference_graph(), num_replicas, step=lognormal(STEP))


def sinks_that_tie(num_replicas: int) -> Program:
    """Ranks of one op each, which wait for nothing but the others' reductions."""
    graph = graph_of([()] * SINKS, rank=np.arange(SINKS))
    (mean, sigma), (seconds, spread) = END, REDUCTION
    laws: Any = {"gemm": lognormal(sigma), "reduce_scatter": lognormal(spread)}
    reduction = one_kernel("reduce_scatter", seconds, "network")
    sinks = [Sink(rank, last, reduction) for rank, last in enumerate(graph.last)]
    blocks = [one_kernel("gemm", mean)] * SINKS
    variability = Variability(residual=laws)
    return assemble(graph, blocks, sinks=sinks, variability=variability, num_replicas=num_replicas)


def truth_of_sinks(num_replicas: int) -> dict[str, float]:
    """The figures of `sinks_that_tie` by integration: the slowest of all replicas at each sink,
    then its reduction, then the latest of the sinks, which are independent.
    """
    z, weight = np.polynomial.hermite_e.hermegauss(80)
    weight = weight / weight.sum()
    (mean, sigma), (seconds, spread) = END, REDUCTION
    reduction = seconds * np.exp(spread * z - spread**2 / 2)

    def below(t: np.ndarray) -> np.ndarray:
        left = np.maximum(t[:, None] - reduction, 1e-9) / mean
        score = np.log(left) / sigma + sigma / 2
        return (np.exp(num_replicas * log_ndtr(score)) @ weight) ** SINKS

    grid = np.linspace(1.0, 4.0, 60_001)
    share = below(grid)
    middle, steps = (grid[1:] + grid[:-1]) / 2, np.diff(share)
    average = float(steps @ middle)
    truth = {"mean": average, "std": float(np.sqrt(steps @ (middle - average) ** 2))}

    def quantile(q: float) -> float:
        found: Any = brentq(lambda t: below(np.array([t]))[0] - q, 1.0, 4.0, xtol=1e-12)
        return found

    return truth | {name: quantile(q) for name, q in QUANTILES.items()}


def _long_run(program: Program, steps: int) -> dict[str, float]:
    """Sampled as tells most in its time: the truth's own error must be small beside any scatter."""
    sampling: Any = "plain" if program.num_replicas <= 16 else "importance"
    options: Any = {"key": jax.random.key(10**6), "sampling": sampling}
    law = simulate(program, num_samples=_LONGER * steps, **options)
    return {name: value for name, (value, *_) in figures_of(law).items()}


if __name__ == "__main__":
    main()
