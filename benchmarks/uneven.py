"""How accurate predictions are for jobs of uneven sequences, whose laws are known.

    python benchmarks/uneven.py    # a table in Markdown

`../shared/data/straggler_traces/make_uneven_trace.py` makes the traces: documents of heavy-tailed
length packed into sequences, quadratic attention, and a reduction of the loss that no row shows. A
profile is fitted to 300 steps and scored on 10,000 other steps of the same job; it is also fitted
to 48 steps and scored on these 48. The brackets of a figure hold its scatter, because few steps
were fitted: the standard error of the same figure of the steps themselves. The brackets of a
component hold its distance from the truth, in standard errors.
"""

import subprocess
import sys
import tempfile
import time

import jax
import numpy as np


sys.path.insert(0, __file__.rpartition("/benchmarks/")[0])
import prism_jax as prism
from validation.rows import DATA
from validation.tables import options, scattered, table


MAKER = DATA / "straggler_traces" / "make_uneven_trace.py"
_SEEDS, _OTHERS = range(5), 10_000
_SAMPLES = 50_000
# The true components with the maker's default options.
_COMPONENTS = {"rank": 0.004, "residual": 0.008, "step": 0.0, "worker_step": 0.0, "stall_rate": 0.0}


def _made(seed: int, steps: int, of_law: int):
    """A trace and steps to score on: so many of its law or, for 0, its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/uneven"
        words = f"{out} --seed {seed} --steps {steps} --truth {of_law}".split()
        maker = [sys.executable, str(MAKER), *words]
        subprocess.run(maker, check=True, stdout=subprocess.DEVNULL)
        trace = prism.read_trace(f"{out}.parquet", prism.load_job(f"{out}_job.toml"))
        name = "truth_step_times" if of_law else "step_times"
        return trace, prism.read_step_times(f"{out}_{name}.csv")


def _row(seed: int, steps: int) -> tuple[list[str], float]:
    """The scores of one trace, and the seconds of the fit."""
    of_law = _OTHERS if steps >= 300 else 0
    trace, truth = _made(seed, steps, of_law)
    start = time.perf_counter()
    profile = prism.fit_profile(trace)
    seconds = time.perf_counter() - start
    program = prism.compile_profile(profile)
    law = prism.simulate(program, num_samples=_SAMPLES, key=jax.random.key(1))
    own = trace.step_times()
    mean = law.mean / truth.mean() - 1, own.std() / len(own) ** 0.5 / own.mean()
    ours, high, other = float(law.quantile(0.95)), *(np.quantile(x, 0.95) for x in (own, truth))
    # The standard error of the p95, by order statistics.
    spread = (0.95 * 0.05 / len(own)) ** 0.5
    low, upper = np.quantile(own, [0.95 - spread, min(0.95 + spread, 1.0)])
    p95 = ours / other - 1, float(upper - low) / 2 / high
    # The relative standard error of the standard deviation, by the fourth moment.
    squares = (own - own.mean()) ** 2
    scatter = float(squares.std() / squares.mean() / 2 / len(own) ** 0.5)
    ratio = f"{law.std / truth.std(ddof=1):.3f} ({scatter:.3f})"
    cells = [str(seed), str(steps), f"{of_law:,} others" if of_law else "themselves"]
    cells += [scattered(*mean), scattered(*p95), ratio]
    found = {component.name: component for component in profile.fitted.components}
    for name, true in _COMPONENTS.items():
        value, error = found[name].value or 0.0, found[name].standard_error or np.inf
        cells.append(f"{value:.4f} ({(value - true) / error:+.1f})")
    print(f"seed {seed}, {steps} steps", file=sys.stderr, flush=True)
    return cells, seconds


def main() -> None:
    options(__doc__)
    if not MAKER.exists():
        sys.exit(f"there is no {MAKER}")
    rows = [_row(seed, steps) for steps in (300, 48) for seed in _SEEDS]
    header = ("seed", "steps", "against", "mean", "p95", "std ratio", *_COMPONENTS)
    print(table(header, (cells for cells, _ in rows)))
    print(f"\nThe longest fit takes {max(seconds for _, seconds in rows):.0f} s.")


if __name__ == "__main__":
    main()
