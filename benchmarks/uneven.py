"""How accurate predictions are for jobs of uneven sequences, whose laws are known.

    python benchmarks/uneven.py                       # a table in Markdown; --json for one object
    python benchmarks/uneven.py --seeds 5 6 --steps 100 --make "--dp 8 --microbatches 24"

`../shared/data/straggler_traces/make_uneven_trace.py` makes the traces: documents of heavy-tailed
length packed into sequences, quadratic attention, and a reduction of the loss that no row shows. A
profile is fitted to 300 steps and scored on 10,000 other steps of the same job; it is also fitted
to 48 steps and scored on these 48. The brackets of a figure hold its scatter, because few steps
were fitted: the standard error of the same figure of the steps themselves. The brackets of a
component hold its distance from the truth, in standard errors.
"""

import argparse
import json
import pathlib
import shlex
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np


ROOT = pathlib.Path(__file__).resolve().parents[1]
MAKER = ROOT.parent / "shared/data/straggler_traces/make_uneven_trace.py"
if __name__ == "__main__":
    sys.path[0] = str(ROOT)
_SAMPLES = 50_000
# The true components with the maker's default options; the options below change them.
_COMPONENTS = {"rank": 0.004, "residual": 0.008, "step": 0.0, "worker_step": 0.0, "stall_rate": 0.0}
_GIVEN = {"rank": "--worker", "residual": "--noise"}


def uneven_row(seed: int, steps: int, of_law: int, make: list[str]) -> dict[str, Any]:
    """The scores of one trace: against `of_law` steps of its law or, for 0, against its own."""
    import jax

    import prism_jax as prism

    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "uneven"
        options = ["--seed", str(seed), "--steps", str(steps), "--truth", str(of_law), *make]
        command = [sys.executable, str(MAKER), str(out), *options]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        trace = prism.read_trace(f"{out}.parquet", prism.load_job(f"{out}_job.toml"))
        name = f"{out}_truth_step_times.csv" if of_law else f"{out}_step_times.csv"
        truth = prism.read_step_times(name)
    start = time.perf_counter()
    profile = prism.fit_profile(trace)
    row: dict[str, Any] = {"seed": seed, "steps": steps, "law": of_law}
    row["fit_s"] = time.perf_counter() - start
    program = prism.compile_profile(profile)
    law = prism.simulate(program, num_samples=_SAMPLES, key=jax.random.key(1))
    own = trace.step_times()
    row["mean"] = [law.mean / truth.mean() - 1, own.std() / len(own) ** 0.5 / own.mean()]
    p95 = np.quantile(own, 0.95)
    row["p95"] = [float(law.quantile(0.95)) / np.quantile(truth, 0.95) - 1, _scatter(own) / p95]
    row["std_ratio"] = [law.std / truth.std(ddof=1), _scatter_of_std(own)]
    row["components"] = {}
    found = {component.name: component for component in profile.fitted.components}
    for name, true in _COMPONENTS.items():
        if _GIVEN.get(name) in make:
            true = float(make[make.index(_GIVEN[name]) + 1])
        value, error = found[name].value or 0.0, found[name].standard_error or np.inf
        row["components"][name] = [value, error, (value - true) / error]
    row["notes"] = list(profile.fitted.notes)
    return row


def _scatter(steps: np.ndarray) -> float:
    """The standard error of the p95, by order statistics."""
    spread = (0.95 * 0.05 / len(steps)) ** 0.5
    low, high = np.quantile(steps, [0.95 - spread, min(0.95 + spread, 1.0)])
    return float(high - low) / 2


def _scatter_of_std(steps: np.ndarray) -> float:
    """The relative standard error of the standard deviation, by the fourth moment."""
    squares = (steps - steps.mean()) ** 2
    return float(squares.std() / squares.mean() / 2 / len(steps) ** 0.5)


def uneven_table(rows: list[dict[str, Any]]) -> str:
    """In Markdown."""
    header = ("seed", "steps", "against", "mean", "p95", "std ratio", *_COMPONENTS)
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for row in rows:
        percent = [f"{100 * v:+.2f} % ({100 * n:.2f})" for v, n in (row["mean"], row["p95"])]
        ratio = "{:.3f} ({:.3f})".format(*row["std_ratio"])
        parts = [f"{c[0]:.4f} ({c[2]:+.1f})" for c in row["components"].values()]
        against = f"{row['law']:,} others" if row["law"] else "themselves"
        cells = (str(row["seed"]), str(row["steps"]), against, *percent, ratio, *parts)
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", f"The longest fit takes {max(row['fit_s'] for row in rows):.0f} s."]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Accuracy for jobs of uneven sequences.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--seeds", type=int, nargs="+", default=range(5))
    parser.add_argument("--steps", type=int, nargs="+", default=[300, 48])
    parser.add_argument("--make", default="", help="further options of the maker")
    arguments = parser.parse_args()
    if not MAKER.exists():
        parser.error(f"there is no {MAKER}")
    rows = []
    for steps in arguments.steps:
        for seed in arguments.seeds:
            of_law = 10_000 if steps >= 300 else 0
            rows.append(uneven_row(seed, steps, of_law, shlex.split(arguments.make)))
            print(f"seed {seed}, {steps} steps", file=sys.stderr, flush=True)
    print(json.dumps(rows) if arguments.json else uneven_table(rows))


if __name__ == "__main__":
    main()
